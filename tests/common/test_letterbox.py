import numpy as np
import pytest
import tensorflow as tf
from nvidia.dali import Pipeline, fn
from PIL import Image

from common import letterbox

FILL = (10, 60, 110)
SHAPES = [(480, 640), (640, 480), (97, 161), (37, 500), (500, 3), (1, 1), (96, 160), (300, 300)]
SIZES = pytest.mark.parametrize("image_size", [(128, 128), (96, 160), (64, 200), (201, 75)])
CENTERED = pytest.mark.parametrize("centered", [False, True])


def run_dali(images, boxes, image_size, *, centered, device="cpu"):
    """Lists of images and boxes -> the same, and the places, by `letterbox.letterbox` in a DALI graph."""
    pipeline = Pipeline(
        batch_size=len(images),
        num_threads=2,
        device_id=0 if device == "gpu" else None,
        prefetch_queue_depth=1,
    )
    with pipeline:
        image = fn.external_source(source=[images], cycle=True, batch=True, layout="HWC")
        box = fn.external_source(source=[boxes], cycle=True, batch=True)
        image = image.gpu() if device == "gpu" else image
        pipeline.set_outputs(*letterbox.letterbox(image, box, image_size, fill=FILL, centered=centered))
    pipeline.build()
    outputs = [output.as_cpu() for output in pipeline.run()]
    return [[np.array(output.at(i)) for i in range(len(images))] for output in outputs]


def run_tf(images, boxes, image_size, *, centered):
    @tf.function(
        input_signature=[tf.TensorSpec([None, None, 3], tf.uint8), tf.TensorSpec([None, 4], tf.float32)]
    )
    def function(image, box):
        return letterbox.letterbox_tf(image, box, image_size, fill=FILL, centered=centered)

    outputs = [function(image, box) for image, box in zip(images, boxes, strict=True)]
    return [[value.numpy() for value in values] for values in zip(*outputs, strict=True)]


BOTH = pytest.mark.parametrize("run", [run_dali, run_tf], ids=["dali", "tensorflow"])


def photos(rng):
    """Smooth random images: noise, enlarged twelve times."""
    small = [rng.integers(0, 256, (-(-h // 12), -(-w // 12), 3), dtype=np.uint8) for h, w in SHAPES]
    return [
        np.array(Image.fromarray(image).resize((w, h), Image.Resampling.BICUBIC))
        for image, (h, w) in zip(small, SHAPES, strict=True)
    ]


def random_boxes(rng):
    return [np.float32(rng.random((count, 4))) for count in range(len(SHAPES))]


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


# --- images ---


@BOTH
@SIZES
@CENTERED
def test_pixels_are_those_of_pillow_in_the_place_of_geometry(run, image_size, centered):
    rng = np.random.default_rng(1)
    images = photos(rng)
    results, _, places = run(images, random_boxes(rng), image_size, centered=centered)
    for image, result, place in zip(images, results, places, strict=True):
        top, left, height, width = letterbox.geometry(*image.shape[:2], image_size, centered)
        assert place.dtype == np.float32
        np.testing.assert_array_equal(place, [top, left, height, width])
        assert (result.shape, result.dtype) == ((*image_size, 3), np.uint8)
        # Pillow's bilinear filter antialiases, as DALI's does. (At the border DALI repeats the last pixel.)
        expected = np.empty((*image_size, 3), np.uint8)
        expected[:] = FILL
        inside = np.s_[top : top + height, left : left + width]
        expected[inside] = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        difference = np.abs(result.astype(int) - expected)
        assert difference[inside].mean() < 1
        difference[inside] = 0
        assert not difference.any()  # around the image there is `fill` and nothing else


@SIZES
@CENTERED
def test_tensorflow_equals_dali(image_size, centered):
    rng = np.random.default_rng(2)
    images, boxes = photos(rng), random_boxes(rng)
    dali = run_dali(images, boxes, image_size, centered=centered)
    tensorflow = run_tf(images, boxes, image_size, centered=centered)
    for a, b in zip(dali[0], tensorflow[0], strict=True):
        assert np.abs(a.astype(int) - b).mean() < 0.5
    for a, b in zip(dali[1] + dali[2], tensorflow[1] + tensorflow[2], strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-6)


# --- images and boxes together ---


@BOTH
@SIZES
@CENTERED
def test_a_drawn_rectangle_is_found_again(run, image_size, centered):
    shapes = [(480, 640), (640, 480), (97, 161), (160, 60), (300, 300)]
    images, boxes = [], []
    for height, width in shapes:
        left, top, right, bottom = width // 4, height // 3, width * 5 // 6, height * 3 // 4
        image = np.zeros((height, width, 3), np.uint8)
        image[top:bottom, left:right] = 255
        images.append(image)
        boxes.append(np.float32([[left / width, top / height, right / width, bottom / height]]))
    results, new_boxes, places = run(images, boxes, image_size, centered=centered)
    input_height, input_width = image_size
    for shape, box, result, new_box, place in zip(shapes, boxes, results, new_boxes, places, strict=True):
        rows, columns = np.nonzero(result[..., 0] > 127)
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        expected = new_box[0] * [input_width, input_height, input_width, input_height]
        np.testing.assert_allclose(found, expected, atol=0.55)
        # and what was found is taken back to the pixels of the original image
        found_boxes = np.array([found]) / [input_width, input_height, input_width, input_height]
        back = np.asarray(letterbox.boxes_from_letterbox(found_boxes, place, image_size))
        original_px = np.array([shape[1], shape[0]] * 2)
        pixel = original_px / [place[3], place[2], place[3], place[2]]  # one pixel of the network input
        assert (np.abs(back - box) * original_px <= 0.55 * pixel).all()


@BOTH
def test_a_batch_without_any_box(run):
    images = [np.zeros((20, 30, 3), np.uint8)] * 2
    _, boxes, _ = run(images, [np.zeros((0, 4), np.float32)] * 2, (64, 64), centered=True)
    assert [box.shape for box in boxes] == [(0, 4)] * 2


# --- boxes alone ---


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


@pytest.mark.gpu
@SIZES
@CENTERED
def test_gpu_equals_cpu(image_size, centered):
    rng = np.random.default_rng(4)
    images, boxes = photos(rng), random_boxes(rng)
    cpu = run_dali(images, boxes, image_size, centered=centered)
    gpu = run_dali(images, boxes, image_size, centered=centered, device="gpu")
    for a, b in zip(cpu[0], gpu[0], strict=True):
        assert np.abs(a.astype(int) - b).mean() < 0.5
    for a, b in zip(cpu[1] + cpu[2], gpu[1] + gpu[2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
