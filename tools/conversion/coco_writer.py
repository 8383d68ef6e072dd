"""Writes annotations as a COCO json, and the images of such a json as files.

Format: https://cocodataset.org/#format-data
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from common.data.annotations import Annotations
from common.data.check import images
from common.errors import UserError
from common.files import write_bytes, write_into

_DECIMALS = 3  # of coordinates in pixels: float32 is not more precise


def write_coco(annotations: Annotations, path: str | os.PathLike) -> None:
    """Writes a COCO json from which `load_coco` reads equal annotations. Annotation ids start at 1.

    The file appears only when it is complete. Raises OSError.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, msgspec.json.encode(annotations.ground_truth()) + b"\n")


def write_images(
    directory: str, names: Sequence[str], encoded: Callable[[int], bytes], *, overwrite: bool = False
) -> None:
    """Writes images as files, all or none.

    Args:
        names: the paths of the files in `directory`.
        encoded: function that returns the content of file number i.
        overwrite: whether to replace existing files with these names.

    Raises:
        UserError: a file exists already.
        OSError: a file cannot be written, or `encoded` raises it.
    """
    for path in (os.path.join(directory, name) for name in names):
        if os.path.lexists(path) and not overwrite:
            hint = "choose another directory with --images or --output, or give --overwrite"
            raise UserError(f"{path} exists already: {hint}")

    def write(staged: pathlib.Path) -> None:
        def write_one(number: int) -> None:
            file = staged / names[number]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(number))

        list(images.in_threads(write_one, range(len(names)), images.DECODERS, "Writing images"))

    os.makedirs(directory, exist_ok=True)
    write_into(directory, write)


def file_names(annotations: Annotations, encoded: Callable[[int], bytes]) -> list[str]:
    """Returns the file names of images from TFRecords: the names in the records.

    If a name cannot be used or occurs twice, all images are named `<image id>.<format>`.
    `encoded` returns the bytes of image number i.
    """
    names = [str(pathlib.PurePosixPath(name)) for name in annotations.file_names]  # "" becomes "."
    if "." not in names and not any(map(images.path_fault, names)) and len(set(names)) == len(names):
        return names
    formats = [images.inspect(encoded(row)).image_format for row in range(len(names))]
    suffixes = ["jpg" if image_format == "JPEG" else image_format.lower() for image_format in formats]
    return [f"{i}.{suffix}" for i, suffix in zip(annotations.image_ids, suffixes, strict=True)]


def round_boxes(annotations: Annotations) -> Annotations:
    """Rounds boxes to thousandths of a pixel, because TFRecords store float32 fractions.

    For example, 68.0000019 becomes 68 again.
    """
    boxes = annotations.boxes_ltwh_px
    edges = np.round(np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1), _DECIMALS)
    sides = np.round(edges[:, 2:] - edges[:, :2], _DECIMALS)
    is_box_area = annotations.areas == boxes[:, 2] * boxes[:, 3]
    areas = annotations.areas.astype(np.float32).astype(str).astype(np.float64)
    return dataclasses.replace(
        annotations,
        boxes_ltwh_px=np.concatenate([edges[:, :2], sides], axis=1),
        areas=np.where(is_box_area, sides[:, 0] * sides[:, 1], areas),
    )
