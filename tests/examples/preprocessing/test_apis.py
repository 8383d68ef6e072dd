"""Tests pipeline_api.py and dynamic_api.py."""

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import PIL.Image
import pytest
from nvidia.dali import Pipeline, fn

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from examples.preprocessing import dynamic_api, outputs, pipeline_api, sources
from tests.common.image_variants import VARIANTS, pillow
from tests.examples.preprocessing.pictures_on_disk import picture

CHAINS = [
    {},
    {"resize_shorter": 64, "crop": (56, 48)},
    {"decode": "cropped", "resize_shorter": 64, "crop": (56, 48), "normalize": "imagenet"},
    {"resize_shorter": 50, "brightness": 1.2, "saturation": 0.3, "rotate": 10.0, "shear": -8.0},
    {"crop": (40, 40), "rotate": -25.0, "shear": 5.0, "normalize": "imagenet"},
]


def by_pipeline(paths, options):
    source = {"paths": paths, "labels": list(range(len(paths)))}
    options = {"options": options, "batch_size": 32, "num_threads": 2, "device_id": None}
    pipeline = pipeline_api.make_pipeline(sources.files_pipeline, source, **options)
    return list(outputs.numpy_images(pipeline, len(paths)))


def by_dynamic(paths, options):
    images = []
    for encoded, _ in sources.files_dynamic(paths, [0] * len(paths), batch_size=32):
        images += [np.array(image) for image in dynamic_api.preprocess(encoded, **options).tensors]
    return images[: len(paths)]


@pytest.mark.parametrize("options", CHAINS)
def test_both_apis_give_the_same_pixels_on_photographs(coco128, options):
    paths = [str(path) for path in sorted((coco128 / "images").iterdir())]
    for a, b in zip(by_pipeline(paths, options), by_dynamic(paths, options), strict=True):
        assert a.dtype == b.dtype == ("float32" if "normalize" in options else "uint8")
        np.testing.assert_array_equal(a, b)
    assert len(paths) == 128


# --- independent computations ---

IMAGE = picture(120, 200, 0)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """image(options) returns IMAGE after the chain, which is the same in both APIs."""
    path = tmp_path_factory.mktemp("image") / "a.png"
    PIL.Image.fromarray(IMAGE).save(path)

    def apply(**options):
        (a,), (b,) = by_pipeline([str(path)], options), by_dynamic([str(path)], options)
        np.testing.assert_array_equal(a, b)
        return a

    return apply


def test_steps_are_those_of_numpy_and_pillow(image):
    np.testing.assert_array_equal(image(), IMAGE)
    np.testing.assert_array_equal(image(crop=(20, 30)), IMAGE[50:70, 85:115])
    np.testing.assert_allclose(
        image(normalize="imagenet"), (IMAGE - IMAGENET_MEAN) / IMAGENET_STD, rtol=0, atol=1e-5
    )
    resized = PIL.Image.fromarray(IMAGE).resize((100, 60), PIL.Image.Resampling.BILINEAR)
    assert np.abs(image(resize_shorter=60) - np.asarray(resized, float)).mean() < 0.7
    np.testing.assert_array_equal(image(rotate=180.0), IMAGE[::-1, ::-1])
    expected = np.clip(np.round(IMAGE * 1.2), 0, 255)
    assert np.abs(image(brightness=1.2) - expected).max() <= 1
    gray = image(saturation=0.0).astype(int)
    assert np.ptp(gray, axis=-1).max() <= 1


def test_shear_moves_the_lower_part_to_the_right_and_keeps_the_centre(image):
    sheared = image(shear=45.0)
    for row in (10, 59, 110):
        shift = row - 60
        expected = IMAGE[row, max(-shift, 0) : 200 - max(shift, 0)].astype(int)
        actual = sheared[row, max(shift, 0) : 200 + min(shift, 0)]
        assert np.abs(actual - expected).mean() < 10  # half a pixel, because rows have a height


# --- decoding only a part ---

# (height, width)
SIZES = ((96, 171), (200, 131), (48, 51), (48, 50), (64, 64), (30, 200), (225, 40), (151, 97))
WINDOWS = [(24, (20, 20)), (64, (61, 33)), (24, (11, 24)), (40, (31, 40)), (200, (200, 200))]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """JPEGs with all subsamplings and EXIF orientations, and all other formats."""
    directory = tmp_path_factory.mktemp("images")
    for seed, size in enumerate(SIZES * 3):
        exif = PIL.Image.Exif()
        exif[0x0112] = 1 + seed % 8
        options = {"quality": 90, "subsampling": seed % 3, "progressive": seed % 2, "exif": exif}
        PIL.Image.fromarray(picture(*size, seed)).save(directory / f"{seed}.jpg", **options)
    for name, content in VARIANTS.items():
        (directory / f"{name}.png").write_bytes(content)
    paths = [str(path) for path in sorted(directory.iterdir())]
    assert len(paths) > 75
    return paths


