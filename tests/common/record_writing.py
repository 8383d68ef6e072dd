import io
import os

import PIL.Image
import tensorflow as tf

from common.data.labels import LabelMap

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))


def png(width=100, height=50, color="white"):
    stream = io.BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(stream, "PNG")
    return stream.getvalue()


PNG = png()


def feature(value):
    if isinstance(value, tf.train.Feature):
        return value
    value = value if isinstance(value, list) else [value]
    if value and isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if value and isinstance(value[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


def record(**changes):
    """object__area=... sets image/object/area. None removes a key."""
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
    return record(source_id=b"%d" % image_id, **{f"object__{key}": None for key in keys}, **changes)


def write(path, *records):
    with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        for content in records:
            writer.write(content)
    return os.fspath(path)


def flip(path, position):
    with open(path, "r+b") as stream:
        stream.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 16]))
