import io
import itertools

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types
from PIL import Image

from common import tf_readers


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
    np.testing.assert_array_equal(tf_readers.image_size_tf(tf.constant(encoded)), (310, 470))
    for top, left, height, width in [(0, 0, 310, 470), (17, 33, 100, 201), (309, 469, 1, 1)]:
        window = tf.constant([top, left, height, width])
        got = tf_readers.decode_image_tf(tf.constant(encoded), window)
        assert got.dtype == tf.uint8
        difference = np.asarray(got, int) - expected[top : top + height, left : left + width]
        if width < 470:  # the outermost columns lack their neighbours' chroma
            assert np.abs(difference).max() < 40
            difference = difference[:, 1:-1]
        np.testing.assert_array_equal(difference, 0)


def test_pixels_are_those_of_the_file():
    got = tf_readers.decode_image_tf(tf.constant(ENCODED["png"]), tf.constant([0, 0, 310, 470]))
    np.testing.assert_array_equal(got, np.asarray(SMOOTH))
    got = tf_readers.decode_image_tf(tf.constant(ENCODED["jpeg"]), tf.constant([0, 0, 310, 470]))
    assert np.abs(np.asarray(got, int) - np.asarray(SMOOTH, int)).mean() < 3


def test_decoding_runs_in_a_dataset_with_a_static_shape():
    files = tf.data.Dataset.from_tensor_slices([ENCODED["png"], ENCODED["jpeg"]])
    images = files.map(lambda encoded: tf_readers.decode_image_tf(encoded, tf.constant([1, 2, 30, 40])))
    assert images.element_spec == tf.TensorSpec((None, None, 3), tf.uint8)
    assert [image.shape for image in images] == [(30, 40, 3)] * 2
