"""Tests pipeline_api.py and dynamic_api.py: both give equal pixels, which are those of NumPy and Pillow."""

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import PIL.Image
import pytest
from nvidia.dali import Pipeline, fn

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from examples.preprocessing import dynamic_api, outputs, pipeline_api, sources
from tests.common.image_variants import VARIANTS, pillow
from tests.examples.preprocessing.pictures_on_disk import picture

APIS = ("pipeline", "dynamic")


def by_pipeline(paths, options, device_id=None):
    source = {"paths": paths, "labels": list(range(len(paths)))}
    arguments = {"options": options, "batch_size": 32, "num_threads": 2, "device_id": device_id}
    pipeline = pipeline_api.make_pipeline(sources.files_pipeline, source, **arguments)
    return list(outputs.numpy_images(pipeline, len(paths)))


def by_dynamic(paths, options):
    images = []
    for encoded, _ in sources.files_dynamic(paths, [0] * len(paths), batch_size=32):
        images += [np.array(image) for image in dynamic_api.preprocess(encoded, **options).cpu().tensors]
    return images[: len(paths)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="decode"),
        pytest.param({"resize_shorter": 64, "crop": (56, 48)}, id="resize-crop"),
        pytest.param(
            {"decode": "cropped", "resize_shorter": 64, "crop": (56, 48), "normalize": "imagenet"},
            id="decode_cropped-normalize",
        ),
        pytest.param(
            {"resize_shorter": 50, "brightness": 1.2, "saturation": 0.3, "rotate": 10.0, "shear": -8.0},
            id="resize-color-rotate-shear",
        ),
        pytest.param(
            {"crop": (40, 40), "rotate": -25.0, "shear": 5.0, "normalize": "imagenet"},
            id="crop-rotate-shear-normalize",
        ),
    ],
)
def test_preprocessed_photographs_are_equal_in_dalis_pipeline_and_dynamic_apis(coco128, options):
    paths = [str(path) for path in sorted((coco128 / "images").iterdir())[:48]]
    for a, b in zip(by_pipeline(paths, options), by_dynamic(paths, options), strict=True):
        assert a.dtype == b.dtype == ("float32" if "normalize" in options else "uint8")
        np.testing.assert_array_equal(a, b)


# --- independent computations ---

IMAGE = picture(120, 200, 0)


@pytest.fixture
def preprocess(tmp_path):
    """preprocess(**options) returns IMAGE after the chain, which is the same in both APIs."""
    path = str(tmp_path / "a.png")
    PIL.Image.fromarray(IMAGE).save(path)

    def apply(**options):
        (a,), (b,) = by_pipeline([path], options), by_dynamic([path], options)
        np.testing.assert_array_equal(a, b)
        return a

    return apply


def test_pixels_of_each_preprocessing_step_are_those_of_numpy_and_pillow(preprocess):
    np.testing.assert_array_equal(preprocess(), IMAGE)
    np.testing.assert_array_equal(preprocess(crop=(20, 30)), IMAGE[50:70, 85:115])
    np.testing.assert_allclose(
        preprocess(normalize="imagenet"), (IMAGE - IMAGENET_MEAN) / IMAGENET_STD, rtol=0, atol=1e-5
    )
    resized = PIL.Image.fromarray(IMAGE).resize((100, 60), PIL.Image.Resampling.BILINEAR)
    assert np.abs(preprocess(resize_shorter=60) - np.asarray(resized, float)).mean() < 0.7
    np.testing.assert_array_equal(preprocess(rotate=180.0), IMAGE[::-1, ::-1])
    brighter = np.clip(np.round(IMAGE * 1.2), 0, 255)
    assert np.abs(preprocess(brightness=1.2) - brighter).max() <= 1
    gray = preprocess(saturation=0.0).astype(int)
    assert np.ptp(gray, axis=-1).max() <= 1


