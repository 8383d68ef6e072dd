"""The views against a plain transcription of Darknet's rule, axis by axis, and against the letterbox."""

import dataclasses
import math

import numpy as np
import pytest
from nvidia import dali

from common import letterbox
from tests.yolov4.dali_stage import run_stage
from yolov4 import crops
from yolov4.config import get_config

INPUT = (192, 288)  # height, width
SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), (192, 288), (50, 700), (480, 640)]
ODD_SIZES = [(1, 1), (1, 700), (700, 1), (2, 2), (3, 1), (2, 5), (4001, 3072)]
YOLOV4 = get_config("yolov4")


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def whole_views(sizes, keep_aspect, image_size=INPUT):
    samples = [(int32(*size), int32(*image_size)) for size in sizes]
    return zip(*run_stage(lambda s, i: crops.whole_image(s, i, keep_aspect), samples), strict=True)


def test_whole_view_is_the_centred_letterbox():
    random = np.random.default_rng(0)
    sizes = [*ODD_SIZES, *SIZES, *random.integers(1, 4097, (100, 2)).tolist()]
    for image_size in (INPUT, (416, 416), (608, 320)):
        for size, (window, place) in zip(sizes, whole_views(sizes, True, image_size), strict=True):
            assert window.tolist() == [0, 0, *size]
            assert tuple(place) == letterbox.geometry(*size, image_size, centered=True)


def test_whole_view_stretched_fills_the_input():
    for size, (window, place) in zip(SIZES, whole_views(SIZES, False), strict=True):
        assert window.tolist() == [0, 0, *size]
        assert place.tolist() == [0, 0, *INPUT]


# --- jitter ---


def darknet_axis(side, other_side, out, other_out, first_draw, last_draw, keep_aspect):
    """(start, length) of the window and of the place: load_data_detection for one axis, in whole pixels."""
    before, after = side * first_draw, side * last_draw  # pleft and pright
    if keep_aspect:
        missing = other_side * out / other_out - side  # to the shape of the network input
        if missing > 0:
            before, after = before - missing / 2, after - missing / 2
    before, after = math.floor(before + 0.5), math.floor(after + 0.5)
    length = max(side - before - after, 1)
    first, last = max(before, 0), min(before + length, side)
    scale = out / length
    place_first = min(math.floor((first - before) * scale + 0.5), out - 1)
    place_last = max(math.floor((last - before) * scale + 0.5), place_first + 1)
    return first, last - first, place_first, place_last - place_first


@pytest.mark.parametrize("keep_aspect", [False, True])
def test_jittered_view_is_darknets(monkeypatch, keep_aspect):
    random = np.random.default_rng(0)
    samples = []
    for size in SIZES + ODD_SIZES:
        for image_size in (INPUT, (608, 320), (416, 416)):
            for _ in range(20):
                # 64ths: halves are met exactly, in float32 as here.
                draws = (random.integers(-31, 32, (2, 2)) / 64).astype(np.float32)
                samples.append((int32(*size), int32(*image_size), *draws))

    def define(size, image_size, first, last):
        nodes = iter([first, last])
        monkeypatch.setattr(crops, "_jitter", lambda limit, count: next(nodes))
        return crops.jittered_crop(size, image_size, 0.3, keep_aspect)

    windows, places = run_stage(define, samples)
    differences = 0
    for (size, image_size, first, last), window, place in zip(samples, windows, places, strict=True):
        for axis in (0, 1):
            sizes = int(size[axis]), int(size[1 - axis]), int(image_size[axis]), int(image_size[1 - axis])
            expected = darknet_axis(*sizes, float(first[axis]), float(last[axis]), keep_aspect)
            got = window[axis], window[2 + axis], place[axis], place[2 + axis]
            differences += got != expected
            assert np.abs(np.subtract(got, expected)).max() <= 1
    assert differences <= (4 if keep_aspect else 0)  # a half that float32 and float64 round apart


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("keep_aspect", [False, True])
def test_views_of_several_images_are_columns(monkeypatch, keep_aspect, jitter):
    """The same draws give the same views, whether images come one by one or side by side."""
    config = dataclasses.replace(YOLOV4, letterbox=keep_aspect, jitter=jitter)
    draws = np.random.default_rng(0).uniform(-0.3, 0.3, (2, 2, len(SIZES))).astype(np.float32)

    def define(size, image_size, first, last, count=None):
        nodes = iter([first, last])
        monkeypatch.setattr(crops, "_jitter", lambda limit, number: next(nodes))
        return crops.training_crop(config, size, image_size, count)

    singles = [(int32(*size), int32(*INPUT), *draws[..., i].copy()) for i, size in enumerate(SIZES)]
    sizes = np.ascontiguousarray(np.array(SIZES, np.int32).T)
    columns = sizes, np.array(INPUT, np.int32)[:, np.newaxis], *draws
    together = run_stage(lambda *nodes: define(*nodes, count=len(SIZES)), [columns])
    for one_by_one, (side_by_side,) in zip(run_stage(define, singles), together, strict=True):
        np.testing.assert_array_equal(np.stack(one_by_one, 1), side_by_side)


