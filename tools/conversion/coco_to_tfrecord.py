"""Writes annotations and images as TFRecords in TensorFlow Object Detection's schema, with DALI indexes.

The keys are those of google/automl efficientdet/dataset/create_coco_tfrecord.py. The label is the COCO
category id. Unlike that script, images are shuffled, and boxes that reach outside the image are clipped.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.annotations import Annotations
from common.data.tfrecord import AREA_KEY, BOX_KEYS, CROWD_KEY, LABEL_KEY, framed, write_index
from common.errors import UserError
from tools.conversion.numbered_files import read_image, write_numbered_files

_FORMATS = {"JPEG": b"jpeg", "PNG": b"png"}  # Pillow's format -> image/format


def write_tfrecords(
    annotations: Annotations,
    images_dir: str | os.PathLike,
    prefix: str | os.PathLike,
    *,
    max_side: int | None = None,
    **options: Any,
) -> list[str]:
    """Writes `<prefix>-00000-of-<num_shards>.tfrecord` ... with indexes, and `<prefix>.label_map.json`.

    Args:
        annotations: the result of `load_coco` or, with `max_side`, the result of `shrink_annotations`.
        images_dir: the directory that the file names in the annotations are relative to.
        max_side: longest side in pixels; larger images are scaled down.
        prefix, options: arguments of `write_numbered_files`.

    Returns:
        The paths of the record files.

    Raises:
        UserError: an image is damaged, is neither JPEG nor PNG, or has another size than in the annotations;
            or files of an earlier conversion with the same prefix exist.
        OSError: a file cannot be read or written.
    """

    def write_file(file: pathlib.Path, rows: Iterator[int]) -> None:
        with open(file, "wb") as stream:
            for row in rows:
                stream.write(framed(_serialize(annotations, row, images_dir, max_side)))
        write_index(file)

    return write_numbered_files(annotations, prefix, ".tfrecord", write_file, **options)


def _serialize(annotations: Annotations, row: int, folder: str | os.PathLike, max_side: int | None) -> bytes:
    """Returns the record of an image. Boxes are clipped; those without area are left out."""
    encoded, image_format = read_image(annotations, row, folder, max_side)
    if image_format not in _FORMATS:
        path = pathlib.Path(folder, annotations.file_names[row])
        raise UserError(f"{path} is {image_format}: convert it, TFRecords contain only JPEG and PNG")
    height, width = annotations.image_sizes[row].tolist()
    begin, end = annotations.row_splits[row : row + 2]
    boxes = annotations.clipped_boxes[0][begin:end]
    has_area = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    category_ids = annotations.category_ids[begin:end][has_area]
    names = [annotations.label_map.names[i] for i in annotations.label_map.classes_of(category_ids)]
    strings = {
        "image/encoded": [encoded],
        "image/format": [_FORMATS[image_format]],
        "image/filename": [annotations.file_names[row].encode()],
        "image/source_id": [str(annotations.image_ids[row]).encode()],
        "image/object/class/text": [name.encode() for name in names],
    }
    integers = {
        "image/height": [height],
        "image/width": [width],
        LABEL_KEY: category_ids,
        CROWD_KEY: annotations.is_crowd[begin:end][has_area].astype(int),
    }
    floats = {key: boxes[has_area, side] for side, key in enumerate(BOX_KEYS)}
    # If the area is that of the box, not of a mask, clipping changes both.
    areas, is_clipped = annotations.areas[begin:end], annotations.clipped_boxes[1][begin:end]
    left_top, sides = np.split(annotations.boxes_ltwh_px[begin:end], 2, axis=1)
    is_clipped_box = is_clipped & (areas == sides.prod(axis=1))
    clipped_sides = np.clip(left_top + sides, 0, (width, height)) - np.clip(left_top, 0, (width, height))
    floats[AREA_KEY] = np.where(is_clipped_box, clipped_sides.prod(axis=1), areas)[has_area]
    return serialized({"bytes_list": strings, "int64_list": integers, "float_list": floats})


def serialized(lists: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Returns a tf.train.Example as bytes.

    Args:
        lists: kind of list, such as "bytes_list" -> {key of a feature: its values}.
    """
    features = {
        key: {kind: {"value": values}}
        for kind, values_of in lists.items()
        for key, values in values_of.items()
    }
    # Without deterministic=True, the order of the keys in the bytes is not defined.
    return tf.train.Example(features={"feature": features}).SerializeToString(deterministic=True)
