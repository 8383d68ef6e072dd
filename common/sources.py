"""An opened data set: its annotations, and the location of its images.

open_data.py opens data sets, datacheck/open_data.py checks them, too. `Source.read` reads them with DALI,
`tf_readers.examples` without. Other code does not depend on the kind of the data set.
"""

import abc
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from common import readers, tfrecord
from common.labels import LabelMap
from common.tfrecord import Records

if TYPE_CHECKING:
    from common.annotations import Annotations


class Source(abc.ABC):
    """An opened data set.

    Attributes:
        name: "coco", "tfrecord" or "images".
        annotations: of the images, in the order of reading; None where there are none.
    """

    name: str
    annotations: "Annotations | None"

    @property
    def size(self) -> int:
        """Number of images."""
        return self.annotations.num_images

    @property
    def label_map(self) -> LabelMap | None:
        return None if self.annotations is None else self.annotations.label_map

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of ids, annotations and reading order: a checkpoint must not resume on other data."""

    def image_name(self, row: int) -> str:
        """An image in words, for messages."""
        return self.annotations.image_name(row)

    @abc.abstractmethod
    def encoded(self, row: int) -> bytes:
        """The image file of one row of the annotations (or of the list), as it is; OSError where it fails."""

    @abc.abstractmethod
    def read(self, *, training: bool, **options: Any) -> readers.Nodes:
        """(jpegs, boxes, labels, image_ids) inside a DALI graph.

        Args:
            training: shuffled, endlessly; see readers.py.
            options: shard_id, num_shards, seed, and `name`, which is unique in the graph.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class CocoSource(Source):
    """A directory of images and the annotations of a COCO json, whose file names refer to it."""

    images_dir: str
    annotations: "Annotations"
    name = "coco"

    @functools.cached_property
    def fingerprint(self) -> str:
        return self.annotations.fingerprint()

    def encoded(self, row: int) -> bytes:
        return pathlib.Path(self.images_dir, self.annotations.file_names[row]).read_bytes()

    def read(self, *, training: bool, **options: Any) -> readers.Nodes:
        return readers.coco_reader(self.images_dir, self.annotations, training=training, **options)


@dataclasses.dataclass(frozen=True, eq=False)
class TFRecordSource(Source):
    """TFRecords in the schema of TensorFlow Object Detection.

    Attributes:
        files: the user's record files.
        records: what is read of them.
        annotations: of all records that are read, in the order of `files`.
        rows: int64 (I,), the row of the annotations that each of `records.spans` belongs to.
        names: of the records in words, one per row: `a.tfrecord record 5 (image 12)`.
        formats: how many images have a format, by Pillow's name of it, the most frequent first.
    """

    files: Sequence[str]
    records: Records
    annotations: "Annotations"
    rows: np.ndarray
    names: Sequence[str]
    formats: dict[str, int]
    name = "tfrecord"

    @functools.cached_property
    def fingerprint(self) -> str:
        # Sizes and order, not paths: the same records may lie elsewhere tomorrow.
        digest = hashlib.sha256(self.annotations.fingerprint().encode())
        digest.update(self.records.spans.tobytes())
        return digest.hexdigest()

    def image_name(self, row: int) -> str:
        return self.names[row]

    def encoded(self, row: int) -> bytes:
        file, offset, size = self.records.spans[self.rows == row][0].tolist()
        return tfrecord.image_of(tfrecord.read_record(self.records.files[file], offset, size))

    def read(self, *, training: bool, **options: Any) -> readers.Nodes:
        return readers.tfrecord_reader(self.records, self.label_map, training=training, **options)


@dataclasses.dataclass(frozen=True)
class ImageListSource(Source):
    """Image files without annotations, for inference; image ids are positions in `files`, from 0."""

    files: tuple[str, ...]
    name = "images"
    annotations = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(map(os.fspath, self.files)))

    @property
    def size(self) -> int:
        return len(self.files)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("\0".join(self.files).encode("utf-8", "surrogateescape")).hexdigest()

    def image_name(self, row: int) -> str:
        return repr(self.files[row])

    def encoded(self, row: int) -> bytes:
        return pathlib.Path(self.files[row]).read_bytes()

    def read(self, *, training: bool, seed: int = 0, **options: Any) -> readers.Nodes:
        refuse_training(training)
        return readers.file_reader(self.files, **options)


def refuse_training(training: bool) -> None:
    """ValueError for training on images without annotations."""
    if training:
        raise ValueError("images without annotations are nothing to train on")