def test_jitter_moves_four_edges_independently_and_uniformly():
    size = (3000, 4000)
    samples = [(int32(*size), int32(*INPUT))] * 2000
    views = run_stage(lambda s, i: crops.jittered_crop(s, i, 0.3, False), samples)
    windows, places = (np.array(values) for values in views)
    scale = windows[:, 2:] / places[:, 2:]  # stored pixels per pixel of the input
    start = windows[:, :2] - places[:, :2] * scale
    end = windows[:, :2] + windows[:, 2:] + (np.array(INPUT) - places[:, :2] - places[:, 2:]) * scale
    # How far top, left, bottom, right have moved inwards, as shares of the image's side.
    moves = np.concatenate([start / size, 1 - end / size], 1)
    assert np.abs(moves).max() < 0.3 + 0.01
    for edge in range(4):
        counts, _ = np.histogram(moves[:, edge], 6, (-0.3, 0.3))
        assert counts.min() > 0.8 * 2000 / 6, edge  # inwards and outwards
    correlation = np.corrcoef(moves.T) - np.eye(4)
    assert np.abs(correlation).max() < 0.1


# --- the size of a batch ---


def batch_sizes(config, training, count, seed=0, pipeline_seed=5):
    pipe = dali.Pipeline(batch_size=3, num_threads=1, device_id=None, seed=pipeline_seed, exec_dynamic=True)
    with pipe:
        pipe.set_outputs(crops.input_size(config, training, seed))
    sizes = []
    for _ in range(count):
        (output,) = pipe.run()
        batch = {tuple(np.array(sample).tolist()) for sample in output}
        assert len(batch) == 1  # one size for the whole batch
        sizes += batch
    return sizes


@pytest.mark.parametrize("image_size", [(608, 608), (416, 640)])
def test_multi_scale_draws_every_bucket_for_whole_batches(image_size):
    config = dataclasses.replace(YOLOV4, image_size=image_size, multi_scale=1.4)
    low, high = config.size_range
    expected = {config.bucket(units) for units in range(low, high + 1)}
    drawn = batch_sizes(config, True, 60 * len(expected))
    assert set(drawn) == expected and len(expected) > 5
    assert min(drawn.count(size) for size in expected) > 30  # of 60
    for height, width in expected:
        assert height % 32 == width % 32 == 0
        assert abs(height / width * image_size[1] / image_size[0] - 1) < 0.1
    assert drawn[:50] == batch_sizes(config, True, 50, pipeline_seed=6)  # another rank
    assert drawn[:50] != batch_sizes(config, True, 50, seed=1)
    assert set(batch_sizes(config, False, 10)) == {image_size}
    assert set(batch_sizes(dataclasses.replace(config, multi_scale=1.0), True, 10)) == {image_size}
