"""Readers and random numbers of TensorFlow, for loaders without DALI and for tests of DALI's readers.

`examples` returns the examples of a data set as a tf.data dataset of dicts:

    encoded     string (), an encoded image
    boxes       float32 (N, 4), ltrb normalised, within [0, 1], each with a positive area; N may be 0
    labels      int32 (N,), 1-based: class + 1
    image_id    int64 (), the original id

In training, the dataset is endless. Every epoch has a new permutation of the whole data set, and rank r takes
every num_shards-th example. In evaluation, a rank reads the same images as with DALI's reader, in order.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from common.data.labels import LabelMap
from common.data.sharding import check_shards, shard_range
from common.data.tfrecord import BOX_KEYS, CROWD_KEY, LABEL_KEY, Records
from common.errors import UserError

if TYPE_CHECKING:
    from common.data.loader import BaseLoader
    from common.data.sources import Source

Example = dict[str, tf.Tensor]
_IN_PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}


def examples(
    source: "Source", *, shard_id: int = 0, num_shards: int = 1, training: bool, seed: int = 0
) -> tf.data.Dataset:
    """Returns the examples of `source` as a dataset. The arguments are those of `source.read`.

    Raises:
        UserError: the data cannot be used, or there are fewer images than shards.
    """
    if hasattr(source, "examples"):  # frames of a video: only Python can read them
        return source.examples(shard_id=shard_id, num_shards=num_shards, training=training, seed=seed)
    check_shards(source.size, num_shards)
    positions = _positions(source.size, shard_id, num_shards, seed, training=training)
    if hasattr(source, "records"):  # TFRecords
        return _from_records(source.records, source.label_map, positions)
    if training and source.name == "images":
        raise ValueError("images without annotations cannot be used for training")
    return _from_table(positions, source)


def loader_examples(loader: "BaseLoader") -> tf.data.Dataset:
    """Returns endless examples for a loader. In evaluation, a shorter shard is repeated."""
    shard = {"shard_id": loader.shard_id, "num_shards": loader.num_shards}
    dataset = examples(loader.opened_source, **shard, training=loader.training, seed=loader.seed)
    if loader.training:
        return dataset
    return dataset.repeat().take(loader.steps_per_epoch * loader.batch_size).repeat()


class Random:
    """Makes random numbers, which differ at every call.

    Exception: inside a loop of a graph, a call returns the same numbers in every iteration.

    Args:
        index: index of the image or the batch that needs the numbers.
        seeds: seeds of the loader.
    """

    def __init__(self, index: tf.Tensor, *seeds: int) -> None:
        state = np.random.SeedSequence(seeds).generate_state(2).astype(np.int32)
        self._seed, self._drawn = tf.random.fold_in(tf.constant(state), index), 0

    def uniform(
        self, low: float | tf.Tensor, high: float | tf.Tensor, shape: tuple[int, ...] = ()
    ) -> tf.Tensor:
        """Returns float32 numbers x with low <= x < high."""
        return tf.random.stateless_uniform(shape, self._next_seed(), low, high)

    def permutation(self, count: int) -> tf.Tensor:
        """Returns the numbers from 0 to count - 1 in random order, int32 (count,)."""
        return tf.random.experimental.stateless_shuffle(tf.range(count), self._next_seed())

    def _next_seed(self) -> tf.Tensor:
        self._drawn += 1
        return tf.random.fold_in(self._seed, self._drawn)


def _positions(size: int, shard_id: int, num_shards: int, seed: int, *, training: bool) -> tf.data.Dataset:
    """Returns a dataset of the positions of the images that one rank reads. Each position is int64 ()."""
    if not training:
        begin, end = shard_range(size, shard_id, num_shards)
        count = -(-size // num_shards)
        return tf.data.Dataset.range(begin, begin + count).map(lambda position: tf.minimum(position, end - 1))

    def permutation(epoch: tf.Tensor) -> tf.data.Dataset:
        # tf.data's own shuffle is not used, because it also depends on the global seed.
        seeds = tf.stack([tf.constant(seed, tf.int64), epoch])
        positions = tf.random.experimental.stateless_shuffle(tf.range(size, dtype=tf.int64), seeds)
        return tf.data.Dataset.from_tensor_slices(positions)

    return tf.data.Dataset.counter().flat_map(permutation).shard(num_shards, shard_id)


def _from_records(records: Records, label_map: LabelMap, positions: tf.data.Dataset) -> tf.data.Dataset:
    read = _reader(records.data)
    return positions.map(lambda position: _parse(read(position), label_map), **_IN_PARALLEL)


def _reader(read: Callable[[int], bytes]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns `read` as a function for a graph.

    tf.data's own readers of parts of files (FixedLengthRecordDataset) have no symbolic checkpoints.
    """

    def read_position(position: tf.Tensor) -> tf.Tensor:
        content = tf.numpy_function(lambda p: read(int(p)), [position], tf.string, stateful=False)
        return tf.ensure_shape(content, ())

    return read_position


