"""Faults of TFRecords: two sound shards are written, and one thing in them goes wrong."""

import gzip
import os
import pathlib
import shutil
import struct

import tensorflow as tf

from common.annotations import Annotations
from common.datacheck.coco import load_coco
from tests.faults.data_set import LFS_POINTER, DataSet, Fault, registry
from tools.conversion.coco_to_tfrecord import write_tfrecords

NUM_SHARDS = 2
FAULTS: list[Fault] = []
fault = registry(FAULTS)
LABELS = "image/object/class/label"
XMIN, YMAX = "image/object/bbox/xmin", "image/object/bbox/ymax"


class RecordSet:
    """A sound set of TFRecords to be spoilt.

    Attributes:
        data: the COCO data set that it was written from.
        files: the shards.
        file: the victim shard.
        number: the victim record in it, from 0.
        options: of the check.
    """

    def __init__(self, directory: pathlib.Path, seed: int):
        self.data = DataSet(directory, seed)
        self.data.write()
        annotations: Annotations = load_coco(self.data.json_path, self.data.images_dir)
        prefix = directory / "records" / "train"
        self.files = [
            pathlib.Path(f)
            for f in write_tfrecords(annotations, self.data.images_dir, prefix, num_shards=NUM_SHARDS)
        ]
        self.random = self.data.random
        self.file = self.files[int(self.random.integers(NUM_SHARDS))]
        self.number = int(self.random.integers(1, 3))
        self.pattern = f"{prefix}-*.tfrecord"
        self.options: dict = {}

    @property
    def place(self) -> list[str]:
        """How a report must name the victim."""
        return [self.file.name, f"record {self.number}"]

    def records(self) -> list[bytes]:
        return list(tf.data.TFRecordDataset(str(self.file)).as_numpy_iterator())

    def offset(self) -> int:
        """Where the victim record begins in its file."""
        return sum(16 + len(record) for record in self.records()[: self.number])

    def image_id(self) -> str:
        features = tf.train.Example.FromString(self.records()[self.number]).features.feature
        return features["image/source_id"].bytes_list.value[0].decode()

    def edit(self, change) -> list[str]:
        """Rewrites the shard with one example changed; returns its place and image id."""
        words = [*self.place, f"image {self.image_id()}"]
        records = self.records()
        example = tf.train.Example.FromString(records[self.number])
        change(example.features.feature)
        records[self.number] = example.SerializeToString()
        self.rewrite(records)
        return words

    def rewrite(self, records: list[bytes]) -> None:
        with tf.io.TFRecordWriter(str(self.file)) as writer:
            for record in records:
                writer.write(record)


def index_of(file: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(f"{file}.idx")


# --- indexes ---


@fault("index-made")
def no_index(data):
    index_of(data.file).unlink()
    return [data.file.name]


@fault("index-stale")
def index_of_a_file_that_grew(data):
    index = index_of(data.file)
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:-1]))
    return [data.file.name]


@fault("index-longer")
def file_cut_between_two_records(data):
    data.rewrite(data.records()[:-1])
    return [data.file.name, "has 2 records", "lists 3"]


@fault("index-stale")
def index_of_a_file_that_shrank_and_changed(data):
    data.rewrite(data.records()[:0:-1])
    return [data.file.name]


@fault("shard-missing")
def a_shard_too_few(data):
    data.file.unlink()
    return [data.file.name]


@fault("index-stale")
def indexes_swapped(data):
    first, second = map(index_of, data.files)
    shutil.move(first, "swap.tmp")
    shutil.move(second, first)
    shutil.move("swap.tmp", second)
    return [data.files[0].name, data.files[1].name]


@fault("index-stale")
def index_of_garbage(data):
    index_of(data.file).write_bytes(data.random.bytes(100))
    return [data.file.name]


# --- files ---


@fault("no-record-file")
def glob_that_matches_nothing(data):
    data.pattern = data.pattern.replace("train", "trian")
    return [data.pattern]


@fault("record-truncated")
def truncated_tail(data):
    data.number = 2
    size = data.file.stat().st_size
    os.truncate(data.file, size - int(data.random.integers(1, 500)))
    return data.place


@fault("record-truncated")
def cut_in_a_header(data):
    os.truncate(data.file, data.offset() + 5)
    return [data.file.name]


@fault("record-damaged")
def a_flipped_bit_in_a_record(data):
    words = data.place
    content = bytearray(data.file.read_bytes())
    content[data.offset() + 12 + 40] ^= 16
    data.file.write_bytes(content)
    return words


@fault("not-a-record")
def a_flipped_bit_in_a_length(data):
    words = [data.file.name, f"record {data.number}"]
    content = bytearray(data.file.read_bytes())
    content[data.offset() + 1] ^= 2
    data.file.write_bytes(content)
    return words


@fault("not-a-record")
def bytes_of_another_kind(data):
    data.file.write_bytes(b"PK\x03\x04" + data.random.bytes(9000))
    return [data.file.name]


@fault("record-gzip")
def gzipped_records(data):
    data.file.write_bytes(gzip.compress(data.file.read_bytes()))
    return [data.file.name]


@fault("record-lfs-pointer")
def lfs_pointer_in_place_of_records(data):
    data.file.write_bytes(LFS_POINTER)
    return [data.file.name]


