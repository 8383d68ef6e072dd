r"""From images on a disk to a training step, with DALI: a tutorial to read from top to bottom, and to run.

    python examples/preprocess_tutorial.py --output_dir=runs/preprocess-tutorial

    1  draw a small data set
    2  write it as TFRecords, with the indexes that DALI needs
    3  run a DALI pipeline alone: no TensorFlow, no model
    4  write the same pipeline in one line, and view its output
    5  run it imperatively, operator by operator
    6  put the pipeline inside TensorFlow
    7  train on it

The tutorial takes seconds, downloads nothing and needs no GPU.
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from absl import flags
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.data_node import DataNode

from common import errors
from common.data import readers
from common.data.check.coco import load_coco
from common.data.labels import LabelMap
from common.files import make_output_directory
from tools import synthetic
from tools.conversion.coco_to_tfrecord import write_tfrecords
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.outputs import check_output
from tools.preprocessing.preprocessor import Preprocessor

NUM_IMAGES = 24
BATCH_SIZE = 8
SHORT_SIDE, CROP = 72, (64, 48)  # pixels; CROP is (height, width), not square, so that swaps are noticed


# The function below is called once: each `fn` call adds a node to a graph. DALI runs the graph later.
@pipeline_def
def shapes_pipeline(files: list[str], label_map: LabelMap) -> tuple[DataNode, DataNode, DataNode]:
    """Reads and crops images.

    Returns:
        images: uint8 (64, 48, 3).
        counts: float32 (), number of objects in the image.
        image_ids: int64 ().
    """
    # training=False reads records in order. If another program wrote the records, check them first with
    # `open_tfrecords`.
    jpegs, _, labels, image_ids = readers.tfrecord_reader(files, label_map, training=False)
    images = fn.decoders.image(jpegs, output_type=types.RGB)
    images = fn.resize(images, resize_shorter=SHORT_SIDE)  # the other side follows the aspect ratio
    images = fn.crop(images, crop=CROP)  # from the middle
    counts = fn.cast(labels.shape()[0], dtype=types.FLOAT)  # labels are (N,); N differs between images
    return images, counts, image_ids


# The same preprocessing as a line for `tools/preprocess.py --ops`.
OPS = f"resize:short={SHORT_SIDE} | crop:{CROP[0]}x{CROP[1]}"


def main() -> None:
    output_dir = make_output_directory(flags.FLAGS.output_dir)

    # --- 1. Data: drawn shapes, with a json in COCO's format.
    annotations_file = synthetic.draw_dataset(output_dir / "shapes", num_images=NUM_IMAGES, seed=0)
    images_dir = annotations_file.parent / "images"
    annotations = load_coco(annotations_file, images_dir)
    print(f"1. {annotations.summary()}: {annotations_file}")

    # --- 2. TFRecords: many images in few files. The writer shuffles, because readers cannot shuffle well.
    files = write_tfrecords(annotations, images_dir, output_dir / "records" / "shapes", num_shards=2)
    label_map = LabelMap.load(output_dir / "records" / "shapes.label_map.json")

    # The writer also made an index for DALI: a text file with a line for each record, `offset size` in bytes.
    lines = pathlib.Path(f"{files[0]}.idx").read_text().splitlines()
    offset, size = map(int, lines[3].split())
    with open(files[0], "rb") as stream:
        stream.seek(offset)
        framed = stream.read(size)
    # Length and checksums surround the record: 12 bytes before it, 4 bytes after it.
    features = tf.train.Example.FromString(framed[12:-4]).features.feature
    file_name = features["image/filename"].bytes_list.value[0].decode()
    assert features["image/encoded"].bytes_list.value[0] == (images_dir / file_name).read_bytes()
    assert [len(lines), NUM_IMAGES - len(lines)] == [NUM_IMAGES // 2] * 2
    print(f"2. {len(files)} record files, {len(lines)} lines in {files[0]}.idx; the fourth is {file_name}")

    # --- 3. The pipeline alone. device_id=None runs it without a GPU.
    pipeline = shapes_pipeline(files, label_map, batch_size=BATCH_SIZE, num_threads=2, device_id=None)
    pipeline.build()
    epoch_size = pipeline.epoch_size("reader")  # a pipeline never ends, so the loop below counts batches
    standalone, counts, image_ids = [], [], []
    for _ in range(epoch_size // BATCH_SIZE):
        image_batch, count_batch, id_batch = pipeline.run()
        # A batch is a list of tensors. as_array() stacks them, because they have the same size.
        standalone.append(image_batch.as_array())
        counts.append(count_batch.as_array())
        image_ids.append(id_batch.as_array())
    print(f"3. the last batch: {image_batch.layout()} {image_batch.shape()[0]}, {standalone[-1].dtype}")
    standalone, counts, image_ids = (np.concatenate(parts) for parts in (standalone, counts, image_ids))
    assert standalone.shape == (NUM_IMAGES, *CROP, 3)
    rows = [annotations.image_ids.tolist().index(image_id) for image_id in image_ids]
    assert sorted(rows) == list(range(NUM_IMAGES))
    np.testing.assert_array_equal(counts, np.diff(annotations.row_splits)[rows])

    # --- 4. The short way. A Preprocessor needs a source and a line of operators. It decodes only the part of
    # an image that the crop shows, so pixel values may differ from those of step 3 by 1.
    source = open_image_source("tfrecord", ",".join(files))
    work = Preprocessor(source=source, ops=OPS, batch_size=BATCH_SIZE)
    for name in ("sheet.png", "images.npz"):
        output = check_output(str(output_dir / name), overwrite=True, inputs=files, has_labels=False)
        print(f"4. {output.write(work.samples(), work.size)}")
    short_way = np.load(output_dir / "images.npz")["images"]
    np.testing.assert_allclose(short_way, standalone, rtol=0, atol=1)

    # --- 5. Imperatively. The Dynamic API has the same operators, and runs each at once. First, one image:
    encoded = np.frombuffer(features["image/encoded"].bytes_list.value[0], np.uint8)
    image = ndd.decoders.image(encoded)
    smaller = ndd.resize(image, resize_shorter=SHORT_SIDE)
    by_hand = np.array(ndd.crop(smaller, crop=CROP))
    print(f"5. {file_name}: {image.shape} decoded, {smaller.shape} resized, {by_hand.shape} cropped")
    np.testing.assert_array_equal(by_hand, standalone[3])
    # Then all images:
    dynamic = np.concatenate([np.stack([np.array(t) for t in batch.tensors]) for batch, _ in work.dynamic()])
    np.testing.assert_array_equal(dynamic, short_way)

    # --- 6. Inside TensorFlow. A DALIDataset is a tf.data.Dataset that runs a copy of a pipeline. TensorFlow
    # must know the shapes and dtypes of the outputs in advance.
    with tf.device("/cpu:0"):
        dataset = dali_tf.DALIDataset(
            pipeline=shapes_pipeline(files, label_map, batch_size=BATCH_SIZE, num_threads=2, device_id=None),
            batch_size=BATCH_SIZE,
            output_shapes=((BATCH_SIZE, *CROP, 3), (BATCH_SIZE,), (BATCH_SIZE,)),
            output_dtypes=(tf.uint8, tf.float32, tf.int64),
            num_threads=2,
            device_id=None,
        )
    batches = list(dataset.take(epoch_size // BATCH_SIZE))  # like a pipeline, a dataset never ends
    np.testing.assert_array_equal(np.concatenate([images for images, _, _ in batches]), standalone)
    np.testing.assert_array_equal(np.concatenate([ids for _, _, ids in batches]), image_ids)
    print(f"6. tf.data: {dataset.element_spec[0]}, the same {NUM_IMAGES} images")
    images, _ = next(iter(work.dataset()))
    np.testing.assert_array_equal(images, short_way[:BATCH_SIZE])

    # --- 7. Training. The dataset is like any other: `map` converts its elements to what a model needs. This
    # model counts objects. To train for longer, read with training=True, which shuffles the images.
    examples = dataset.map(lambda images, counts, image_ids: (tf.cast(images, tf.float32) / 255, counts))
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((*CROP, 3)),
            keras.layers.Conv2D(8, 3, strides=4, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer="sgd", loss="mse")
    before = [weight.copy() for weight in model.get_weights()]
    history = model.fit(examples, steps_per_epoch=2, shuffle=False, verbose=0)  # the dataset never ends
    loss = history.history["loss"][-1]
    assert np.isfinite(loss)
    assert all((old != new).any() for old, new in zip(before, model.get_weights(), strict=True))
    print(f"7. two steps of training: loss {loss:.2f}; everything is in {output_dir}")


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string("output_dir", "runs/preprocess-tutorial", "Directory for all output.", flag_values=fv)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    errors.run(main)
