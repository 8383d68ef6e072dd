"""Faults in one of two TFRecord shards, each with its kind."""

import gzip
import os
import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from common.data.check.coco import load_coco
from tests.common.image_variants import early_end
from tests.common.record_writing import feature, write
from tests.faults.data_set import LFS_POINTER, DataSet, Fault, registry
from tools.conversion.coco_to_tfrecord import write_tfrecords

FAULTS: list[Fault] = []
fault = registry(FAULTS)
LABELS, ID, IMAGE = "image/object/class/label", "image/source_id", "image/encoded"
WIDTH, YMAX = "image/width", "image/object/bbox/ymax"


class RecordSet:
    """Two shards with indexes and a label map.

    Attributes:
        file: the damaged shard, with three records.
        number: index of the damaged record.
        options: options of the check.
    """

    def __init__(self, directory: pathlib.Path, seed: int):
        data, prefix = DataSet(directory / "data", 0), directory / "train"
        data.write()
        write_tfrecords(load_coco(data.json_path), data.images_dir, prefix, num_shards=2)
        self.pattern = f"{directory}/train-*.tfrecord"
        random = np.random.default_rng(seed)
        self.file = sorted(directory.glob("*.tfrecord"))[int(random.integers(2))]
        self.number = int(random.integers(1, 3))
        self.options: dict = {}

    @property
    def damaged_name(self) -> str:
        """The name of the damaged record in a report."""
        return f"{self.file} record {self.number}"

    @property
    def index(self) -> pathlib.Path:
        return pathlib.Path(f"{self.file}.idx")

    def records(self) -> list[bytes]:
        return list(tf.data.TFRecordDataset(str(self.file)).as_numpy_iterator())

    def edit(self, change: Callable) -> str:
        """Changes the damaged record's features; returns its name with the image id."""
        records = self.records()
        example = tf.train.Example.FromString(records[self.number])
        image_id = example.features.feature[ID].bytes_list.value[0].decode()
        change(example.features.feature)
        records[self.number] = example.SerializeToString()
        write(self.file, *records)
        return f"{self.damaged_name} (image {image_id})"


# --- indexes ---


@fault("index-made")
def missing_index(data):
    data.index.unlink()
    return [str(data.file)]


@fault("index-stale")
def damaged_index(data):
    data.index.write_bytes(bytes(range(128, 228)))
    return [str(data.file)]


@fault("index-longer")
def shard_cut_between_two_records(data):
    write(data.file, *data.records()[:-1])
    return [f"{data.file} has 2 records, {data.index.name} lists 3"]


# --- files ---


@fault("no-record-file")
def pattern_without_a_match(data):
    data.pattern = data.pattern.replace("train-", "trian-")
    return [data.pattern]


@fault("shard-missing")
def missing_shard(data):
    data.file.unlink()
    return [str(data.file)]


@fault("file-unreadable")
def pipe_as_shard(data):
    data.file.unlink()
    os.mkfifo(data.file)
    return [f"{data.file}: not a regular file"]


def file_fault(name: str, kind: str, change: Callable[[bytes], bytes]) -> None:
    """Adds a fault that changes the bytes of the shard by `change`."""

    @fault(kind, name)
    def damage(data):
        data.file.write_bytes(change(data.file.read_bytes()))
        return [str(data.file)]


file_fault("empty_shard", "file-empty", lambda content: b"")
file_fault("gzipped_shard", "file-gzip", gzip.compress)
file_fault("lfs_pointer_as_shard", "file-lfs-pointer", lambda content: LFS_POINTER)


@fault("file-truncated")
def truncated_shard(data):
    data.number = 2
    os.truncate(data.file, data.file.stat().st_size - 100)


def bit_fault(name: str, kind: str, position: int) -> None:
    """Adds a fault that flips a bit, `position` bytes after the start of a record."""

    @fault(kind, name)
    def damage(data):
        begin = sum(16 + len(record) for record in data.records()[: data.number])
        content = bytearray(data.file.read_bytes())
        content[begin + position] ^= 2
        data.file.write_bytes(content)


bit_fault("flipped_bit_in_a_length", "not-a-record", 1)
bit_fault("flipped_bit_in_a_record", "record-damaged", 52)


# --- records ---


@fault("not-an-example")
def record_that_is_no_example(data):
    records = data.records()
    records[data.number] = b"\xff\xff\xff" + bytes(50)
    write(data.file, *records)


@fault("record-completed")
def record_without_lists_of_boxes(data):
    def remove_objects(features):
        for key in [key for key in features if key.startswith("image/object")]:
            del features[key]

    return [data.edit(remove_objects)]


def value_fault(name: str, kind: str, key: str, change: Callable[[list], list] | None, *texts: str) -> None:
    """Adds a fault that changes the values of a key by `change`, or removes the key if `change` is None."""

    def edit(features):
        if change is None:
            del features[key]
        else:
            values = getattr(features[key], features[key].WhichOneof("kind")).value
            features[key].CopyFrom(feature(change(list(values))))

    @fault(kind, name)
    def damage(data):
        data.options["decode"] = kind == "image-damaged"
        name_with_id = data.edit(edit)
        return [data.damaged_name if key == ID else name_with_id, *texts]


value_fault("record_without_an_image", "record-key-missing", IMAGE, None, f"lacks {IMAGE}")
value_fault("labels_as_floats", "record-key-type", LABELS, lambda labels: list(map(float, labels)), LABELS)
value_fault("missing_side", "record-ragged", YMAX, lambda sides: sides[1:], f"{YMAX} 1")
value_fault("source_id_that_is_a_name", "record-value", ID, lambda _: [b"a.jpg"], f"{ID} b'a.jpg'")
value_fault("box_in_pixels", "box-in-pixels", YMAX, lambda sides: [54.0, *sides[1:]], ", 54.0]")
value_fault("wrong_width_in_record", "image-size-differs", WIDTH, lambda width: [width[0] + 1])
value_fault("damaged_scan_in_record", "image-damaged", IMAGE, lambda image: [early_end(image[0])])