def _from_table(positions: tf.data.Dataset, source: "Source") -> tf.data.Dataset:
    """Returns a dataset of the examples at `positions`, with the boxes of `source.annotations`."""
    targets = source.annotations.target_boxes
    boxes, labels, row_splits, image_ids = map(
        tf.constant, (targets.boxes, targets.classes + 1, targets.row_splits, source.annotations.image_ids)
    )

    def example(position: tf.Tensor, encoded: tf.Tensor) -> Example:
        begin, end = row_splits[position], row_splits[position + 1]
        return {
            "encoded": encoded,
            "boxes": boxes[begin:end],
            "labels": labels[begin:end],
            "image_id": image_ids[position],
        }

    if hasattr(source, "shards"):  # WebDataset
        read = _reader(source.shards.image)
    else:
        paths = tf.constant(source.files)

        def read(position: tf.Tensor) -> tf.Tensor:
            return tf.io.read_file(paths[position])

    return positions.map(lambda position: example(position, read(position)), **_IN_PARALLEL)


def _parse(record: tf.Tensor, label_map: LabelMap) -> Example:
    kinds = {
        **dict.fromkeys(("image/encoded", "image/source_id"), tf.io.FixedLenFeature((), tf.string)),
        **dict.fromkeys(BOX_KEYS, tf.io.RaggedFeature(tf.float32, row_splits_dtype=tf.int64)),
        **dict.fromkeys((LABEL_KEY, CROWD_KEY), tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64)),
    }
    features = tf.io.parse_single_example(record, kinds)
    boxes = tf.stack([features[key] for key in BOX_KEYS], axis=-1)  # (N, 4)
    boxes = tf.clip_by_value(boxes, 0.0, 1.0)
    known = tf.constant(label_map.category_ids, tf.int64)
    labels = tf.searchsorted(known, features[LABEL_KEY], out_type=tf.int32) + 1
    is_crowd = features[CROWD_KEY]  # may be absent
    is_crowd = tf.concat([is_crowd, tf.zeros(tf.shape(labels)[0] - tf.shape(is_crowd)[0], tf.int64)], axis=0)
    is_target = (is_crowd == 0) & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return {
        "encoded": features["image/encoded"],
        "boxes": boxes[is_target],
        "labels": labels[is_target],
        "image_id": tf.strings.to_number(features["image/source_id"], tf.int64),
    }


# --- functions for the tensorflow loaders of both apps ---


def refuse_changes(config: Any, fields: Sequence[str], supported: Collection[str]) -> None:
    """Raises UserError if a field that the loader without DALI does not implement is not at its default.

    Args:
        config: the config of the run.
        fields: the fields to compare.
        supported: the fields that the loader implements.
    """
    default = {field.name: field.default for field in dataclasses.fields(config)}
    if changed := [n for n in fields if n not in supported and getattr(config, n) != default[n]]:
        changes = ", ".join(f"{name}={getattr(config, name)}" for name in changed)
        defaults = ",".join(f"{name}={default[name]}" for name in changed)
        raise UserError(
            f"--pipeline_type=tensorflow cannot do {changes}: use dali_cpu, or --hparams={defaults}"
        )


