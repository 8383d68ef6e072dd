"""Tests the operators of --ops, and apis.py."""

import cv2
import numpy as np
import PIL.Image
import pytest

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from tests.oracle import numpy_images
from tests.tools.preprocessing.pictures_on_disk import PICTURES, write
from tests.tools.preprocessing.reading import opened
from tools.preprocessing.options import APIS
from tools.preprocessing.preprocessor import Preprocessor

# Operators without random numbers. No test below computes the pixels of these chains.
FIXED = (
    "decode_region:rel_start=0.1/0.2,rel_shape=0.5/0.3 | resize:70x70,mode=not_smaller,interp=nearest",
    "warp_affine:angle=20,scale=1.2,shear=5/0,translate=3/-4,fill=114 | warp_affine:scale=0.5,size=50x60",
    "resize:90x130,interp=gaussian | brightness:1.0,brightness_shift=0.1 | hsv:hue=10,value=1.1",
    "hsv:saturation=0.5 | letterbox:33x33,centered=1,fill=1/2/3,interp=cubic,antialias=0 | rotate:30,fill=9",
    "jpeg_compression_distortion:20 | crop_mirror_normalize:100x100,fill=5,dtype=float16",
)
DRAWN = (
    "decode_random_crop:area=0.3..1 | resize:20x20",
    "random_resized_crop:24x24,aspect=0.5..2",
    "resize:20..40x30..50",
    "crop:20x20,x=0..1,y=0..1",
    "crop_mirror_normalize:20x20,x=0..1,p=0.5",
    "flip:p=0.5,p_vertical=0.25",
    "pad:80..90x100,fill=3..9",
    "rotate:-10..10,fill=114",
    "warp_affine:angle=-10..10,scale=0.8..1.2,translate=-5..5/-5..5,shear=-3..3/0",
    "color_twist:brightness=0.8..1.2,contrast=0.8..1.2,saturation=0.5..1.5,hue=-30..30",
    "jpeg_compression_distortion:10..90",
    "decode_region:rel_start=0..0.3/0..0.3,rel_shape=0.5/0.5",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return opened("files", write(tmp_path_factory.mktemp("pictures")))


def by_api(source, ops, api, *, batch_size=2, seed=0):
    work = Preprocessor(source=source, ops=ops, batch_size=batch_size, seed=seed)
    return [sample.image for sample in work.samples(api)]


def run(source, ops):
    found, dynamic = (by_api(source, ops, api) for api in APIS)
    for a, b, _ in zip(found, dynamic, PICTURES, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    return found


@pytest.mark.parametrize("ops", FIXED)
def test_same_pixels_in_both_apis(source, ops):
    run(source, ops)


@pytest.mark.parametrize("ops", DRAWN)
def test_draws_follow_the_seed(source, ops):
    for api in APIS:
        first, again, other = (by_api(source, ops, api, seed=seed) for seed in (5, 5, 6))
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# --- independent computations ---


def _pillow(image, size, filter_):
    """For integers, Pillow rounds between its two passes."""
    channels = [PIL.Image.fromarray(channel) for channel in image.astype(np.float32).transpose(2, 0, 1)]
    channels = [channel.resize(size[::-1], filter_) for channel in channels]
    return np.clip(np.stack([np.asarray(channel) for channel in channels], axis=-1), 0, 255)


FILTERS = [("linear", "BILINEAR"), ("triangular", "BILINEAR"), ("cubic", "BICUBIC"), ("lanczos", "LANCZOS")]


@pytest.mark.parametrize(("interp", "filter_"), FILTERS)
def test_resize_is_pillows(source, interp, filter_):
    for found, image in zip(run(source, f"resize:20x30,interp={interp}"), PICTURES, strict=True):
        error = np.abs(found - _pillow(image, (20, 30), PIL.Image.Resampling[filter_]))
        assert found.shape == (20, 30, 3)
        assert error.mean() < 0.5
        assert error.max() < 5  # large at a sharp edge, because DALI's filter weights come from a table


@pytest.mark.parametrize("centered", [False, True])
def test_letterbox(source, centered):
    fill, options = ((1, 2, 3), ",fill=1/2/3,centered=1") if centered else ((0, 0, 0), "")
    boxed = run(source, f"letterbox:33x50{options}")
    for found, fitted, image in zip(boxed, run(source, "fit:33x50"), PICTURES, strict=True):
        top, left, height, width = numpy_images.letterbox(image.shape[:2], (33, 50), centered=centered)
        expected = np.full((33, 50, 3), fill, np.uint8)
        expected[top : top + height, left : left + width] = fitted
        np.testing.assert_array_equal(found, expected)
        pillow = _pillow(image, (height, width), PIL.Image.Resampling.BILINEAR)
        assert np.abs(fitted.astype(int) - pillow).mean() < 0.7


def middle(image):
    top, left = ((side - crop + 1) // 2 for side, crop in zip(image.shape, (20, 30), strict=False))
    return image[top : top + 20, left : left + 30]


def filled(image):
    expected = np.full((100, 100, 3), 7, np.uint8)
    expected[: len(image), : image.shape[1]] = image
    return expected


def gray(image):
    return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., np.newaxis]


def blurred(image):
    return cv2.GaussianBlur(image, (9, 9), 1.5, borderType=cv2.BORDER_REFLECT_101)


def mirrored(image):
    return (image[:30, 19::-1] - (1.0, 2, 3)) / 4


EXPECTED = [  # ops, a function that computes the expected image, tolerance
    ("flip", lambda image: image[:, ::-1], 0),
    ("flip:horizontal=0,vertical=1", lambda image: image[::-1], 0),
    ("flip:vertical=1", lambda image: image[::-1, ::-1], 0),
    ("flip:p_vertical=1", lambda image: image[::-1], 0),
    ("rotate:90", np.rot90, 0),
    ("decode:bgr", lambda image: image[..., ::-1], 0),
    ("decode_region:start=3/5,shape=20/30", lambda image: image[3:23, 5:35], 0),
    ("crop:20x30", middle, 0),
    ("crop:100x100,x=0,y=0,fill=7", filled, 0),
    ("pad:100x100,fill=7", filled, 0),
    ("crop:20x30,x=0,y=1", lambda image: image[-20:, :30], 0),
    ("", lambda image: image, 0),
    ("layout:CHW", lambda image: image.transpose(2, 0, 1), 0),
    ("layout:CHW | layout:HWC", lambda image: image, 0),
    ("brightness:1.3", lambda image: np.clip(np.round(image * 1.3), 0, 255), 1),
    ("contrast:0.5", lambda image: 128 + (image - 128.0) * 0.5, 1),
    ("decode:gray", gray, 1),
    ("saturation:0", lambda image: np.repeat(gray(image), 3, axis=2), 2),
    ("hue:360", lambda image: image, 2),
    ("gaussian_blur:sigma=1.5,window_size=9", blurred, 1),
    ("crop_mirror_normalize:std=2 | cast:uint8", lambda image: image / 2, 0.5),
    ("cast:float32", lambda image: image, 0),
    ("resize:20x30,antialias=0", lambda image: cv2.resize(image, (30, 20)), 1),
    ("crop_mirror_normalize:mean=imagenet", lambda image: (image - IMAGENET_MEAN) / IMAGENET_STD, 1e-5),
    ("crop_mirror_normalize:30x20,x=0,y=0,mean=1/2/3,std=4,mirror=1", mirrored, 1e-5),
    ("crop_mirror_normalize:std=2,layout=chw", lambda image: image.transpose(2, 0, 1) / 2, 1e-5),
]


@pytest.mark.parametrize(("ops", "expected", "tolerance"), EXPECTED)
def test_pixels_are_those_of_numpy_and_opencv(source, ops, expected, tolerance):
    for found, image in zip(run(source, ops), PICTURES, strict=True):
        np.testing.assert_allclose(found.astype(float), expected(image), rtol=0, atol=tolerance)


def test_warp_affine(source):
    for turned, rotated, moved, matrix, image in zip(
        run(source, "warp_affine:angle=25,fill=0"),
        run(source, "rotate:25,keep_size=1,fill=0"),
        run(source, "warp_affine:translate=5/3,fill=0"),
        run(source, "warp_affine:matrix=1/0.2/-3/0.1/1/2,fill=0"),
        PICTURES,
        strict=True,
    ):
        assert turned.any()
        assert np.abs(turned.astype(int) - rotated).max() <= 1
        np.testing.assert_array_equal(moved[3:, 5:], image[:-3, :-5])
        assert not moved[:3].any() and not moved[:, :5].any()
        # The first pixel's centre is at 0.5 in DALI, 0 in OpenCV.
        m = np.array([[1, 0.2, -3], [0.1, 1, 2]])
        m[:, 2] += m[:, :2] @ (0.5, 0.5) - 0.5
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        expected = cv2.warpAffine(image, m, image.shape[1::-1], flags=flags)
        assert np.mean(np.abs(matrix.astype(int) - expected) > 6) < 0.03  # OpenCV rounds weights to 5 bits


def test_bgr_images_keep_their_colours(source):
    tolerances = {"color_twist:saturation=0.3,hue=40": 1, "crop_mirror_normalize:mean=imagenet": 0}
    for ops, tolerance in tolerances.items():
        for rgb, bgr in zip(run(source, ops), run(source, f"decode:bgr | {ops}"), strict=True):
            np.testing.assert_allclose(rgb.astype(float), bgr[..., ::-1], rtol=0, atol=tolerance)


# --- random draws ---


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """many(ops, api) applies `ops` to 800 copies of a ramp of 4 x 8 pixels."""
    directory = tmp_path_factory.mktemp("many")
    ramp = np.tile(np.arange(8, dtype=np.uint8)[:, None] * 20 + 30, (4, 1, 3))
    PIL.Image.fromarray(ramp).save(directory / "a.png")
    (directory / "list.txt").write_text("a.png\n" * 800)
    source = opened("list", directory / "list.txt")
    return lambda ops, api: by_api(source, ops, api, batch_size=50, seed=3)


@pytest.mark.parametrize("api", APIS)
def test_numbers_are_drawn_evenly(many, api):
    drawn = np.sort([image.mean() / 100 for image in many("cast:float | brightness:0.5..1.5", api)])
    assert drawn[0] >= 0.5 and drawn[-1] <= 1.5
    # The limit of the Kolmogorov-Smirnov test at 1 % is 1.63 / sqrt(n).
    assert np.abs(drawn - 0.5 - np.arange(800) / 800).max() < 1.63 / np.sqrt(800)


@pytest.mark.parametrize("api", APIS)
def test_whole_numbers_are_drawn_evenly_with_both_ends_and_one_for_both_sides(many, api):
    for ops in ("crop:1..4", "resize:1..4", "pad:9..12"):
        sizes = [image.shape[:2] for image in many(ops, api)]
        assert all(height == width for height, width in sizes)
        first = 9 if ops == "pad:9..12" else 1
        counts = np.bincount([height for height, _ in sizes])
        assert counts[:first].sum() == 0 and len(counts) == first + 4
        assert np.all(np.abs(counts[first:] - 200) < 5 * np.sqrt(150))


@pytest.mark.parametrize("api", APIS)
def test_probabilities(many, api):
    flipped = np.mean([image[0, 0, 0] > 100 for image in many("flip:0.25", api)])
    assert abs(flipped - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 800)