@pytest.mark.parametrize(("shorter", "crop"), WINDOWS)
def test_decoding_a_part_gives_the_pixels_of_the_whole(files, shorter, crop):
    options = {"resize_shorter": shorter, "crop": crop}
    whole = by_pipeline(files, options)
    part, dynamic = (read(files, {**options, "decode": "cropped"}) for read in (by_pipeline, by_dynamic))
    differences = [np.abs(a.astype(int) - b) for a, b in zip(whole, part, strict=True)]
    assert max(difference.max() for difference in differences) <= 1
    assert np.mean([(difference > 0).mean() for difference in differences]) < 0.02
    for a, b in zip(part, dynamic, strict=True):
        np.testing.assert_array_equal(a, b)


# --- random numbers ---


@pytest.fixture(scope="module")
def many():
    """many(api, seed) augments 800 copies of a gray ramp of 40 x 80 pixels, whose columns become lighter."""
    ramp = np.tile(np.arange(80, dtype=np.uint8)[:, None] + 60, (40, 1, 3))
    encoded = np.frombuffer(pillow("PNG", ramp), np.uint8)

    def augmented(api, seed):
        if api == "dynamic":
            images = ndd.decoders.image(ndd.as_batch([encoded] * 800))
            result = dynamic_api.augment(images, ndd.random.RNG(seed=seed), (8, 8))
            return np.stack([np.array(image) for image in result.tensors])
        pipeline = Pipeline(800, 2, None, seed=seed)
        with pipeline:
            images = fn.decoders.image(fn.external_source(source=lambda: [encoded] * 800))
            pipeline.set_outputs(pipeline_api.augment(images, (8, 8)))
        return pipeline.run()[0].as_array()

    return augmented


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_random_numbers_follow_the_seed(many, api):
    first, again, other = (many(api, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_flips_and_brightness_have_their_distributions(many, api):
    images = many(api, 3).astype(float)
    slopes = images[:, :, -1].mean(axis=(1, 2)) - images[:, :, 0].mean(axis=(1, 2))
    assert abs(np.mean(slopes < 0) - 0.5) < 5 * np.sqrt(0.25 / 800)
    levels = images.mean(axis=(1, 2, 3))
    assert 60 * 0.7 < levels.min() < 95 * 0.75 and 105 * 1.2 < levels.max() < 140 * 1.3


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_uniform_numbers_are_even(api):
    if api == "dynamic":
        draw = {"rng": ndd.random.RNG(seed=3), "batch_size": 800}
        drawn = ndd.random.uniform(range=(0.7, 1.3), **draw).tensors
    else:
        pipeline = Pipeline(800, 2, None, seed=3)
        with pipeline:
            pipeline.set_outputs(fn.random.uniform(range=(0.7, 1.3)))
        drawn = pipeline.run()[0]
    drawn = np.sort([float(np.array(number)) for number in drawn])
    # The limit of the Kolmogorov-Smirnov test at 1 % is 1.63 / sqrt(n).
    assert np.abs((drawn - 0.7) / 0.6 - np.arange(800) / 800).max() < 1.63 / np.sqrt(800)


@pytest.mark.gpu
@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_on_a_gpu_the_pixels_are_the_same(tmp_path, api):
    PIL.Image.fromarray(IMAGE).save(tmp_path / "a.png")
    paths = [str(tmp_path / "a.png")]
    options = {"resize_shorter": 60, "crop": (48, 48), "brightness": 1.1, "normalize": "imagenet"}
    (expected,) = by_pipeline(paths, options)
    options["device"] = "gpu"
    if api == "dynamic":
        ((encoded, _),) = sources.files_dynamic(paths, [0], batch_size=1)
        result = np.array(dynamic_api.preprocess(encoded, **options).cpu().tensors[0])
    else:
        pipeline = pipeline_api.make_pipeline(
            sources.files_pipeline,
            {"paths": paths, "labels": [0]},
            options,
            batch_size=1,
            num_threads=1,
            device_id=0,
        )
        (result,) = outputs.numpy_images(pipeline, 1)
    # CPU and GPU decode PNG equally, so only rounding differs.
    np.testing.assert_allclose(result, expected, atol=3 / 57)