@fault("record-file-empty")
def empty_shard(data):
    data.file.write_bytes(b"")
    return [data.file.name]


@fault("record-file-unreadable")
def pipe_among_the_shards(data):
    data.file.unlink()
    os.mkfifo(data.file)
    return [data.file.name]


@fault("record-file-unreadable")
def directory_among_the_shards(data):
    data.file.unlink()
    data.file.mkdir()
    return [data.file.name]


# --- records ---


@fault("not-an-example")
def record_of_another_kind(data):
    records = data.records()
    records[data.number] = b"\xff\xff\xff" + data.random.bytes(50)
    data.rewrite(records)
    return data.place


def _without(key: str):
    def spoil(data):
        place = data.place
        words = data.edit(lambda features: features.pop(key))
        return [*(place if key == "image/source_id" else words), key]

    spoil.__name__ = f"record_without_{key.replace('/', '_')}"
    fault("record-key-missing")(spoil)


for _key in ("image/encoded", "image/source_id", "image/height", "image/width"):
    _without(_key)


@fault("record-completed")
def record_without_lists_of_boxes(data):
    def change(features):
        for key in [key for key in features if key.startswith("image/object")]:
            del features[key]

    return data.edit(change)


@fault("record-key-type")
def labels_stored_as_floats(data):
    def change(features):
        labels = [float(value) for value in features[LABELS].int64_list.value]
        del features[LABELS]
        features[LABELS].float_list.value.extend(labels)

    return [*data.edit(change), LABELS]


@fault("record-key-type")
def height_stored_as_text(data):
    def change(features):
        del features["image/height"]
        features["image/height"].bytes_list.value.append(b"72")

    return [*data.edit(change), "image/height"]


@fault("record-ragged")
def one_side_too_few(data):
    return [*data.edit(lambda features: features[YMAX].float_list.value.pop()), YMAX]


@fault("record-ragged")
def one_label_too_many(data):
    return data.edit(lambda features: features[LABELS].int64_list.value.append(5))


@fault("record-value")
def source_id_that_is_a_name(data):
    def change(features):
        features["image/source_id"].bytes_list.value[0] = b"a.jpg"

    data.edit(change)
    return [*data.place, "a.jpg"]


@fault("record-value")
def image_of_height_0(data):
    def change(features):
        features["image/height"].int64_list.value[0] = 0

    return data.edit(change)


@fault("unknown-category")
def label_outside_the_label_map(data):
    def change(features):
        features[LABELS].int64_list.value[0] = 77

    return [*data.edit(change), "77"]


@fault("box-not-finite")
def nan_in_a_box(data):
    def change(features):
        features[XMIN].float_list.value[0] = float("nan")

    return data.edit(change)


@fault("box-negative")
def sides_swapped(data):
    def change(features):
        features[XMIN].float_list.value[0] = 0.99

    return data.edit(change)


@fault("box-outside")
def box_over_the_lower_edge(data):
    def change(features):
        features[YMAX].float_list.value[0] = 1.2

    return [*data.edit(change), "1.2"]


@fault("box-in-pixels")
def box_in_pixels(data):
    def change(features):
        features[YMAX].float_list.value[0] = 54.0

    return [*data.edit(change), "54.0"]


@fault("repeated-image-id")
def image_id_in_two_shards(data):
    other = next(file for file in data.files if file != data.file)
    record = next(tf.data.TFRecordDataset(str(other)).as_numpy_iterator())
    features = tf.train.Example.FromString(record).features.feature
    image_id = features["image/source_id"].bytes_list.value[0]

    def change(features):
        features["image/source_id"].bytes_list.value[0] = image_id

    data.edit(change)
    return [f"image {image_id.decode()}", data.file.name, other.name]


# --- images within records ---


def _encoded(change):
    def apply(features):
        (content,) = features["image/encoded"].bytes_list.value
        features["image/encoded"].bytes_list.value[0] = change(content)

    return apply


@fault("image-truncated")
def truncated_image_in_a_record(data):
    return data.edit(_encoded(lambda content: content[: len(content) // 2]))


@fault("image-empty")
def empty_image_in_a_record(data):
    return data.edit(_encoded(lambda content: b""))


@fault("not-an-image")
def text_in_a_record(data):
    return data.edit(_encoded(lambda content: b"404: not found\n" * 20))


@fault("image-damaged")
def damaged_scan_in_a_record(data):
    data.options["decode"] = True

    def change(content):
        middle = len(content) * 2 // 3
        return content[:middle] + b"\xff\xd9" + bytes(58) + content[middle + 60 :]

    return data.edit(_encoded(change))


@fault("image-size-differs")
def record_of_another_size(data):
    def change(features):
        features["image/width"].int64_list.value[0] += 1

    return data.edit(change)


@fault("record-damaged")
def a_wrong_checksum(data):
    """The data are right, the CRC after them is not."""
    words = data.place
    records = data.records()
    end = data.offset() + 12 + len(records[data.number])
    content = bytearray(data.file.read_bytes())
    (checksum,) = struct.unpack_from("<I", content, end)
    struct.pack_into("<I", content, end, checksum ^ 1)
    data.file.write_bytes(content)
    return words
