"""A data set as one object: what it holds, and how to read it with DALI or with plain tf.data.

open_data.py makes them from the data flags. Everything below the flags asks the source and does not care
where the images come from. What a source hands out has been checked: every annotation, and the header and the
end of every image.
"""

import abc
import dataclasses
import functools
import hashlib
import os
import pathlib
import re

from common import readers, tfrecord_index
from common.annotations import Annotations
from common.datacheck import tfrecord, tfrecord_example, tfrecord_walk
from common.datacheck.coco import load_coco
from common.datacheck.images import ImagePolicy
from common.errors import UserError
from common.labels import LabelMap


class Source(abc.ABC):
    """A data set, to read inside a DALI graph; tf_readers.py reads the same examples by TensorFlow alone.

    Attributes:
        name: "coco", "tfrecord" or "images".
    """

    name: str

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of images."""

    @property
    @abc.abstractmethod
    def annotations(self) -> Annotations | None:
        """The checked annotations; None where there are none."""

    @property
    def label_map(self) -> LabelMap | None:
        return None if self.annotations is None else self.annotations.label_map

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of ids, annotations and reading order: a checkpoint must not resume on other data."""

    @abc.abstractmethod
    def encoded(self, row: int) -> bytes:
        """The image file of one row of the annotations (or of the list), as it is; OSError where it fails."""

    @abc.abstractmethod
    def read(
        self, *, shard_id: int, num_shards: int, training: bool, seed: int, name: str = "reader"
    ) -> readers.Nodes:
        """(jpegs, boxes, labels, image_ids) inside a DALI graph, where `name` is unique; see readers.py."""


@dataclasses.dataclass(frozen=True)
class CocoSource(Source):
    """A directory of images and a COCO json.

    Attributes:
        images_dir: what the json's file names refer to.
        annotations_path: the json.
        policy: about images that cannot be used.
    """

    images_dir: str
    annotations_path: str
    policy: ImagePolicy = ImagePolicy()
    name = "coco"

    @property
    def size(self) -> int:
        return self.annotations.num_images

    @functools.cached_property
    def annotations(self) -> Annotations:
        return load_coco(self.annotations_path, self.images_dir, policy=self.policy)

    @functools.cached_property
    def fingerprint(self) -> str:
        return self.annotations.fingerprint()

    def encoded(self, row: int) -> bytes:
        return pathlib.Path(self.images_dir, self.annotations.file_names[row]).read_bytes()

    def read(
        self, *, shard_id: int, num_shards: int, training: bool, seed: int, name: str = "reader"
    ) -> readers.Nodes:
        return readers.coco_reader(
            self.images_dir,
            self.annotations,
            training=training,
            shard_id=shard_id,
            num_shards=num_shards,
            seed=seed,
            name=name,
        )


@dataclasses.dataclass(frozen=True)
class TFRecordSource(Source):
    """TFRecords in the schema of TensorFlow Object Detection.

    Attributes:
        pattern: glob of the record files.
        label_map_path: the categories; by default `<prefix>.label_map.json`, as common/tfrecord.py writes it.
        policy: about images that cannot be used.
    """

    pattern: str
    label_map_path: str | None = None
    policy: ImagePolicy = ImagePolicy()
    name = "tfrecord"

    @functools.cached_property
    def files(self) -> list[str]:
        return tfrecord_index.expand_pattern(self.pattern)

    @functools.cached_property
    def records(self) -> tfrecord.Records:
        return tfrecord.open_records(self.files, self.label_map, policy=self.policy)

    @property
    def size(self) -> int:
        return self.annotations.num_images

    @property
    def annotations(self) -> Annotations:
        return self.records.annotations

    @functools.cached_property
    def label_map(self) -> LabelMap:
        return LabelMap.load(self.label_map_path or _find_label_map(self.files))

    @functools.cached_property
    def fingerprint(self) -> str:
        # Sizes and order, not paths: the same records may lie elsewhere tomorrow.
        digest = hashlib.sha256(self.annotations.fingerprint().encode())
        digest.update(self.records.spans.tobytes())
        return digest.hexdigest()

    def encoded(self, row: int) -> bytes:
        file, offset, size = self.records.spans[self.records.rows == row][0].tolist()
        with open(self.records.files[file], "rb") as stream:
            stream.seek(offset + tfrecord_walk.HEADER)
            return tfrecord_example.image_of(stream.read(size - tfrecord_walk.FRAME))

    def read(
        self, *, shard_id: int, num_shards: int, training: bool, seed: int, name: str = "reader"
    ) -> readers.Nodes:
        return readers.tfrecord_reader(
            self.records.files,
            self.label_map,
            training=training,
            shard_id=shard_id,
            num_shards=num_shards,
            seed=seed,
            name=name,
            indexes=self.records.indexes,
            has_crowds=bool(self.annotations.is_crowd.any()),
            has_empty_boxes=self.annotations.target_boxes.num_dropped > 0,
        )


@dataclasses.dataclass(frozen=True)
class ImageListSource(Source):
    """Image files without annotations, for inference; image ids are positions in `files`, from 0."""

    files: tuple[str, ...]
    policy: ImagePolicy = ImagePolicy()
    name = "images"

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(map(os.fspath, self.files)))

    @property
    def size(self) -> int:
        return len(self.files)

    @property
    def annotations(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("\0".join(self.files).encode("utf-8", "surrogateescape")).hexdigest()

    def encoded(self, row: int) -> bytes:
        return pathlib.Path(self.files[row]).read_bytes()

    def read(
        self, *, shard_id: int, num_shards: int, training: bool, seed: int, name: str = "reader"
    ) -> readers.Nodes:
        _refuse_training(training)
        return readers.file_reader(self.files, shard_id=shard_id, num_shards=num_shards, name=name)


def _refuse_training(training: bool) -> None:
    if training:
        raise ValueError("images without annotations are nothing to train on")


def _find_label_map(files: list[str]) -> str:
    prefixes = {re.sub(r"(-\d+-of-\d+)?(\.tfrecords?)?$", "", file) for file in files}
    found = sorted(
        path for path in (f"{prefix}.label_map.json" for prefix in prefixes) if os.path.isfile(path)
    )
    if not found:
        raise UserError(
            f"no label map beside {files[0]} ({min(prefixes)}.label_map.json): give --label_map=FILE, json or"
            " pbtxt; or the conversion did not finish"
        )
    if len({LabelMap.load(path) for path in found}) > 1:
        raise UserError(f"{found[0]} and {found[1]} differ: give --label_map=FILE")
    return found[0]
