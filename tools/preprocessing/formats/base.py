"""Classes and functions that all image sources share."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.args import ImagePolicy
from common.data.check.image_headers import ImageFacts
from common.data.check.issues import Issues
from common.data.check.tfrecord import expand_pattern
from common.errors import UserError
from common.files import store_cached

NO_LABEL = -1
ARRAYS = ("uint8", "float32")  # dtypes


class Image(NamedTuple):
    """One image of a source.

    Attributes:
        name: name of the image in the data. Several images can have the same name.
        file: path of the file that contains the image; "" if there is none.
        place: numbers that locate the image in its file.
        form: the dtype, if the image is an array; "encoded" or "" for an encoded image. For an image in
            LMDB, a key of lmdb_images._READERS.
    """

    name: str
    file: str = ""
    label: int | None = None
    place: tuple[int, ...] = ()
    form: str = ""


class Reader(NamedTuple):
    """A reader operator of DALI and its arguments.

    Attributes:
        image: position of the image in the reader's outputs. The TFRecord reader has keys, not positions.
        label: position or key of the label in the outputs, a list of one number; None without labels.
        label_is_text: whether the label is a text of decimal digits.
    """

    operator: str
    arguments: dict[str, Any]
    image: int | str = 0
    label: int | str | None = None
    label_is_text: bool = False


Found = tuple[Image, str, bytes | memoryview | np.ndarray | ImageFacts]


class Content(NamedTuple):
    """All images that a format finds, including those that cannot be used.

    Attributes:
        images: tuples (Image, name for messages, content, or the result if it was checked already).
        load: reads one image: encoded, uint8 (bytes,), or an array (H, W, C).
        make_reader: function (images, has_labels) -> DALI's reader. Returns None if DALI would misread the
            images.
        can_shuffle: whether the images can be read in any order.
    """

    images: Iterable[Found]
    load: Callable[[Image], np.ndarray]
    make_reader: Callable[[Sequence[Image], bool], Reader | None]
    can_shuffle: bool = True


@dataclasses.dataclass
class Opening:
    """The state of a source that is being opened.

    Attributes:
        path, annotations, images: the values of --input, --annotations and --images.
        policy: what to do about images that cannot be used.
    """

    path: str
    policy: ImagePolicy
    annotations: str | None
    images: str | None
    issues: Issues
    label_names: Mapping[int, str]

    def containers(self) -> Iterator[str]:
        """Yields the files that --input names by comma-separated globs."""
        for file in expand_pattern(self.path):
            check_file(file)
            yield file


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSource:
    """Checked images in a fixed order, each with a name and perhaps a label.

    Attributes:
        kind: the value of --source.
        reader: DALI's reader of these images; None if no reader of DALI reads them correctly.
        label_names: label -> name; {} if labels have no names.
        is_decoded: whether the images are arrays.
    """

    kind: str
    images: Sequence[Image]
    content: Content
    reader: Reader | None
    label_names: Mapping[int, str]
    is_decoded: bool

    @property
    def size(self) -> int:
        return len(self.images)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        return np.array([NO_LABEL if i.label is None else i.label for i in self.images], np.int32)

    @property
    def files(self) -> Sequence[str]:
        return list(dict.fromkeys(image.file for image in self.images if image.file))

    def load(self, position: int) -> np.ndarray:
        """Reads an image without DALI: encoded, uint8 (bytes,), or an array (H, W, C)."""
        image = self.images[position]
        try:
            return self.content.load(image)
        except OSError as error:
            raise UserError(f"{image.file}: {error.strerror}") from error


def check_label(label: float, owner: str) -> int:
    """Returns the label as an int, or raises UserError."""
    if not (-(2**31) <= label < 2**31 and label == int(label)):
        raise UserError(f"{owner} has the label {label}: a label must be a whole number that fits in int32")
    return int(label)


def check_file(file: str) -> None:
    """Raises UserError unless the path is a regular file with content."""
    if not os.path.isfile(file) or not os.path.getsize(file):
        raise UserError(f"{file} is missing, empty or not a regular file: copy or write it again")


def store_indexes(images: Sequence[Image], head: str, line: Callable[[int, Image], str]) -> dict[str, str]:
    """Writes indexes for DALI into the cache. Returns a dict: file with images -> index file.

    Args:
        head: text before the lines of an index; `{}` is replaced by the number of lines.
        line: function (position of the image in `images`, image) -> line of the index.
    """
    lines: dict[str, list[str]] = {}
    for number, image in enumerate(images):
        lines.setdefault(image.file, []).append(line(number, image))
    return {
        file: os.fspath(store_cached(f"{head.format(len(of))}{''.join(of)}".encode(), ".idx"))
        for file, of in lines.items()
    }


def mapped(file: str) -> memoryview:
    """Maps a file that is not empty into memory."""
    return np.memmap(file, np.uint8, mode="r").data


def read_bytes(path: str, offset: int = 0, size: int = -1) -> np.ndarray:
    with open(path, "rb") as stream:
        stream.seek(offset)
        return np.frombuffer(stream.read(size), np.uint8)
