"""Tests operators.py: both APIs give the same pixels, which are those of OpenCV, NumPy or Pillow."""

import io
import sys

import cv2
import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import PIL.Image
import pytest
from nvidia.dali import Pipeline, fn

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from examples.preprocessing import operators
from tests.commands import run
from tests.common.image_variants import pillow
from tests.conftest import ROOT
from tests.examples.preprocessing.pictures_on_disk import picture
from tests.oracle import numpy_images

PICTURES = [picture(*size, seed) for seed, size in enumerate([(230, 300), (400, 270), (301, 457)])]
ENCODED = [np.frombuffer(pillow("PNG", image), np.uint8) for image in PICTURES]


@pytest.fixture(scope="module")
def pipeline_results() -> dict[str, list[np.ndarray]]:
    pipeline = Pipeline(len(ENCODED), 2, None, seed=1)
    with pipeline:
        outputs = operators.apply_all(fn, fn.external_source(source=lambda: ENCODED))
        pipeline.set_outputs(*outputs.values())
    batches = zip(outputs, pipeline.run(), strict=True)
    return {name: [np.array(image) for image in batch] for name, batch in batches}


@pytest.fixture(scope="module")
def dynamic_results() -> dict[str, list[np.ndarray]]:
    with ndd.EvalMode.sync_cpu:
        batches = operators.apply_all(ndd, ndd.as_batch(ENCODED))
    return {name: [np.array(image) for image in batch.tensors] for name, batch in batches.items()}


def test_pixels_of_each_dali_operator_are_equal_in_pipeline_and_dynamic_apis(
    pipeline_results, dynamic_results
):
    assert pipeline_results.keys() == dynamic_results.keys()
    for name in pipeline_results.keys() - set(operators.RANDOM):
        for a, b in zip(pipeline_results[name], dynamic_results[name], strict=True):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)


# --- independent computations ---