def resize(image: tf.Tensor, size: tf.Tensor, antialias: bool = True) -> tf.Tensor:
    """Resizes uint8 (h, w, 3) to `size`, (height, width), by linear interpolation."""
    image = tf.image.resize(image, tf.cast(size, tf.int32), antialias=antialias)
    return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)


def boxes_to_window(boxes: tf.Tensor, size: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """Converts boxes normalised by the image to boxes normalised by the window, clipped to [0, 1]."""
    boxes_px = boxes * xyxy(size) - xyxy(window[:2])
    return tf.clip_by_value(boxes_px / xyxy(window[2:]), 0.0, 1.0)


def xyxy(yx: tf.Tensor) -> tf.Tensor:
    """Converts (y, x), an array (2,), to (x, y, x, y), a float32 array (4,)."""
    return tf.cast(tf.gather(yx, [1, 0, 1, 0]), tf.float32)


def select_boxes(
    boxes: tf.Tensor, labels: tf.Tensor, min_size: tuple[float, float], max_instances: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Does the same as `dali_ops.select_boxes`, with the same outputs."""
    sides = boxes[:, 2:] - boxes[:, :2]  # (N, 2) width, height
    visible = tf.math.count_nonzero(tf.reduce_all(sides > 0, 1), dtype=tf.int32)
    is_large = (sides > 0) & (sides >= tf.constant(min_size[::-1], tf.float32)) & (sides <= tf.float32.max)
    large = tf.where(tf.reduce_all(is_large, axis=1))[:, 0]
    areas = tf.gather(sides[:, 0] * sides[:, 1], large)
    num_large = tf.shape(areas)[0]
    # top_k puts the lower index first among equal values
    largest = tf.math.top_k(areas, k=tf.minimum(num_large, max_instances)).indices
    rows = tf.gather(large, tf.sort(largest))
    lost = tf.stack([visible - num_large, num_large - tf.shape(rows)[0]])
    return tf.gather(boxes, rows), tf.gather(tf.cast(labels, tf.int32), rows), lost


def pad_boxes_tf(boxes: tf.Tensor, labels: tf.Tensor, max_instances: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Does the same as `dali_ops.pad_boxes`."""
    padding = [[0, max_instances - tf.shape(boxes)[0]]]
    boxes = tf.pad(boxes, padding + [[0, 0]], constant_values=-1.0)
    classes = tf.pad(labels - 1, padding, constant_values=-1)
    return tf.ensure_shape(boxes, [max_instances, 4]), tf.ensure_shape(classes, [max_instances])


# --- images ---


def image_size_tf(encoded: tf.Tensor) -> tf.Tensor:
    """Reads the stored size of a JPEG or PNG from its header. Returns int32 (2,): (height, width)."""
    size = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.extract_jpeg_shape(encoded)[:2],
        # PNG: width and height are big-endian, at byte 16.
        lambda: tf.io.decode_raw(tf.strings.substr(encoded, 16, 8), tf.int32, little_endian=False)[::-1],
    )
    return tf.ensure_shape(size, (2,))


def decode_image_tf(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """Decodes a window (top, left, height, width) of a JPEG or PNG, and ignores the EXIF orientation.

    Returns uint8 (h, w, 3) RGB.

    Whole images equal DALI's bit for bit.
    """

    def decode_png() -> tf.Tensor:
        image = tf.io.decode_png(encoded, channels=3)
        return image[window[0] : window[0] + window[2], window[1] : window[1] + window[3]]

    image = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.decode_and_crop_jpeg(encoded, window, channels=3, dct_method="INTEGER_ACCURATE"),
        decode_png,
    )
    return tf.ensure_shape(image, (None, None, 3))
