import io
import itertools

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types
from PIL import Image

from common import dataset


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif_rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees
    return exif


SMOOTH = Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 47, 3), np.uint8)).resize((470, 310))
ENCODED = {
    "jpeg": encode(SMOOTH, "JPEG", quality=90),
    "jpeg without subsampling": encode(SMOOTH, "JPEG", quality=95, subsampling=0),
    "progressive jpeg": encode(SMOOTH, "JPEG", progressive=True),
    "grey jpeg": encode(SMOOTH.convert("L"), "JPEG"),
    "cmyk jpeg": encode(SMOOTH.convert("CMYK"), "JPEG"),
    "rotated jpeg": encode(SMOOTH, "JPEG", exif=exif_rotated()),
    "png": encode(SMOOTH, "PNG"),
    "grey png": encode(SMOOTH.convert("L"), "PNG"),
    "palette png": encode(SMOOTH.convert("P"), "PNG"),
    "opaque png": encode(SMOOTH.convert("RGBA"), "PNG"),
}


def decode_dali(encoded: bytes) -> np.ndarray:
    pipe = dali.Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipe:
        jpegs = fn.external_source(source=itertools.repeat([np.frombuffer(encoded, np.uint8)]), batch=True)
        pipe.set_outputs(fn.decoders.image(jpegs, output_type=types.RGB, adjust_orientation=False))
    return np.array(pipe.run()[0][0])


@pytest.mark.parametrize("kind", ENCODED)
def test_tensorflow_decodes_bit_for_bit_as_dali_does(kind):
    encoded = ENCODED[kind]
    expected = decode_dali(encoded)
    np.testing.assert_array_equal(dataset.image_size_tf(tf.constant(encoded)), (310, 470))
    for top, left, height, width in [(0, 0, 310, 470), (17, 33, 100, 201), (309, 469, 1, 1)]:
        window = tf.constant([top, left, height, width])
        got = dataset.decode_image_tf(tf.constant(encoded), window)
        assert got.dtype == tf.uint8
        difference = np.asarray(got, int) - expected[top : top + height, left : left + width]
        if width < 470:  # the outermost columns lack their neighbours' chroma
            assert np.abs(difference).max() < 40
            difference = difference[:, 1:-1]
        np.testing.assert_array_equal(difference, 0)


def test_pixels_are_those_of_the_file():
    got = dataset.decode_image_tf(tf.constant(ENCODED["png"]), tf.constant([0, 0, 310, 470]))
    np.testing.assert_array_equal(got, np.asarray(SMOOTH))
    got = dataset.decode_image_tf(tf.constant(ENCODED["jpeg"]), tf.constant([0, 0, 310, 470]))
    assert np.abs(np.asarray(got, int) - np.asarray(SMOOTH, int)).mean() < 3


def test_decoding_runs_in_a_dataset_with_a_static_shape():
    files = tf.data.Dataset.from_tensor_slices([ENCODED["png"], ENCODED["jpeg"]])
    images = files.map(lambda encoded: dataset.decode_image_tf(encoded, tf.constant([1, 2, 30, 40])))
    assert images.element_spec == tf.TensorSpec((None, None, 3), tf.uint8)
    assert [image.shape for image in images] == [(30, 40, 3)] * 2


@pytest.mark.parametrize(
    "images, batch, training, steps",
    [
        (128, 8, True, 16),
        (130, 8, True, 16),
        (5, 8, True, 1),
        (128, 8, False, 16),
        (129, 8, False, 17),
        (5, 8, False, 1),
    ],
)
def test_steps_per_epoch(images, batch, training, steps):
    assert dataset.steps_per_epoch(images, batch, training=training) == steps


def test_evaluation_steps_hold_the_longest_shard():
    for images, ranks, batch in itertools.product(range(1, 30), range(1, 5), range(1, 5)):
        steps = dataset.steps_per_epoch(images, ranks * batch, training=False)
        longest = -(-images // ranks)
        assert (steps - 1) * batch < longest <= steps * batch


def counting_pipeline(batch_size: int) -> dali.Pipeline:
    """Outputs 0, 1, 2, ... as (2, 3) images, (1,) ids and scalars."""
    pipe = dali.Pipeline(
        batch_size=batch_size,
        num_threads=1,
        device_id=None,
        seed=1,
        exec_dynamic=True,
        enable_checkpointing=True,
    )
    with pipe:
        noise = fn.random.uniform(range=(0.0, 1.0), shape=[2, 3])
        pipe.set_outputs(
            noise, fn.random.uniform(range=(10.0, 20.0), shape=[1]), fn.random.uniform(range=(20.0, 30.0))
        )
    return pipe


SPEC = (
    tf.TensorSpec((4, 2, 3), tf.float32),
    {"tens": tf.TensorSpec((4,), tf.float32), "twenties": tf.TensorSpec((4,), tf.float32)},
)


def test_from_pipeline_names_the_outputs():
    data = dataset.from_pipeline(counting_pipeline(4), SPEC, device_id=None)
    assert data.element_spec == SPEC
    pipe = counting_pipeline(4)
    for images, targets in data.take(3):
        expected = [np.asarray(output.as_tensor()) for output in pipe.run()]
        np.testing.assert_array_equal(images, expected[0])
        np.testing.assert_array_equal(targets["tens"], expected[1].reshape(4))
        np.testing.assert_array_equal(targets["twenties"], expected[2].reshape(4))
        assert (targets["tens"].numpy() < 20).all() and (targets["twenties"].numpy() >= 20).all()


def test_from_pipeline_composes_and_saves(tmp_path):
    def fresh():
        data = dataset.from_pipeline(counting_pipeline(4), SPEC, device_id=None)
        return iter(data.map(lambda images, targets: images + targets["tens"][:, None, None]).prefetch(2))

    iterator = fresh()
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "loader")
    expected = [next(iterator) for _ in range(3)]
    restored = fresh()
    tf.train.Checkpoint(iterator=restored).restore(path).assert_consumed()
    for tensor in expected:
        np.testing.assert_array_equal(next(restored), tensor)


def test_repeat_batch():
    batch = (tf.constant([1.0, 2.0]), {"a": tf.constant([3])})
    repeated = list(dataset.repeat_batch(batch).take(3))
    assert len(repeated) == 3
    for images, targets in repeated:
        assert images.numpy().tolist() == [1.0, 2.0] and targets["a"].numpy().tolist() == [3]
