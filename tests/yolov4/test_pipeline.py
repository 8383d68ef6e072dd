"""The stages of the DALI pipeline against NumPy and Pillow, and what the graph holds.

The whole pipeline is compared with NumPy in tests/oracle, with drawn boxes in test_loaders.py.
"""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from tests.yolov4.dali_stage import run_stage
from tests.yolov4.rectangles import ALL, PLAIN, batches, make, read
from yolov4 import color, crops, pipeline

MIXED = {"mosaic_prob": 0.5, "mixup_prob": 0.5, "cutmix_prob": 0.5, "multi_scale": 1.4}


def decode(encoded: bytes, window) -> np.ndarray:
    samples = [(np.frombuffer(encoded, np.uint8), np.array(window, np.int32))]
    ((image,),) = run_stage(lambda j, w: [pipeline.decode_crop(j, w, "cpu")], samples)
    return image


def test_decode_window_cuts_what_the_whole_image_shows_and_ignores_exif():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (123, 211, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    buffer = io.BytesIO()
    noise.resize((422, 246)).save(buffer, "JPEG", quality=90, exif=exif)
    jpeg = buffer.getvalue()
    whole = decode(jpeg, (0, 0, 246, 422))
    assert whole.shape == (246, 422, 3)
    np.testing.assert_array_equal(decode(jpeg, (31, 57, 100, 201)), whole[31:131, 57:258])
    file = [(np.frombuffer(jpeg, np.uint8),)]
    ((size,), (sizes,)) = run_stage(lambda j: [crops.source_size(j), crops.source_sizes([j, j])], file)
    assert size.tolist() == [246, 422] and sizes.tolist() == [[246] * 2, [422] * 2]


@pytest.mark.parametrize("size", [(40, 50), (130, 300), (200, 61)])
def test_resize_is_linear_and_antialiased(size):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8))
    image = noise.resize((190, 120), Image.Resampling.BICUBIC)
    ((got,),) = run_stage(lambda i, s: [pipeline.resize(i, s)], [(np.asarray(image), np.int32(size))])
    expected = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), int)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 4 and np.abs(got - expected).mean() < 0.5


def test_a_flip_moves_the_place_and_comes_as_often_as_asked():
    sample = np.int32([2, 1, 4, 3]), np.int32([6, 8])
    coins, places = run_stage(lambda p, s: pipeline.random_flip(p, s, 0.25), [sample] * 800)
    for coin, place in zip(coins, places, strict=True):
        assert place.tolist() == [2, 4 if coin else 1, 4, 3]  # columns 1, 2, 3 of 8 become 4, 5, 6
    assert 0.19 < np.mean(coins) < 0.31


def test_pad_and_to_unit_against_numpy():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    sample = image, np.int32([3, 2, 5, 7]), np.int32([10, 12])
    ((padded,), (unit,)) = run_stage(
        lambda i, p, s: [pipeline.pad(color.to_unit(i), p, s), color.to_unit(i)], [sample]
    )
    expected = np.full((10, 12, 3), 127 / 255)  # Darknet's 0.5
    expected[3:8, 2:9] = image / 255
    assert unit.dtype == padded.dtype == np.float32
    np.testing.assert_allclose(padded, expected, atol=1e-6)
    np.testing.assert_allclose(unit, image / 255, atol=1e-6)


def test_stages_that_are_off_are_not_in_the_graph(rectangles):
    operators = {
        "MultiPaste": [{"mosaic_prob": 0.5}, {"cutmix_prob": 0.5}, {"mixup_prob": 0.5}],
        "Hsv": [{"hue": 36.0}, {"saturation": 1.5}, {"exposure": 1.5}],
        "Flip": [{"flip_prob": 0.5}],
        "BatchPermutation": [{"cutmix_prob": 0.5}, {"mixup_prob": 0.5}],
    }
    plain = make(rectangles).pipeline.serialize()
    for name, changes in operators.items():
        assert name.encode() not in plain
        for change in changes:
            config = dataclasses.replace(PLAIN, **change)
            for training in (True, False):
                graph = make(rectangles, config=config, training=training).pipeline.serialize()
                assert (name.encode() in graph) == training, (name, training)


def test_batch_of_one(rectangles):
    config = dataclasses.replace(PLAIN, mosaic_prob=0.5, mixup_prob=1.0, cutmix_prob=1.0, min_box_size=2.0)
    counts = [int(batch["num_boxes"][0]) for batch in read(rectangles, config=config, count=40, batch_size=1)]
    assert min(counts) <= 1 and max(counts) > 1  # mosaics of one image; nothing else to mix it with
    config = dataclasses.replace(config, mosaic_prob=0.0)
    for batch in read(rectangles, config=config, count=12, batch_size=1):
        assert batch["num_boxes"] == 1


@pytest.mark.parametrize("training", [True, False])
def test_the_dataset_gives_what_the_pipeline_of_the_loader_gives(rectangles, training):
    config = dataclasses.replace(PLAIN, jitter=0.3, mosaic_prob=0.5)
    loader = make(rectangles, config=config, training=training, count_lost=True, seed=5)
    (batch,) = batches(loader, 1)
    for name, output in zip(loader.element_spec, loader.pipeline.run(), strict=True):
        np.testing.assert_array_equal(np.asarray(output.as_tensor()).reshape(batch[name].shape), batch[name])


@pytest.mark.gpu
@pytest.mark.parametrize("training, tiles", [(False, "batch"), (True, "batch"), (True, "fresh")])
def test_gpu_graph_gives_what_the_cpu_graph_gives(rectangles, training, tiles):
    """The same random numbers, so the same mosaics; PNGs are decoded alike, and resized alike to a level."""
    config = dataclasses.replace(PLAIN, letterbox=True, **ALL, **MIXED, mosaic_tiles=tiles)
    cpu = make(rectangles, config=config, training=training)
    gpu = make(rectangles, "dali_gpu", config, training=training)
    for _ in range(3):
        for name, one, other in zip(cpu.element_spec, cpu.pipeline.run(), gpu.pipeline.run(), strict=True):
            one, other = np.asarray(one.as_tensor()), np.asarray(other.as_cpu().as_tensor())
            if name == "images":
                assert np.abs(one - other).max() < 4.5 / 255
            else:
                np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
