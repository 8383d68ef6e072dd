r"""Measures how well --shuffle=global and --shuffle=buffer shuffle record files of ordered images.

    python benchmarks/record_order.py --num_images=118287

Writes TFRecords without pixels, and reads two epochs of their image ids with the reader of training. Prints,
for each number of files and order, three mean distances in percent of all images. In a random order, each is
33.3 %.
"""

import dataclasses
import pathlib
import sys
import tempfile

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
from absl import flags

from common import args as shared_flags
from common import errors
from common.args import SHUFFLES, flag
from common.progress import import_tensorflow

NUM_FILES = (1, 5, 20, 100)
BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True)
class OrderArgs:
    num_images: int = flag(118_287, "Number of images. Default: as in COCO's train2017.", low=max(NUM_FILES))
    seed: int = flag(0, "Random seed of the order.", low=0)


def write_records(directory: pathlib.Path, num_images: int, num_files: int) -> list[str]:
    """Writes the images 0, 1, ... into files of equal size, in this order. Returns the files."""
    import tensorflow as tf

    from common.data.tfrecord import BOX_KEYS, CROWD_KEY, ID_KEY, LABEL_KEY

    features = {key: tf.train.Feature(float_list=tf.train.FloatList()) for key in BOX_KEYS}
    features |= {key: tf.train.Feature(int64_list=tf.train.Int64List()) for key in (LABEL_KEY, CROWD_KEY)}
    features["image/encoded"] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"no image"]))
    files = []
    for number, rows in enumerate(np.array_split(np.arange(num_images), num_files)):
        files.append(str(directory / f"{num_files}-{number:03}.tfrecord"))
        with tf.io.TFRecordWriter(files[-1]) as writer:
            for row in rows.tolist():
                features[ID_KEY] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"%d" % row]))
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    return files


def read_epochs(files: list[str], num_images: int, shuffle: str, seed: int) -> np.ndarray:
    """Returns the image ids of two epochs of training, int64 (2, N)."""
    from nvidia import dali

    from common.data.labels import LabelMap
    from common.data.tfrecord import Records, ensure_index, record_spans, tfrecord_reader

    spans = [record_spans(file) for file in files]
    indexes = tuple(ensure_index(file, table)[0] for file, table in zip(files, spans, strict=True))
    table = np.concatenate([np.insert(table, 0, file, axis=1) for file, table in enumerate(spans)])
    records = Records(tuple(files), indexes, table, has_crowds=False, has_empty_boxes=False)
    pipeline = dali.Pipeline(BATCH_SIZE, num_threads=1, device_id=None, enable_checkpointing=True)
    with pipeline:
        reader = tfrecord_reader(records, LabelMap.numbered(1), training=True, seed=seed, shuffle=shuffle)
        pipeline.set_outputs(reader[3])
    batches = [
        np.array(pipeline.run()[0].as_cpu().as_array()) for _ in range(-(-2 * num_images // BATCH_SIZE))
    ]
    return np.concatenate(batches)[: 2 * num_images].reshape(2, num_images)


def distances(epochs: np.ndarray) -> tuple[float, float, float]:
    """Returns three mean distances, relative to the number of images, from int (2, N) of `read_epochs`.

    Returns:
        Between an image's place in the files and in an epoch, its places in two epochs, and the places in
        the files of two images in a batch.
    """
    num_images = epochs.shape[1]
    first, second = np.argsort(epochs, axis=1)
    batches = epochs[1, : num_images // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
    pairs = np.abs(batches[:, :, None] - batches[:, None]).sum() / (batches.size * (BATCH_SIZE - 1))
    moved, moved_on = np.abs(first - np.arange(num_images)).mean(), np.abs(second - first).mean()
    return moved / num_images, moved_on / num_images, pairs / num_images


def main() -> None:
    a = OrderArgs(**shared_flags.values(flags.FLAGS, define_flags))
    print("| files | --shuffle | files to epoch | epoch to epoch | within a batch |\n|--:|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as directory:
        for num_files in NUM_FILES:
            files = write_records(pathlib.Path(directory), a.num_images, num_files)
            for shuffle in SHUFFLES:
                values = distances(read_epochs(files, a.num_images, shuffle, a.seed))
                cells = " | ".join(f"{value:.1%}" for value in values)
                print(f"| {num_files} | {shuffle} | {cells} |", flush=True)


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, OrderArgs)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    import_tensorflow()
    errors.run(main)
