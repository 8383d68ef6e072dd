"""Writes annotations and images as TFRecords in TensorFlow Object Detection's schema, with DALI indexes.

The keys are those of google/automl efficientdet/dataset/create_coco_tfrecord.py. The label is the COCO
category id. Unlike that script, images are shuffled, and boxes that reach outside the image are clipped.
"""

import concurrent.futures
import math
import os
import pathlib
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from common import progress
from common.args import ImagePolicy
from common.data.annotations import Annotations
from common.data.check import images
from common.data.tfrecord import AREA_KEY, BOX_KEYS, CROWD_KEY, LABEL_KEY, framed, write_index
from common.errors import UserError
from common.files import write_into
from tools.conversion.shrinking import shrink_image

_FORMATS = {"JPEG": b"jpeg", "PNG": b"png"}  # Pillow's format -> image/format


def write_tfrecords(
    annotations: Annotations,
    images_dir: str | os.PathLike,
    prefix: str | os.PathLike,
    *,
    num_shards: int,
    seed: int = 0,
    max_side: int | None = None,
    num_workers: int = 4,
) -> list[str]:
    """Writes `<prefix>-00000-of-<num_shards>.tfrecord` ... with indexes, and `<prefix>.label_map.json`.

    No file appears before all files are complete. The bytes do not depend on `num_workers`.

    Args:
        annotations: the result of `load_coco` or, with `max_side`, the result of `shrink_annotations`.
        images_dir: the directory that the file names in the annotations are relative to.
        prefix: path of a directory, which is created if missing, and the first part of the file names.
        num_shards: number of files, at most one per image.
        max_side: longest side in pixels; larger images are scaled down.

    Returns:
        The paths of the record files.

    Raises:
        UserError: an image is damaged, is neither JPEG nor PNG, or has another size than in the annotations;
            or files of an earlier conversion with the same prefix exist.
        OSError: a file cannot be read or written.
    """
    directory, name = os.path.split(prefix)
    if not name:
        raise UserError(f"--output={prefix} is a directory: add a file name, for example {prefix}train")
    if not 1 <= num_shards <= annotations.num_images:
        raise UserError(
            f"--num_shards={num_shards} is not in 1..{annotations.num_images}, the number of images"
        )
    names = [f"{name}-{shard:05d}-of-{num_shards:05d}.tfrecord" for shard in range(num_shards)]
    label_map = pathlib.Path(f"{os.fspath(prefix)}.label_map.json")
    order = np.random.default_rng(seed).permutation(annotations.num_images).tolist()

    def write(staged: pathlib.Path) -> None:
        shards = {staged / name: order[shard::num_shards] for shard, name in enumerate(names)}
        _write_shards(shards, lambda row: _serialize(annotations, row, images_dir, max_side), num_workers)
        annotations.label_map.save(staged / label_map.name)
        label_map.unlink(missing_ok=True)

    refuse_other_set(label_map.parent, name, names)
    label_map.parent.mkdir(parents=True, exist_ok=True)
    write_into(label_map.parent, write)
    return [os.path.join(directory, name) for name in names]


def _write_shards(
    shards: Mapping[pathlib.Path, Sequence[int]], serialize: Callable[[int], bytes], num_workers: int
) -> None:
    bar = progress.Bar("Writing records", sum(map(len, shards.values())))
    lock = threading.Lock()
    ended = threading.Event()

    def write(file: pathlib.Path) -> None:
        with open(file, "wb") as stream:
            for row in shards[file]:
                if ended.is_set():
                    return
                stream.write(framed(serialize(row)))
                with lock:
                    bar.step()
        write_index(file)

    with concurrent.futures.ThreadPoolExecutor(num_workers) as writers:
        try:
            list(writers.map(write, shards))
        finally:
            ended.set()


def _serialize(annotations: Annotations, row: int, folder: str | os.PathLike, max_side: int | None) -> bytes:
    """Returns the record of an image. Boxes are clipped; those without area are left out."""
    path = pathlib.Path(folder, annotations.file_names[row])
    encoded = shrink_image(path.read_bytes(), str(path), max_side)
    facts = images.inspect(encoded, ImagePolicy(max_megapixels=math.inf))
    height, width = annotations.image_sizes[row].tolist()
    if facts.image_format not in _FORMATS:
        raise UserError(f"{path} is {facts.image_format}: convert it, TFRecords contain only JPEG and PNG")
    if facts.fault or (facts.height, facts.width) != (height, width):
        raise UserError(
            f"{path} is damaged, or its size is not {width} x {height} as in its annotations: replace the"
            " image, or correct its annotations"
        )
    begin, end = annotations.row_splits[row : row + 2]
    boxes = annotations.clipped_boxes[0][begin:end]
    has_area = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    category_ids = annotations.category_ids[begin:end][has_area]
    names = [annotations.label_map.names[i] for i in annotations.label_map.classes_of(category_ids)]
    strings = {
        "image/encoded": [encoded],
        "image/format": [_FORMATS[facts.image_format]],
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
    floats[AREA_KEY] = annotations.areas[begin:end][has_area]
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


def refuse_other_set(directory: pathlib.Path, name: str, shards: Collection[str]) -> None:
    """Raises UserError if `directory` has shards `<name>-...` other than `shards`.

    Otherwise, a glob would also match the files of an earlier conversion, and images would be read twice.
    """
    pattern = re.compile(re.escape(name) + r"-[^-]*-of-[^-]*\.tfrecord")
    for path in sorted(directory.glob("*.tfrecord")):
        if pattern.fullmatch(path.name) and path.name not in shards:
            raise UserError(
                f"{path} is a TFRecord file of an earlier conversion with the same prefix: delete the files"
                " of that conversion, or change --output"
            )