def middle(image, height=150, width=200):
    top, left = ((side - crop + 1) // 2 for side, crop in zip(image.shape, (height, width), strict=False))
    return image[top : top + height, left : left + width]


def padded(image, fill=114, *, centered=False):
    height, width = image.shape[:2]
    top, left = ((501 - height) // 2, (701 - width) // 2) if centered else (0, 0)
    canvas = np.full((500, 700, 3), fill, np.float32)
    canvas[top : top + height, left : left + width] = image
    return canvas


def part(image):
    height, width = image.shape[:2]
    top, left = numpy_images.nearest(0.1 * height), numpy_images.nearest(0.2 * width)
    return image[top : numpy_images.nearest(0.6 * height), left : numpy_images.nearest(0.5 * width)]


def gray(image):
    return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., np.newaxis]


def blurred(image):
    return cv2.GaussianBlur(image, (9, 9), 1.5, borderType=cv2.BORDER_REFLECT_101)


def moved(image):
    result = np.zeros_like(image)
    result[15:, 25:] = image[:-15, :-25]
    return result


def normalized(image):
    return (middle(image)[:, ::-1] - IMAGENET_MEAN) / IMAGENET_STD


EXPECTED = [  # (name, a function that computes the expected image, tolerance)
    ("decode", lambda image: image, 0),
    ("decode as stored", lambda image: image, 0),
    ("decode to BGR", lambda image: image[..., ::-1], 0),
    ("decode to gray", gray, 1),
    ("decode a crop", middle, 0),
    ("decode a part", lambda image: image[20:170, 50:250], 0),
    ("decode a part in 0..1", part, 0),
    ("resize, no antialiasing", lambda image: cv2.resize(image, (200, 150)), 1),
    ("crop", middle, 0),
    ("crop at the lower left", lambda image: image[-150:, :200], 0),
    ("crop and pad", lambda image: padded(image, (250, 200, 0), centered=True), 0),
    ("pad", padded, 0),
    ("flip", lambda image: image[:, ::-1], 0),
    ("flip top and bottom", lambda image: image[::-1], 0),
    ("rotate by 90", np.rot90, 0),
    ("warp: move", moved, 0),
    ("brightness", lambda image: np.clip(np.round(image * 1.3), 0, 255), 1),
    ("contrast", lambda image: 128 + (image - 128.0) * 0.5, 1),
    ("saturation", lambda image: np.repeat(gray(image), 3, axis=2), 2),
    ("gray", gray, 1),
    ("RGB to BGR", lambda image: image[..., ::-1], 0),
    ("gaussian_blur", blurred, 1),
    ("crop_mirror_normalize", normalized, 1e-5),
    ("normalize and pad", lambda image: padded(image / 255.0, 0), 1e-5),
    ("normalize to CHW", lambda image: image.transpose(2, 0, 1) / 255.0, 1e-5),
    ("cast", lambda image: image, 0),
    ("transpose to CHW", lambda image: image.transpose(2, 0, 1), 0),
]


@pytest.mark.parametrize(("name", "compute", "tolerance"), EXPECTED, ids=[name for name, *_ in EXPECTED])
def test_pixels_of_each_dali_operator_of_the_example_are_those_of_numpy_or_opencv(
    pipeline_results, name, compute, tolerance
):
    for result, image in zip(pipeline_results[name], PICTURES, strict=True):
        expected = compute(image)
        assert result.shape == expected.shape
        np.testing.assert_allclose(result.astype(float), expected, rtol=0, atol=tolerance)


def by_pillow(image, size, filter_):
    """For integers, Pillow rounds between its two passes."""
    channels = [PIL.Image.fromarray(channel) for channel in image.astype(np.float32).transpose(2, 0, 1)]
    channels = [channel.resize(size[::-1], filter_) for channel in channels]
    return np.clip(np.stack([np.asarray(channel) for channel in channels], axis=-1), 0, 255)


@pytest.mark.parametrize(
    ("name", "filter_"),
    [
        ("resize", "BILINEAR"),
        ("resize, triangular", "BILINEAR"),
        ("resize, cubic", "BICUBIC"),
        ("resize, Lanczos", "LANCZOS"),
    ],
)
def test_pixels_of_dali_resize_are_those_of_pillow(pipeline_results, name, filter_):
    for result, image in zip(pipeline_results[name], PICTURES, strict=True):
        error = np.abs(result - by_pillow(image, (150, 200), PIL.Image.Resampling[filter_]))
        assert error.mean() < 0.5
        assert error.max() < 8  # large at a sharp edge, because DALI's filter weights come from a table


def test_resize_to_nearest_pixels_makes_no_new_colors(pipeline_results):
    for result, image in zip(pipeline_results["resize, nearest"], PICTURES, strict=True):
        colors = set(map(tuple, image.reshape(-1, 3).tolist()))
        assert set(map(tuple, result.reshape(-1, 3).tolist())) <= colors
        expected = by_pillow(image, (150, 200), PIL.Image.Resampling.NEAREST)
        assert np.abs(result - expected).mean() < 4  # less than one pixel away


SCALES = {
    "resize the shorter side": lambda height, width: 150 / min(height, width),
    "resize the longer side": lambda height, width: 200 / max(height, width),
    "fit": lambda height, width: min(150 / height, 200 / width),
    "cover": lambda height, width: max(150 / height, 200 / width),
}


@pytest.mark.parametrize("name", SCALES)
def test_resize_of_one_side_keeps_the_aspect_ratio(pipeline_results, name):
    for result, image in zip(pipeline_results[name], PICTURES, strict=True):
        size = np.array(image.shape[:2])
        assert np.abs(result.shape[:2] - size * SCALES[name](*size)).max() <= 0.5 + 1e-6
        expected = by_pillow(image, result.shape[:2], PIL.Image.Resampling.BILINEAR)
        # DALI rounds the size, but not the scale. This shifts pixels by less than half a pixel.
        assert np.abs(result - expected).mean() < 1.5


def test_letterbox_is_the_largest_size_that_fits_with_a_gray_border(pipeline_results):
    for result, image in zip(pipeline_results["letterbox"], PICTURES, strict=True):
        _, _, height, width = numpy_images.letterbox(image.shape[:2], (200, 200), centered=True)
        top, left = (200 - height + 1) // 2, (200 - width + 1) // 2  # DALI rounds halves up
        inside = result[top : top + height, left : left + width]
        error = np.abs(inside - by_pillow(image, (height, width), PIL.Image.Resampling.BILINEAR))
        assert error.mean() < 1.3  # the scale is not rounded
        border = np.ones((200, 200), bool)
        border[top : top + height, left : left + width] = False
        assert np.all(result[border] == 114)


def by_opencv(image, matrix):
    """The first pixel's centre is at 0.5 in DALI, 0 in OpenCV. `matrix` maps the result to the image."""
    m = np.array(matrix, float)[:2]
    m[:, 2] += m[:, :2] @ (0.5, 0.5) - 0.5
    return cv2.warpAffine(image, m, image.shape[1::-1], flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)


def around_center(matrix):
    """Applies `matrix` (2, 2) around the point x=150, y=100."""
    to, back = np.eye(3), np.eye(3)
    to[:2, 2], back[:2, 2] = (150, 100), (-150, -100)
    full = np.eye(3)
    full[:2, :2] = matrix
    return to @ full @ back


ANGLE = np.radians(25)
ROTATION = around_center([[np.cos(ANGLE), -np.sin(ANGLE)], [np.sin(ANGLE), np.cos(ANGLE)]])
WARPS = [
    ("warp by a matrix", [[1, 0.2, -3], [0.1, 1, 2]]),
    ("warp: rotate", np.linalg.inv(ROTATION)),
    (
        "warp: shear and scale",
        np.linalg.inv(around_center(np.eye(2) * 0.8) @ around_center([[1, np.tan(np.radians(10))], [0, 1]])),
    ),
]


@pytest.mark.parametrize(("name", "matrix"), WARPS, ids=[name for name, _ in WARPS])
def test_pixels_of_dali_warp_are_those_of_opencv(pipeline_results, name, matrix):
    for result, image in zip(pipeline_results[name], PICTURES, strict=True):
        expected = by_opencv(image, matrix)
        # OpenCV rounds its weights to 5 bits.
        assert result.any() and np.mean(np.abs(result.astype(int) - expected) > 6) < 0.03


@pytest.mark.parametrize("name", ["rotate", "rotate, same size"])
def test_rotate_turns_counter_clockwise_as_pillow(pipeline_results, name):
    for result, image in zip(pipeline_results[name], PICTURES, strict=True):
        options = {"expand": name == "rotate", "fillcolor": (114, 114, 114)}
        rotated = np.asarray(PIL.Image.fromarray(image).rotate(25, PIL.Image.Resampling.BILINEAR, **options))
        size = np.minimum(result.shape, rotated.shape)[:2] - 2  # the sizes differ by a rounding error
        assert np.mean(np.abs(middle(result, *size).astype(int) - middle(rotated, *size))) < 4


def test_pixels_of_dali_hue_and_color_twist_are_nearly_those_of_numpy(pipeline_results):
    """The oracle rounds after each stage, DALI only once."""
    for result, hue, image in zip(
        pipeline_results["color_twist"], pipeline_results["hue"], PICTURES, strict=True
    ):
        options = {"brightness": 1.2, "contrast": 0.8, "saturation": 1.5, "hue": 20}
        expected = numpy_images.twist_color(image, **options)
        assert np.mean(np.abs(result.astype(int) - expected)) < 1
        assert np.mean(np.abs(hue.astype(int) - numpy_images.twist_color(image, hue=120))) < 1


def test_jpeg_compression_is_that_of_pillow(pipeline_results):
    for result, image in zip(pipeline_results["JPEG compression"], PICTURES, strict=True):
        stream = io.BytesIO()
        PIL.Image.fromarray(image).save(stream, "JPEG", quality=10)
        expected = np.asarray(PIL.Image.open(stream).convert("RGB"))
        assert np.mean(np.abs(result.astype(int) - expected)) < 2


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_random_crop_decoder_keeps_area_and_aspect_ratio_of_the_crop_within_the_limits(api):
    """Two channels of the picture are the row and the column of each pixel."""
    y, x = np.mgrid[0:250, 0:250]
    ramp = np.stack([y, x, 0 * x], axis=-1).astype(np.uint8)
    encoded = [np.frombuffer(pillow("PNG", ramp), np.uint8)] * 60
    if api == "dynamic":
        batch = operators.decoders(ndd, ndd.as_batch(encoded))["decode a random part"]
        images = [np.array(image) for image in batch.tensors]
    else:
        pipeline = Pipeline(60, 2, None, seed=1)
        with pipeline:
            node = operators.decoders(fn, fn.external_source(source=lambda: encoded))["decode a random part"]
            pipeline.set_outputs(node)
        images = [np.array(image) for image in pipeline.run()[0]]
    places = set()
    for image in images:
        top, left = image[0, 0, :2]
        height, width = image.shape[:2]
        np.testing.assert_array_equal(image, ramp[top : top + height, left : left + width])
        assert 0.09 < height * width / 250**2 < 0.51 and 0.72 < width / height < 1.37
        places.add((int(top), int(left)))
    assert len(places) > 50


def test_operator_gallery_command_writes_a_picture_of_seven_by_seven_cells(tmp_path):
    PIL.Image.fromarray(PICTURES[0]).save(tmp_path / "a.png")
    script = ROOT / "examples/preprocessing/operators.py"
    run(sys.executable, script, f"--input={tmp_path}/a.png", f"--output={tmp_path}/gallery.png")
    assert PIL.Image.open(tmp_path / "gallery.png").size == (7 * 208, 7 * 228)
