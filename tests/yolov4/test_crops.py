"""The crops against a plain transcription of Darknet's rule, axis by axis, and against the letterbox.

What is drawn for them, and for the size of a training batch, is compared with NumPy's in
tests/oracle/test_yolov4_oracle.py.
"""

import math

import numpy as np
import pytest

from common import letterbox
from tests.yolov4.dali_stage import run_stage
from yolov4 import crops

INPUT = (192, 288)  # height, width
SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), (192, 288), (50, 700), (480, 640)]
ODD_SIZES = [(1, 1), (1, 700), (700, 1), (2, 2), (3, 1), (2, 5), (4001, 3072)]


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("keep_aspect", [False, True])
def test_the_whole_image_is_stretched_or_letterboxed_in_the_centre(keep_aspect):
    random = np.random.default_rng(0)
    sizes = [*ODD_SIZES, *SIZES, *random.integers(1, 4097, (100, 2)).tolist()]
    for image_size in (INPUT, (416, 416), (608, 320)):
        samples = [(int32(*size), int32(*image_size)) for size in sizes]
        windows, places = run_stage(lambda s, i: crops.whole_image(s, i, keep_aspect), samples)
        for size, window, place in zip(sizes, windows, places, strict=True):
            assert window.tolist() == [0, 0, *size]
            stretched = (0, 0, *image_size)
            fitted = letterbox.geometry(*size, image_size, centered=True)
            assert tuple(place) == (fitted if keep_aspect else stretched)


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
