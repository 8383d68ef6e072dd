"""Annotations and image files as TFRecords in the schema of TensorFlow Object Detection, with DALI indexes.

`python tools/convert.py --to=tfrecord --output=records/train --num_shards=256` writes
records/train-00000-of-00256.tfrecord, its .idx, and so on, and records/train.label_map.json. The keys are
those of google/automl efficientdet/dataset/create_coco_tfrecord.py, so either project reads the files of the
other; the label is the COCO category id. Unlike there, images are shuffled, boxes that reach outside are
clipped and not dropped, and images without objects have all keys, with empty lists.

The bytes depend on the images, the annotations, the number of shards and the seed, and on nothing else.
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from common import progress
from common.annotations import Annotations
from common.datacheck import images
from common.datacheck.images import ImageFacts, ImagePolicy
from common.datacheck.issues import Issues
from common.errors import UserError
from common.files import write_into
from common.tfrecord import (
    AREA_KEY,
    BOX_KEYS,
    CROWD_KEY,
    LABEL_KEY,
    framed,
    write_index,
)

_FORMATS = {"JPEG": "jpeg", "PNG": "png"}  # as images.py calls it -> image/format


def write_tfrecords(
    annotations: Annotations,
    images_dir: str | os.PathLike,
    prefix: str | os.PathLike,
    *,
    num_shards: int,
    seed: int = 0,
    num_workers: int = 4,
    policy: ImagePolicy = ImagePolicy(),
) -> list[str]:
    """Writes `<prefix>-00000-of-<num_shards>.tfrecord` ... with indexes, and `<prefix>.label_map.json`.

    All images are checked before anything is written, and nothing appears before everything is written. The
    label map, which also records the seed and the source, comes last, so that a set without one is an
    unfinished set.

    Args:
        annotations: what `load_coco` returned.
        images_dir: what their file names refer to.
        prefix: directory (made if missing) and beginning of the names.
        num_shards: number of files, at most one per image.
        seed: of the order of the images.
        num_workers: threads that read images, and shards that are written at once; no influence on the
            result.
        policy: about images that cannot be used, which are all that are neither JPEG nor PNG.

    Returns:
        The record files.

    Raises:
        DataError: every image that cannot be used or has another size than the annotations say.
        UserError: files of another set in the way; the disk.
    """
    prefix = os.fspath(prefix)
    if not os.path.basename(prefix):
        raise UserError(
            f"--output={prefix} is a directory: add the beginning of the file names, {prefix}train"
        )
    annotations, facts = _usable_images(annotations, images_dir, policy)
    if not 1 <= num_shards <= annotations.num_images:
        raise UserError(
            f"--num_shards={num_shards} is not in 1..{annotations.num_images}, the number of images"
        )
    directory, name = os.path.split(prefix)
    names = [f"{name}-{shard:05d}-of-{num_shards:05d}.tfrecord" for shard in range(num_shards)]
    label_map = pathlib.Path(f"{prefix}.label_map.json")
    order = np.random.default_rng(seed).permutation(annotations.num_images).tolist()

    def write(staged: pathlib.Path) -> None:
        shards = {staged / name: order[shard::num_shards] for shard, name in enumerate(names)}
        _write_shards(annotations, os.fspath(images_dir), facts, shards, num_workers)
        _write_label_map(staged / label_map.name, annotations, num_shards, seed)
        label_map.unlink(missing_ok=True)

    try:
        if os.path.isdir(directory or "."):
            refuse_other_set(label_map.parent, name, names)
        label_map.parent.mkdir(parents=True, exist_ok=True)
        write_into(label_map.parent, write)
    except OSError as error:
        raise UserError(f"{error.filename or prefix}: {error.strerror or error}") from error
    return [os.path.join(directory, name) for name in names]


def _usable_images(
    annotations: Annotations, images_dir: str | os.PathLike, policy: ImagePolicy
) -> tuple[Annotations, list[ImageFacts]]:
    """The annotations of the images that can be written, and what these are."""
    issues = Issues(os.fspath(images_dir))
    names, describe = annotations.file_names, annotations.image_name
    usable, facts = images.check_files(images_dir, names, annotations.image_sizes, describe, policy, issues)
    for row in np.flatnonzero(usable).tolist():
        if facts[row].image_format not in _FORMATS:
            usable[row] = False
            issues.add("image-not-jpeg-or-png", f"{describe(row)} is {facts[row].image_format}")
    if policy.on_bad_image == "skip":
        issues.skip_images()
    if not usable.any():
        issues.add("no-images", f"none of {annotations.num_images} images can be written")
    issues.raise_if_stopping()
    if usable.all():
        return annotations, facts
    for issue in issues:
        if issue.skipped:
            progress.log(f"{issues.origin}: {issue.line()}")
    return annotations.select(usable), list(itertools.compress(facts, usable))


def _write_shards(
    annotations: Annotations,
    images_dir: str,
    facts: Sequence[ImageFacts],
    shards: Mapping[pathlib.Path, Sequence[int]],
    num_workers: int,
) -> None:
    """Writes files of records with their indexes, `num_workers` at a time. A failure stops all of them."""
    bar = progress.Bar("Writing records", annotations.num_images)
    lock = threading.Lock()
    is_over = threading.Event()

    def write(file: pathlib.Path, rows: Sequence[int]) -> None:
        try:
            with open(file, "wb") as stream:
                for row in rows:
                    if is_over.is_set():
                        return
                    stream.write(framed(_serialize(annotations, row, images_dir, facts[row])))
                    with lock:
                        bar.step()
            write_index(file)
        except BaseException:
            is_over.set()
            raise

    with concurrent.futures.ThreadPoolExecutor(num_workers) as writers:
        try:
            list(writers.map(write, shards.keys(), shards.values()))
        finally:
            is_over.set()  # after an interrupt, too


def _serialize(annotations: Annotations, row: int, images_dir: str, facts: ImageFacts) -> bytes:
    path = os.path.join(images_dir, annotations.file_names[row])
    encoded = pathlib.Path(path).read_bytes()
    found = images.inspect(encoded)
    if (found.image_format, found.height, found.width) != (facts.image_format, facts.height, facts.width):
        raise UserError(f"{path} has changed since it was checked: convert again when nothing writes there")
    example = _make_example(annotations, row, encoded, _FORMATS[facts.image_format])
    # Protobuf's maps have no order unless asked.
    return example.SerializeToString(deterministic=True)


def _make_example(annotations: Annotations, row: int, encoded: bytes, image_format: str) -> tf.train.Example:
    """The record of one image: its bytes as they are, its boxes clipped; boxes without area are left out."""
    begin, end = annotations.row_splits[row : row + 2]
    boxes, _ = annotations.clipped_boxes
    boxes = boxes[begin:end]
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    category_ids = annotations.category_ids[begin:end][kept].tolist()
    label_map = annotations.label_map
    names = [label_map.names[label_map.class_of(i)].encode() for i in category_ids]
    height, width = annotations.image_sizes[row].tolist()
    features = {
        "image/encoded": _strings([encoded]),
        "image/format": _strings([image_format.encode()]),
        "image/filename": _strings([annotations.file_names[row].encode()]),
        "image/source_id": _strings([str(annotations.image_ids[row]).encode()]),
        "image/height": _integers([height]),
        "image/width": _integers([width]),
        **{key: _floats(boxes[kept, side].tolist()) for side, key in enumerate(BOX_KEYS)},
        LABEL_KEY: _integers(category_ids),
        "image/object/class/text": _strings(names),
        CROWD_KEY: _integers(annotations.is_crowd[begin:end][kept].astype(int).tolist()),
        AREA_KEY: _floats(annotations.areas[begin:end][kept].tolist()),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))


def _strings(values: list[bytes]) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def _integers(values: list[int]) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def _floats(values: list[float]) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def refuse_other_set(directory: pathlib.Path, name: str, own: list[str]) -> None:
    """UserError where `directory` holds shards `<name>-...` that are not `own`: a glob over two sets with one
    prefix would read every image twice."""
    for path in sorted(directory.iterdir()):
        stem, dash, _ = path.name.rpartition("-of-")
        other = (
            dash and stem.rpartition("-")[0] == name and path.suffix == ".tfrecord" and path.name not in own
        )
        if other:
            raise UserError(
                f"{path} belongs to another set with this prefix: remove that set or change --output"
            )


def _write_label_map(path: pathlib.Path, annotations: Annotations, num_shards: int, seed: int) -> None:
    targets = annotations.target_boxes
    document = {
        "categories": annotations.label_map.categories(),
        "source": {
            "annotations": os.path.basename(annotations.origin),
            "fingerprint": annotations.fingerprint(),
            "images": annotations.num_images,
            "objects": len(targets.boxes),
            "seed": seed,
            "shards": num_shards,
        },
    }
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