def test_shear_moves_the_lower_rows_to_the_right_about_the_centre(preprocess):
    sheared = preprocess(shear=45.0)
    for row in (10, 59, 110):
        shift = row - 60
        expected = IMAGE[row, max(-shift, 0) : 200 - max(shift, 0)].astype(int)
        result = sheared[row, max(shift, 0) : 200 + min(shift, 0)]
        assert np.abs(result - expected).mean() < 10  # half a pixel, because rows have a height


# --- decoding only a part ---

# (height, width)
SIZES = ((96, 171), (200, 131), (48, 51), (48, 50), (64, 64), (30, 200), (225, 40), (151, 97))


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


@pytest.mark.parametrize(
    ("resize_shorter", "crop"),
    [(24, (20, 20)), (64, (61, 33)), (24, (11, 24)), (40, (31, 40)), (200, (200, 200))],
)
def test_decoding_only_the_crop_gives_the_pixels_of_decoding_the_whole_image(files, resize_shorter, crop):
    options = {"resize_shorter": resize_shorter, "crop": crop}
    expected = by_pipeline(files, options)
    cropped = by_pipeline(files, {**options, "decode": "cropped"})
    differences = [np.abs(a.astype(int) - b) for a, b in zip(expected, cropped, strict=True)]
    assert max(difference.max() for difference in differences) <= 1
    assert np.mean([(difference > 0).mean() for difference in differences]) < 0.02
    by_other_api = by_dynamic(files, {**options, "decode": "cropped"})
    for a, b in zip(cropped, by_other_api, strict=True):
        np.testing.assert_array_equal(a, b)


# --- random numbers ---


def augmented_ramps(api, seed):
    """Augments 800 copies of a gray ramp of 40 x 80 pixels, whose columns become lighter."""
    ramp = np.tile(np.arange(80, dtype=np.uint8)[:, None] + 60, (40, 1, 3))
    encoded = np.frombuffer(pillow("PNG", ramp), np.uint8)
    if api == "dynamic":
        images = ndd.decoders.image(ndd.as_batch([encoded] * 800))
        result = dynamic_api.augment(images, ndd.random.RNG(seed=seed), (8, 8))
        return np.stack([np.array(image) for image in result.tensors])
    pipeline = Pipeline(800, 2, None, seed=seed)
    with pipeline:
        images = fn.decoders.image(fn.external_source(source=lambda: [encoded] * 800))
        pipeline.set_outputs(pipeline_api.augment(images, (8, 8)))
    return pipeline.run()[0].as_array()


@pytest.mark.parametrize("api", APIS)
def test_augmented_images_repeat_with_the_same_seed_and_differ_with_another(api):
    images, repeated, other_seed = (augmented_ramps(api, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(images, repeated)
    assert not np.array_equal(images, other_seed)


@pytest.mark.parametrize("api", APIS)
def test_half_of_augmented_images_are_flipped_and_brightness_varies(api):
    images = augmented_ramps(api, 3).astype(float)
    slopes = images[:, :, -1].mean(axis=(1, 2)) - images[:, :, 0].mean(axis=(1, 2))
    assert abs(np.mean(slopes < 0) - 0.5) < 5 * np.sqrt(0.25 / 800)
    levels = images.mean(axis=(1, 2, 3))
    assert 60 * 0.7 < levels.min() < 95 * 0.75 and 105 * 1.2 < levels.max() < 140 * 1.3


@pytest.mark.gpu
@pytest.mark.parametrize("api", APIS)
def test_preprocessed_pixels_on_a_gpu_are_those_of_a_cpu(tmp_path, api):
    PIL.Image.fromarray(IMAGE).save(tmp_path / "a.png")
    paths = [str(tmp_path / "a.png")]
    options = {"resize_shorter": 60, "crop": (48, 48), "brightness": 1.1, "normalize": "imagenet"}
    (expected,) = by_pipeline(paths, options)
    options["device"] = "gpu"
    (result,) = by_dynamic(paths, options) if api == "dynamic" else by_pipeline(paths, options, device_id=0)
    # CPU and GPU decode PNG equally, so only rounding differs.
    np.testing.assert_allclose(result, expected, atol=3 / 57)
