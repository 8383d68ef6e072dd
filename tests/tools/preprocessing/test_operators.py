"""Every operator of --ops: equal in both of DALI's APIs, and equal to someone else's arithmetic."""

import cv2
import numpy as np
import PIL.Image
import pytest

from common import letterbox as letterbox_lib
from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from tests.tools.preprocessing import pictures_on_disk
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.operators import OPERATORS
from tools.preprocessing.preprocessor import Preprocessor

# Of every operator, calls without and with a random draw. The random ones have "..".
FIXED = {
    "decode": ["decode", "decode:bgr", "decode:gray,exif=ignore"],
    "decode_region": [
        "decode_region:start=3/5,shape=20/30",
        "decode_region:rel_start=0.1/0.2,rel_shape=0.5/0.3",
    ],
    "resize": [
        "resize:20x30",
        "resize:short=24",
        "resize:long=100,interp=cubic",
        "resize:30x30,mode=not_larger",
        "resize:70x70,mode=not_smaller,interp=nearest",
        "resize:20x30,interp=lanczos",
        "resize:20x30,interp=triangular",
        "resize:90x130,interp=gaussian",
        "resize:20x30,antialias=0",
    ],
    "fit": ["fit:32x32", "fit:200x100"],
    "letterbox": ["letterbox:32x50,fill=114", "letterbox:33x33,centered=1,fill=1/2/3,interp=cubic"],
    "crop": ["crop:20x30", "crop:20x30,x=0,y=1", "crop:80x80,fill=7"],
    "pad": ["pad:100x100", "pad:60x60,fill=9"],
    "flip": ["flip", "flip:vertical=1", "flip:horizontal=0,vertical=1"],
    "rotate": ["rotate:30,fill=114", "rotate:-90,keep_size=1", "rotate:12.5,interp=nearest"],
    "warp_affine": [
        "warp_affine:matrix=1/0.1/3/0/1/2,fill=0",
        "warp_affine:angle=20,scale=1.2,shear=5/0,translate=3/-4,fill=114",
        "warp_affine:scale=0.5,size=50x60",
    ],
    "color_twist": ["color_twist:brightness=1.2,contrast=0.8,saturation=1.5,hue=20"],
    "brightness": ["brightness:1.3", "brightness:1.0,brightness_shift=0.1"],
    "contrast": ["contrast:0.7"],
    "saturation": ["saturation:0.5"],
    "hue": ["hue:45"],
    "hsv": ["hsv:hue=10,saturation=0.5,value=1.1"],
    "gaussian_blur": ["gaussian_blur:1.5", "gaussian_blur:sigma=2,window_size=5"],
    "jpeg_compression_distortion": ["jpeg_compression_distortion:20"],
    "crop_mirror_normalize": [
        "crop_mirror_normalize:mean=imagenet",
        "crop_mirror_normalize:30x20,mean=1/2/3,std=4,mirror=1,layout=chw",
        "crop_mirror_normalize:100x100,fill=5,dtype=float16",
    ],
    "cast": ["cast:float32", "crop_mirror_normalize:std=2 | cast:uint8"],
    "layout": ["layout:CHW", "layout:CHW | layout:HWC"],
}
DRAWN = {
    "decode_random_crop": "decode_random_crop:area=0.3..1 | resize:20x20",
    "random_resized_crop": "random_resized_crop:24x24,aspect=0.5..2",
    "resize": "resize:20..40x30..50",
    "crop": "crop:20x20,x=0..1,y=0..1",
    "crop_mirror_normalize": "crop_mirror_normalize:20x20,x=0..1,p=0.5",
    "flip": "flip:p=0.5,p_vertical=0.25",
    "pad": "pad:80..90x100,fill=3..9",
    "rotate": "rotate:-10..10,fill=114",
    "warp_affine": "warp_affine:angle=-10..10,scale=0.8..1.2,translate=-5..5/-5..5,shear=-3..3/0",
    "color_twist": "color_twist:brightness=0.8..1.2,contrast=0.8..1.2,saturation=0.5..1.5,hue=-30..30",
    "brightness": "brightness:0.8..1.2",
    "contrast": "contrast:0.8..1.2",
    "saturation": "saturation:0.8..1.2",
    "hue": "hue:-20..20",
    "hsv": "hsv:hue=-20..20,value=0.9..1.1",
    "gaussian_blur": "gaussian_blur:0.5..2",
    "jpeg_compression_distortion": "jpeg_compression_distortion:10..90",
    "decode_region": "decode_region:rel_start=0..0.3/0..0.3,rel_shape=0.5/0.5",
}
NEVER_DRAWN = {"decode", "fit", "letterbox", "cast", "layout"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pictures")
    pictures_on_disk.write(directory)
    return directory


@pytest.fixture(scope="module")
def originals():
    return [pictures_on_disk.picture(*size, seed) for seed, size in enumerate(pictures_on_disk.SIZES)]


@pytest.fixture
def run(directory):
    """run(ops, api="pipeline", seed=0) -> the images that come out."""

    def run(ops: str, api: str = "pipeline", seed: int = 0) -> list[np.ndarray]:
        source = open_image_source("files", str(directory))
        work = Preprocessor(source=source, ops=ops, batch_size=2, seed=seed)
        return [sample.image for sample in work.samples(api)]

    return run


def test_every_operator_is_tested():
    every = set(OPERATORS)
    assert set(FIXED) | set(DRAWN) == every
    assert set(DRAWN) | NEVER_DRAWN == every


@pytest.mark.parametrize("ops", [ops for calls in FIXED.values() for ops in calls])
def test_same_pixels_in_both_apis(run, ops):
    pipeline, dynamic = run(ops), run(ops, "dynamic")
    assert len(pipeline) == len(pictures_on_disk.SIZES)
    for a, b in zip(pipeline, dynamic, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ops", DRAWN.values())
def test_draws_follow_the_seed(run, ops):
    """In either API: the same again for the same seed, others for another, and not one draw for all."""
    for api in ("pipeline", "dynamic"):
        first, again, other = run(ops, api, 5), run(ops, api, 5), run(ops, api, 6)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# --- someone else's arithmetic ---


def test_decoding(run, originals):
    for rgb, bgr, gray, image in zip(run(""), run("decode:bgr"), run("decode:gray"), originals, strict=True):
        np.testing.assert_array_equal(rgb, image)
        np.testing.assert_array_equal(bgr, image[..., ::-1])
        expected = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., np.newaxis]
        assert np.abs(gray.astype(int) - expected).max() <= 1


def test_decode_region(run, originals):
    for found, image in zip(run("decode_region:start=3/5,shape=20/30"), originals, strict=True):
        np.testing.assert_array_equal(found, image[3:23, 5:35])


def _pillow(image, size, filter_):
    """In float32: of integers Pillow rounds between its two passes."""
    channels = [PIL.Image.fromarray(channel) for channel in image.astype(np.float32).transpose(2, 0, 1)]
    channels = [channel.resize(size[::-1], filter_) for channel in channels]
    return np.clip(np.stack([np.asarray(channel) for channel in channels], axis=-1), 0, 255)


@pytest.mark.parametrize(
    ("interp", "filter_"),
    [
        ("linear", PIL.Image.Resampling.BILINEAR),
        ("triangular", PIL.Image.Resampling.BILINEAR),
        ("cubic", PIL.Image.Resampling.BICUBIC),
        ("lanczos", PIL.Image.Resampling.LANCZOS),
    ],
)
def test_resize(run, originals, interp, filter_):
    """Pillow's filters average over what an output pixel covers, too."""
    for found, image in zip(run(f"resize:20x30,interp={interp}"), originals, strict=True):
        error = np.abs(found - _pillow(image, (20, 30), filter_))
        assert found.shape == (20, 30, 3)
        assert error.mean() < 0.5
        assert error.max() < 5  # beside the sharp corner: DALI's weights are looked up


def test_resize_without_antialiasing_is_opencvs(run, originals):
    for found, image in zip(run("resize:20x30,antialias=0"), originals, strict=True):
        expected = cv2.resize(image, (30, 20), interpolation=cv2.INTER_LINEAR)
        assert np.abs(found.astype(int) - expected).max() <= 1


def test_sizes_of_resize(run, originals):
    shapes = [image.shape[:2] for image in originals]
    for (h, w), short, long, inside, around in zip(
        shapes,
        run("resize:short=24"),
        run("resize:long=24"),
        run("resize:30x30,mode=not_larger"),
        run("resize:30x30,mode=not_smaller"),
        strict=True,
    ):
        assert min(short.shape[:2]) == 24
        assert max(long.shape[:2]) == 24
        assert max(inside.shape[:2]) == 30
        assert min(around.shape[:2]) == 30
        for image in (short, long, inside, around):
            assert image.shape[0] / image.shape[1] == pytest.approx(h / w, rel=0.06)


@pytest.mark.parametrize("centered", [False, True])
def test_letterbox(run, originals, centered):
    ops = f"letterbox:33x50,fill=1/2/3,centered={int(centered)}"
    for found, fitted, image in zip(run(ops), run("fit:33x50"), originals, strict=True):
        top, left, height, width = letterbox_lib.geometry(*image.shape[:2], (33, 50), centered)
        expected = np.empty((33, 50, 3), np.uint8)
        expected[:] = (1, 2, 3)
        expected[top : top + height, left : left + width] = fitted
        np.testing.assert_array_equal(found, expected)
        pillow = _pillow(image, (height, width), PIL.Image.Resampling.BILINEAR)
        assert np.abs(fitted.astype(int) - pillow).mean() < 0.7


def test_crop_and_pad(run, originals):
    for middle, corner, larger, padded, image in zip(
        run("crop:20x30"),
        run("crop:20x30,x=0,y=1"),
        run("crop:100x100,x=0,y=0,fill=7"),
        run("pad:100x100,fill=7"),
        originals,
        strict=True,
    ):
        h, w = image.shape[:2]
        # DALI rounds half a pixel up
        top, left = int(np.floor((h - 20) / 2 + 0.5)), int(np.floor((w - 30) / 2 + 0.5))
        np.testing.assert_array_equal(middle, image[top : top + 20, left : left + 30])
        np.testing.assert_array_equal(corner, image[h - 20 :, :30])
        expected = np.full((100, 100, 3), 7, np.uint8)
        expected[:h, :w] = image
        np.testing.assert_array_equal(larger, expected)
        np.testing.assert_array_equal(padded, expected)


def test_flip(run, originals):
    for lr, ud, both, image in zip(
        run("flip"), run("flip:horizontal=0,vertical=1"), run("flip:vertical=1"), originals, strict=True
    ):
        np.testing.assert_array_equal(lr, image[:, ::-1])
        np.testing.assert_array_equal(ud, image[::-1])
        np.testing.assert_array_equal(both, image[::-1, ::-1])


def test_rotate_is_counter_clockwise(run, originals):
    for found, image in zip(run("rotate:90"), originals, strict=True):
        np.testing.assert_array_equal(found, np.rot90(image))


def test_warp_affine(run, originals):
    """Turned about the centre like fn.rotate, scaled up, moved to the right and down."""
    for turned, rotated, moved, matrix, image in zip(
        run("warp_affine:angle=25,fill=0"),
        run("rotate:25,keep_size=1,fill=0"),
        run("warp_affine:translate=5/3,fill=0"),
        run("warp_affine:matrix=1/0.2/-3/0.1/1/2,fill=0"),
        originals,
        strict=True,
    ):
        assert np.abs(turned.astype(int) - rotated).max() <= 1
        np.testing.assert_array_equal(moved[3:, 5:], image[:-3, :-5])
        assert not moved[:3].any()
        assert not moved[:, :5].any()
        # DALI's matrix maps output to input, and its pixels have their centres at one half.
        m = np.array([[1, 0.2, -3], [0.1, 1, 2]])
        m[:, 2] += m[:, :2] @ (0.5, 0.5) - 0.5
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        expected = cv2.warpAffine(image, m, image.shape[1::-1], flags=flags)
        assert np.abs(turned.astype(int)).any()
        assert np.mean(np.abs(matrix.astype(int) - expected) > 6) < 0.03  # OpenCV's weights have 5 bits


def test_brightness_and_contrast(run, originals):
    for bright, contrast, image in zip(run("brightness:1.3"), run("contrast:0.5"), originals, strict=True):
        expected = np.clip(np.round(image * 1.3), 0, 255)
        assert np.abs(bright - expected).max() <= 1
        assert np.abs(contrast - (128 + (image - 128.0) * 0.5)).max() <= 1


def test_saturation_zero_is_gray(run, originals):
    for found, image in zip(run("saturation:0"), originals, strict=True):
        gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        assert np.abs(found.astype(int) - gray[..., np.newaxis]).max() <= 2


def test_a_whole_turn_of_hue_changes_nothing(run, originals):
    for found, turned, image in zip(run("hue:360"), run("hue:120"), originals, strict=True):
        assert np.abs(found.astype(int) - image).max() <= 2
        assert np.abs(turned.astype(int) - image).max() > 60


def test_bgr_images_keep_their_colours(run):
    """color_twist is told which channel is which."""
    ops = "color_twist:saturation=0.3,hue=40"
    for rgb, bgr in zip(run(ops), run(f"decode:bgr | {ops}"), strict=True):
        assert np.abs(rgb.astype(int) - bgr[..., ::-1]).max() <= 1


def test_gaussian_blur(run, originals):
    for found, image in zip(run("gaussian_blur:sigma=1.5,window_size=9"), originals, strict=True):
        expected = cv2.GaussianBlur(image, (9, 9), 1.5, borderType=cv2.BORDER_REFLECT_101)
        assert np.abs(found.astype(int) - expected).max() <= 1


def test_normalize(run, originals):
    for found, custom, image in zip(
        run("crop_mirror_normalize:mean=imagenet"),
        run("crop_mirror_normalize:30x20,x=0,y=0,mean=1/2/3,std=4,mirror=1,layout=chw"),
        originals,
        strict=True,
    ):
        expected = (image - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-5)
        expected = ((image[:30, :20][:, ::-1] - np.array([1, 2, 3])) / 4).transpose(2, 0, 1)
        np.testing.assert_allclose(custom, expected, atol=1e-5)


def test_imagenet_follows_the_channels(run):
    (rgb, *_), (bgr, *_) = (
        run("crop_mirror_normalize:mean=imagenet"),
        run("decode:bgr | crop_mirror_normalize:mean=imagenet"),
    )
    np.testing.assert_array_equal(rgb, bgr[..., ::-1])


def test_cast_and_layout(run, originals):
    for rounded, planar, back, image in zip(
        run("crop_mirror_normalize:std=2 | cast:uint8"),
        run("layout:CHW"),
        run("layout:CHW | layout:HWC"),
        originals,
        strict=True,
    ):
        assert np.abs(rounded - image / 2).max() <= 0.5
        np.testing.assert_array_equal(planar, image.transpose(2, 0, 1))
        np.testing.assert_array_equal(back, image)


# --- random draws ---


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """800 images of one colour, whose brightness tells what was drawn."""
    directory = tmp_path_factory.mktemp("many")
    PIL.Image.fromarray(np.full((4, 8, 3), 100, np.uint8)).save(directory / "a.png")
    (directory / "list.txt").write_text("a.png\n" * 800)
    return open_image_source("list", str(directory / "list.txt"))


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_numbers_are_drawn_evenly(many, api):
    work = Preprocessor(source=many, ops="cast:float | brightness:0.5..1.5", batch_size=50, seed=3)
    drawn = np.sort([sample.image.mean() / 100 for sample in work.samples(api)])
    assert drawn[0] >= 0.5
    assert drawn[-1] <= 1.5
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded once in a hundred seeds, and the seed is fixed.
    assert np.abs(drawn - 0.5 - np.arange(800) / 800).max() < 1.63 / np.sqrt(800)


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_whole_numbers_are_drawn_evenly_with_both_ends(many, api):
    work = Preprocessor(source=many, ops="crop:1..4x2", batch_size=50, seed=3)
    heights = [sample.image.shape[0] for sample in work.samples(api)]
    counts = np.bincount(heights, minlength=5)
    assert counts[0] == 0
    assert counts[1:].sum() == 800
    assert np.all(np.abs(counts[1:] - 200) < 5 * np.sqrt(150))  # five standard deviations


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_one_number_for_both_sides_is_one_draw(many, api):
    for ops in ("resize:10..99", "crop:1..4", "pad:9..99"):
        sizes = [s.image.shape[:2] for s in Preprocessor(source=many, ops=ops, num_shards=20).samples(api)]
        assert all(height == width for height, width in sizes)
        assert len(set(sizes)) > 2


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_probabilities(tmp_path, api):
    PIL.Image.fromarray(np.arange(8 * 3, dtype=np.uint8).reshape(1, 8, 3)).save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n" * 600)
    source = open_image_source("list", str(tmp_path / "list.txt"))
    work = Preprocessor(source=source, ops="flip:0.25", batch_size=50, seed=1)
    flipped = np.mean([sample.image[0, 0, 0] != 0 for sample in work.samples(api)])
    assert abs(flipped - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 600)
