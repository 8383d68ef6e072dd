import numpy as np
import pytest

from common import letterbox

SHAPES = [(480, 640), (640, 480), (97, 161), (37, 500), (500, 3), (1, 1), (96, 160), (300, 300)]
SIZES = pytest.mark.parametrize("image_size", [(128, 128), (96, 160), (64, 200), (201, 75)])
CENTERED = pytest.mark.parametrize("centered", [False, True])


# --- geometry ---


@pytest.mark.parametrize(
    ("height", "width", "image_size", "expected"),
    [
        (480, 640, (512, 512), (0, 0, 384, 512)),
        (640, 480, (512, 512), (0, 0, 512, 384)),
        (427, 640, (512, 512), (0, 0, 342, 512)),  # 341.6
        (333, 500, (512, 512), (0, 0, 341, 512)),  # 340.99
        (3, 4, (2, 6), (0, 0, 2, 3)),  # 2.67
        (4, 2, (5, 9), (0, 0, 5, 3)),  # 2.5: halves up
        (512, 512, (512, 512), (0, 0, 512, 512)),
        (1, 10_000, (512, 512), (0, 0, 1, 512)),  # 0.05: a side never vanishes
        (65_535, 65_535, (1536, 1536), (0, 0, 1536, 1536)),
    ],
)
def test_geometry_by_example(height, width, image_size, expected):
    assert letterbox.geometry(height, width, image_size) == expected


def test_geometry_in_the_centre():
    assert letterbox.geometry(480, 640, (512, 512), centered=True) == (64, 0, 384, 512)
    assert letterbox.geometry(640, 480, (512, 512), centered=True) == (0, 64, 512, 384)
    assert letterbox.geometry(3, 4, (2, 6), centered=True) == (0, 1, 2, 3)  # the odd pixel on the right


@CENTERED
def test_geometry_fills_one_side_and_keeps_the_aspect_ratio(centered):
    rng = np.random.default_rng(0)
    for _ in range(2000):
        height, width, *image_size = (int(side) for side in rng.integers(1, 2000, 4))
        top, left, new_height, new_width = letterbox.geometry(height, width, tuple(image_size), centered)
        assert 1 <= new_height <= image_size[0]
        assert 1 <= new_width <= image_size[1]
        assert new_height == image_size[0] or new_width == image_size[1]
        scale = min(image_size[0] / height, image_size[1] / width)
        assert abs(new_height - max(height * scale, 1)) <= 0.5 + 1e-9
        assert abs(new_width - max(width * scale, 1)) <= 0.5 + 1e-9
        below, right = image_size[0] - top - new_height, image_size[1] - left - new_width
        if centered:
            assert (below - top, right - left) in [(0, 0), (0, 1), (1, 0)]
        else:
            assert (top, left) == (0, 0)


# --- boxes ---


@SIZES
@CENTERED
def test_the_inverse_is_exact(image_size, centered):
    rng = np.random.default_rng(3)
    boxes = np.float32(rng.random((len(SHAPES), 50, 4)))
    places = np.array([letterbox.geometry(*shape, image_size, centered) for shape in SHAPES])[:, np.newaxis]
    there = letterbox.boxes_to_letterbox(boxes, places, image_size)
    back = np.asarray(letterbox.boxes_from_letterbox(there, places, image_size))
    # Rounding in the network input counts more in a direction that is squeezed to a few pixels.
    squeezed = max(image_size) / places[..., 2:].min(axis=-1, keepdims=True)
    assert (np.abs(back - boxes) <= 1e-6 * np.maximum(squeezed, 1)).all()
    for i, place in enumerate(places[:, 0]):  # one image is like a batch
        np.testing.assert_array_equal(letterbox.boxes_to_letterbox(boxes[i], place, image_size), there[i])


def test_boxes_by_hand():
    # 200 x 100 pixels into 100 x 100: 100 x 50, in the middle
    place = letterbox.geometry(200, 100, (100, 100), centered=True)
    assert place == (0, 25, 100, 50)
    boxes = [[0, 0, 1, 1], [0.5, 0.1, 0.7, 0.2]]
    expected = [[0.25, 0, 0.75, 1], [0.5, 0.1, 0.6, 0.2]]
    np.testing.assert_allclose(letterbox.boxes_to_letterbox(boxes, place, (100, 100)), expected, atol=1e-6)
    np.testing.assert_allclose(letterbox.boxes_from_letterbox(expected, place, (100, 100)), boxes, atol=1e-6)
