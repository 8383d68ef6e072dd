"""What all sources of images have in common."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.args import ImagePolicy
from common.datacheck.image_headers import ImageFacts
from common.datacheck.issues import Issues
from common.datacheck.tfrecord import expand_pattern
from common.errors import UserError
from common.files import store_cached

NO_LABEL = -1


class Image(NamedTuple):
    """One image of a source.

    Attributes:
        name: as the data have it: it may be repeated, or lead out of a directory.
        file: path of the file that holds it; "" where there is none.
        label: None where it has none.
        place: numbers that locate it in its file; each format has its own.
        form: dtype of an array; or the form of its record, where a format has several.
    """

    name: str
    file: str = ""
    label: int | None = None
    place: tuple[int, ...] = ()
    form: str = ""

    @property
    def is_array(self) -> bool:
        """Whether it is decoded."""
        return self.form in ("uint8", "float32")


class Reader(NamedTuple):
    """A reader operator of DALI and its arguments.

    Attributes:
        operator: its name in fn.readers.
        arguments: all but its name, order and shards.
        image: which of its outputs is the image: a position, or a key of TFRecord's dict.
        label: which of its outputs is the label, one number in a list; None: there is none.
        label_is_text: the label is written in decimal digits.
    """

    operator: str
    arguments: dict[str, Any]
    image: int | str = 0
    label: int | str | None = None
    label_is_text: bool = False


Found = tuple[Image, str, bytes | memoryview | np.ndarray | ImageFacts]


class Content(NamedTuple):
    """What a format finds, before it is known which images can be used.

    Attributes:
        images: each with its description for messages, and its content or what a check of it found.
        load: reads one: uint8 (bytes,), encoded; or an array (H, W, C).
        make_reader: (images that are kept, whether they have labels) -> DALI's reader of them; None where it
            would misread them.
        can_shuffle: the images can be read in any order.
    """

    images: Iterable[Found]
    load: Callable[[Image], np.ndarray]
    make_reader: Callable[[Sequence[Image], bool], Reader | None]
    can_shuffle: bool = True


@dataclasses.dataclass
class Opening:
    """A source that is being opened: flags of these names, and what is found.

    Attributes:
        path: --input.
        policy: about images that cannot be used.
        issues: about all images and files.
        label_names: by label.
    """

    path: str
    policy: ImagePolicy
    annotations: str | None
    images: str | None
    issues: Issues
    label_names: Mapping[int, str]

    def containers(self) -> Iterator[str]:
        """The files that --input names by a glob, or by several with commas between them."""
        for file in expand_pattern(self.path):
            check_file(file)
            yield file


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSource:
    """Images in a fixed order, from files or containers, each with a name and perhaps a label.

    All were checked before, and can be used.

    Attributes:
        kind: as in --source.
        images: of the source.
        content: how to read them.
        reader: DALI's reader of these images; None where no reader of DALI reads them correctly.
        label_names: by label; {} where they have none.
        is_decoded: images are arrays.
    """

    kind: str
    images: Sequence[Image]
    content: Content
    reader: Reader | None
    label_names: Mapping[int, str]
    is_decoded: bool

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.images)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """int32 (size,), NO_LABEL where an image has none."""
        return np.array([NO_LABEL if i.label is None else i.label for i in self.images], np.int32)

    @property
    def files(self) -> Sequence[str]:
        """The files that are read."""
        return list(dict.fromkeys(image.file for image in self.images if image.file))

    def load(self, position: int) -> np.ndarray:
        """Reads an image without DALI: uint8 (bytes,), encoded; or an array (H, W, C)."""
        image = self.images[position]
        try:
            return self.content.load(image)
        except OSError as error:
            raise UserError(f"{image.file}: {error.strerror}") from error


def check_label(label: float, owner: str) -> int:
    """The label as a whole number; UserError where it is not an int32."""
    if not (-(2**31) <= label < 2**31 and label == int(label)):  # a NaN is neither
        raise UserError(f"{owner} has the label {label}: labels are whole numbers within 32 bits")
    return int(label)


def check_file(file: str) -> None:
    """Raises UserError for an empty file, and for anything that is not a regular file."""
    if not os.path.isfile(file) or not os.path.getsize(file):
        raise UserError(f"{file} is missing, empty or no regular file: copy or write it again")


def store_indexes(images: Sequence[Image], head: str, line: Callable[[int, Image], str]) -> dict[str, str]:
    """Writes DALI's index of each file of images to the cache.

    Args:
        images: those to be read.
        head: of the text, before the lines; `{}` is their number.
        line: (number of the image, image) -> its line.

    Returns:
        File -> path of its index.
    """
    lines: dict[str, list[str]] = {}
    for number, image in enumerate(images):
        lines.setdefault(image.file, []).append(line(number, image))
    return {
        file: os.fspath(store_cached(f"{head.format(len(of))}{''.join(of)}".encode(), ".idx"))
        for file, of in lines.items()
    }


def mapped(file: str) -> memoryview:
    """The content of a file that is not empty, read when it is used."""
    return np.memmap(file, np.uint8, mode="r").data


def read_bytes(path: str, offset: int = 0, size: int = -1) -> np.ndarray:
    """Part of a file, uint8 (size,)."""
    with open(path, "rb") as stream:
        stream.seek(offset)
        return np.frombuffer(stream.read(size), np.uint8)
