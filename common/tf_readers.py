"""The readers again, by tf.data alone: for the loaders without DALI, and as a second opinion.

Each gives the examples of its namesake in readers.py as a dataset of dicts:

    encoded     string (), an encoded image
    boxes       float32 (N, 4), ltrb normalised, within [0, 1], each with some area; N may be 0
    labels      int32 (N,), 1-based: class + 1
    image_id    int64 (), the original id

In training the dataset does not end. All ranks walk through the same endless sequence, one permutation of
the whole set after the other, and rank r takes every num_shards-th example from the r-th on. In evaluation it
holds the same part of the set that DALI's reader gives, in order, and the last image again where another rank
has one more: all ranks have equally many.

Nothing is buffered, records are fetched by their place in the file: the state of an iterator is a few
numbers, which tf.train.Checkpoint saves.
"""

import functools
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from common import tfrecord
from common.annotations import Annotations
from common.labels import LabelMap
from common.shards import check_shards, shard_range
from common.sources import CocoSource, ImageListSource, Source, TFRecordSource, refuse_training
from common.tfrecord import BOX_KEYS, CROWD_KEY, FRAME, HEADER, LABEL_KEY, Records

Example = dict[str, tf.Tensor]


def examples(source: Source, *, training: bool, shard_id: int, num_shards: int, seed: int) -> tf.data.Dataset:
    """The examples of `Source.read`, whose arguments and errors these are."""
    shard = {"shard_id": shard_id, "num_shards": num_shards}
    if isinstance(source, ImageListSource):
        refuse_training(training)
        return file_examples(source.files, **shard)
    options = {"training": training, "seed": seed, **shard}
    if isinstance(source, CocoSource):
        return coco_examples(source.images_dir, source.annotations, **options)
    assert isinstance(source, TFRecordSource)
    return tfrecord_examples(source.records, source.label_map, **options)


def coco_examples(
    images_dir: str | os.PathLike,
    annotations: Annotations,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
) -> tf.data.Dataset:
    """The examples of `readers.coco_reader`, whose arguments and errors these are."""
    targets = annotations.target_boxes
    return _from_files(
        [os.path.join(images_dir, name) for name in annotations.file_names],
        targets.boxes,
        targets.classes + 1,
        targets.row_splits,
        annotations.image_ids,
        _positions(annotations.num_images, shard_id, num_shards, seed, training=training),
    )


def tfrecord_examples(
    records: Records | Sequence[str | os.PathLike],
    label_map: LabelMap,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
) -> tf.data.Dataset:
    """The examples of `readers.tfrecord_reader`, whose arguments and errors these are."""
    if not isinstance(records, Records):
        records = tfrecord.index_records(records)
    paths = tf.constant(records.files)
    path_sizes = tf.constant([os.path.getsize(file) for file in records.files], tf.int64)
    spans = tf.constant(records.spans)  # (I, 3)

    def one_record(position: tf.Tensor) -> tf.data.Dataset:
        file, offset, size = tf.unstack(spans[position])
        return tf.data.FixedLengthRecordDataset(
            paths[file],
            record_bytes=size - FRAME,
            header_bytes=offset + HEADER,
            footer_bytes=path_sizes[file] - offset - size + FRAME - HEADER,
        )

    positions = _positions(len(records.spans), shard_id, num_shards, seed, training=training)
    parse = functools.partial(_parse, label_map=label_map)
    return positions.flat_map(one_record).map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def file_examples(
    files: Sequence[str | os.PathLike], *, shard_id: int = 0, num_shards: int = 1
) -> tf.data.Dataset:
    """The examples of `readers.file_reader`, whose arguments and errors these are."""
    return _from_files(
        [os.fspath(file) for file in files],
        np.zeros((0, 4), np.float32),
        np.zeros(0, np.int32),
        np.zeros(len(files) + 1, np.int64),
        np.arange(len(files)),
        _positions(len(files), shard_id, num_shards, seed=0, training=False),
    )


def _positions(size: int, shard_id: int, num_shards: int, seed: int, *, training: bool) -> tf.data.Dataset:
    """What one rank reads: int64 (), positions in the set."""
    check_shards(size, shard_id, num_shards, seed)
    if not training:
        begin, end = shard_range(size, shard_id, num_shards)
        count = -(-size // num_shards)
        return tf.data.Dataset.range(begin, begin + count).map(lambda position: tf.minimum(position, end - 1))

    def permutation(epoch: tf.Tensor) -> tf.data.Dataset:
        # Stateless: tf.data's own shuffle would follow the global seed, which ranks may set apart.
        seeds = tf.stack([tf.constant(seed, tf.int64), epoch])
        positions = tf.random.experimental.stateless_shuffle(tf.range(size, dtype=tf.int64), seeds)
        return tf.data.Dataset.from_tensor_slices(positions)

    return tf.data.Dataset.counter().flat_map(permutation).shard(num_shards, shard_id)


def _from_files(
    paths: list[str],
    boxes: np.ndarray,
    labels: np.ndarray,
    row_splits: np.ndarray,
    image_ids: np.ndarray,
    positions: tf.data.Dataset,
) -> tf.data.Dataset:
    """Examples from one file per image; image i owns rows row_splits[i] to row_splits[i + 1] of the boxes."""
    paths, boxes, labels = tf.constant(paths), tf.constant(boxes), tf.constant(labels)
    row_splits, image_ids = tf.constant(row_splits), tf.constant(image_ids)

    def read(position: tf.Tensor) -> Example:
        begin, end = row_splits[position], row_splits[position + 1]
        return {
            "encoded": tf.io.read_file(paths[position]),
            "boxes": boxes[begin:end],
            "labels": labels[begin:end],
            "image_id": image_ids[position],
        }

    return positions.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _parse(record: tf.Tensor, label_map: LabelMap) -> Example:
    integers = tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64)
    floats = tf.io.RaggedFeature(tf.float32, row_splits_dtype=tf.int64)
    text = tf.io.FixedLenFeature((), tf.string)
    features = tf.io.parse_single_example(
        record,
        {
            "image/encoded": text,
            "image/source_id": text,
            **dict.fromkeys(BOX_KEYS, floats),
            LABEL_KEY: integers,
            CROWD_KEY: integers,
        },
    )
    boxes = tf.stack([features[key] for key in BOX_KEYS], axis=-1)  # (N, 4)
    boxes = tf.clip_by_value(boxes, 0.0, 1.0)
    known = tf.constant(label_map.category_ids, tf.int64)
    labels = tf.searchsorted(known, features[LABEL_KEY], out_type=tf.int32) + 1
    is_crowd = features[CROWD_KEY]  # may be absent
    is_crowd = tf.concat([is_crowd, tf.zeros(tf.shape(labels)[0] - tf.shape(is_crowd)[0], tf.int64)], axis=0)
    kept = (is_crowd == 0) & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return {
        "encoded": features["image/encoded"],
        "boxes": boxes[kept],
        "labels": labels[kept],
        "image_id": tf.strings.to_number(features["image/source_id"], tf.int64),
    }
