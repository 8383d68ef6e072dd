"""Images as files that anybody can look at: one each in a directory, or the first ones on one sheet."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from common.evaluation import drawing
from tools.preprocessing.output_encoding import Encoding
from tools.preprocessing.output_names import FileNames
from tools.preprocessing.output_sample import Sample, counted, write_files

SHEET_IMAGES = 64
_SHEET_COLUMNS = 8
_SHEET_WIDTH = 1280  # pixels


@dataclasses.dataclass(frozen=True)
class PictureOutput:
    """A file for each image in a directory, named after its source (output_names.py)."""

    directory: pathlib.Path
    encoding: Encoding

    def write(self, samples: Iterable[Sample], total: int) -> str:
        names = FileNames(self.encoding.suffix)

        def write(staged: pathlib.Path) -> None:
            for sample in counted(samples, total):
                path = staged / names.of(sample.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.encoding.encode(self.encoding.picture(sample)))

        write_files(self.directory, write, output=str(self.directory))
        return f"{total} pictures ({self.encoding.image_format}): {self.directory}"


@dataclasses.dataclass(frozen=True)
class SheetOutput:
    """The first SHEET_IMAGES images on one picture, for a look; a single image as it is.

    No more samples are read than are shown.
    """

    path: pathlib.Path
    encoding: Encoding

    def write(self, samples: Iterable[Sample], total: int) -> str:
        shown = min(total, SHEET_IMAGES)

        def write(staged: pathlib.Path) -> None:
            first = counted(itertools.islice(samples, shown), shown)
            sheet = _sheet([_at_most(self.encoding.picture(sample), shown) for sample in first])
            (staged / self.path.name).write_bytes(self.encoding.encode(sheet))

        write_files(self.path.parent, write, output=str(self.path))
        what = "the image" if total == 1 else f"contact sheet of {shown} of {total} images"
        return f"{what}: {self.path}"


def _sheet(pictures: Sequence[np.ndarray]) -> np.ndarray:
    if len(pictures) == 1:
        return pictures[0]
    columns = min(math.ceil(math.sqrt(len(pictures))), _SHEET_COLUMNS)  # about as many as rows
    return drawing.contact_sheet(pictures, columns=columns, width=_SHEET_WIDTH)


def _at_most(picture: np.ndarray, count: int) -> np.ndarray:
    """uint8 (h, w, 3), not larger than the sheet where `count` are on it: 64 photographs fill gigabytes."""
    if count == 1:
        return picture
    image = Image.fromarray(picture).convert("RGB")
    image.thumbnail((_SHEET_WIDTH, _SHEET_WIDTH))
    return np.asarray(image)
