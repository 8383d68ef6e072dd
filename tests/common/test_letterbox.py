"""Tests letterbox.py against NumPy, with drawn sizes."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from common import letterbox
from tests.oracle import numpy_boxes, numpy_images

SIDES = st.integers(1, 70_000)
IMAGE_SIZES = st.tuples(st.integers(1, 2048), st.integers(1, 2048))
# derandomize: a failure in CI can be repeated
FIXED = settings(deadline=None, derandomize=True, database=None, max_examples=200)


@FIXED
@given(SIDES, SIDES, IMAGE_SIZES)
@example(4, 2, (5, 9))  # the exact width, 2.5, is rounded up
@example(1, 10_000, (512, 512))
def test_letterbox_size_equals_numpy_oracle(height, width, image_size):
    _, _, *size = numpy_images.letterbox((height, width), image_size, centered=False)
    assert letterbox.fit(height, width, image_size) == tuple(size)


@settings(FIXED, max_examples=50)
@given(st_numpy.arrays(np.float32, (2, 5, 4), elements=st.floats(0, 1, width=32)), st.data())
def test_boxes_moved_to_letterbox_and_back_are_unchanged(boxes, data):
    (height, width), image_size = data.draw(st.tuples(SIDES, SIDES)), data.draw(IMAGE_SIZES)
    size = height, width
    places = [numpy_images.letterbox(size, image_size, centered=centered) for centered in (False, True)]
    batch = np.array(places)[:, np.newaxis]
    there = np.asarray(numpy_boxes.to_letterbox(boxes, batch, image_size))
    back = np.asarray(letterbox.boxes_from_letterbox(there, batch, image_size))
    # Rounding errors of boxes in the letterbox grow by the factor `squeeze`.
    squeeze = np.tile([image_size[1] / places[0][3], image_size[0] / places[0][2]], 2)
    assert (np.abs(back - boxes) <= 5e-7 * squeeze).all()
    for i, (top, left, new_height, new_width) in enumerate(places):
        np.testing.assert_array_equal(numpy_boxes.to_letterbox(boxes[i], places[i], image_size), there[i])
        image_box = np.asarray(numpy_boxes.to_letterbox([0, 0, 1, 1], places[i], image_size))
        expected = [left, top, left + new_width, top + new_height]
        np.testing.assert_allclose(image_box * [*image_size[::-1], *image_size[::-1]], expected, atol=1e-3)
