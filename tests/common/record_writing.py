"""Writes TFRecord files in the format of TensorFlow's Object Detection API."""

import io
import os
import pathlib

import numpy as np
import PIL.Image
import tensorflow as tf

from common.data.annotations import Annotations
from common.data.labels import LabelMap
from common.data.tfrecord import write_index

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))


def png(width=100, height=50, color="white"):
    stream = io.BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(stream, "PNG")
    return stream.getvalue()


PNG = png()


def feature(value):
    """Returns the feature of bytes, an integer, a float, or a list of these."""
    if isinstance(value, tf.train.Feature):
        return value
    value = value if isinstance(value, list) else [value]
    if value and isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if value and isinstance(value[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


def integers(values) -> tf.train.Feature:
    """Unlike `feature`, takes NumPy's integers, and an empty list keeps its type."""
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value) for value in values]))


def record(**changes):
    """Returns a record of one image with one box.

    `changes` sets keys: object__area=... sets image/object/area. None removes a key.
    """
    values = {"encoded": PNG, "source_id": b"42", "height": 50, "width": 100, "object__class__label": [17]}
    sides = {"xmin": [0.1], "xmax": [0.5], "ymin": [0.2], "ymax": [0.8]}
    values |= {f"object__bbox__{side}": edge for side, edge in sides.items()} | changes
    values = {f"image/{key.replace('__', '/')}": value for key, value in values.items()}
    features = {key: feature(value) for key, value in values.items() if value is not None}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def of_boxes(*boxes, **changes):
    """Makes a record of boxes (xmin, ymin, xmax, ymax) of category 3."""
    sides = zip(("xmin", "ymin", "xmax", "ymax"), map(list, zip(*boxes, strict=True)), strict=True)
    values = {f"object__bbox__{side}": edges for side, edges in sides}
    return record(**values | {"object__class__label": [3] * len(boxes)} | changes)


def empty_record(image_id, **changes):
    """Like google/automl's records of empty images, it has no object keys."""
    keys = ("bbox__xmin", "bbox__xmax", "bbox__ymin", "bbox__ymax", "class__label")
    values = {"source_id": b"%d" % image_id, **{f"object__{key}": None for key in keys}}
    return record(**values | changes)


def write(path, *records):
    """Writes a TFRecord file and returns its path."""
    with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        for content in records:
            writer.write(content)
    return os.fspath(path)


def write_tfrecords(annotations: Annotations, images_dir, prefix, *, num_shards, seed=0) -> list[str]:
    """Writes shuffled record files with indexes and a label map, like tools/convert.py. Returns the files."""
    order = np.random.default_rng(seed).permutation(annotations.num_images).tolist()
    pathlib.Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    files = []
    for shard in range(num_shards):
        records = (_record_of_row(annotations, row, images_dir) for row in order[shard::num_shards])
        files.append(write(f"{prefix}-{shard:05d}-of-{num_shards:05d}.tfrecord", *records))
        write_index(files[-1])
    annotations.label_map.save(pathlib.Path(f"{prefix}.label_map.json"))
    return files


def _record_of_row(annotations: Annotations, row: int, images_dir) -> bytes:
    """Returns the record of an image: boxes are clipped, and boxes without area are left out."""
    file_name = annotations.file_names[row]
    rows = slice(*annotations.row_splits[row : row + 2])
    boxes = annotations.clipped_boxes[0][rows]
    has_area = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    sides = dict(zip(("xmin", "ymin", "xmax", "ymax"), boxes[has_area].T.tolist(), strict=True))
    category_ids = annotations.category_ids[rows][has_area]
    classes = annotations.label_map.classes_of(category_ids)
    names = [annotations.label_map.names[i].encode() for i in classes]
    height, width = annotations.image_sizes[row].tolist()
    return record(
        encoded=pathlib.Path(images_dir, file_name).read_bytes(),
        format=b"png" if file_name.endswith("png") else b"jpeg",
        filename=file_name.encode(),
        source_id=str(annotations.image_ids[row]).encode(),
        height=height,
        width=width,
        object__class__text=tf.train.Feature(bytes_list=tf.train.BytesList(value=names)),
        object__class__label=integers(category_ids),
        object__is_crowd=integers(annotations.is_crowd[rows][has_area]),
        object__area=annotations.areas[rows][has_area].tolist(),
        **{f"object__bbox__{side}": edges for side, edges in sides.items()},
    )


def flip(path, position):
    """Flips one bit of the byte at `position`; a negative position counts from the end."""
    with open(path, "r+b") as stream:
        stream.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 16]))
