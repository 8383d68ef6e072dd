"""Which images of a batch are mixed, and batches without boxes.

The pixels and boxes of MixUp, CutMix and mosaic, and how often each comes, are compared with NumPy's in
tests/oracle/test_yolov4_oracle.py.
"""

import dataclasses

import numpy as np
import pytest
from nvidia.dali import fn

from tests.yolov4.dali_stage import run_stage
from yolov4 import mixing
from yolov4.config import get_config
from yolov4.mixing import Objects

OFF = dataclasses.replace(get_config("yolov4"), mosaic_prob=0.0, mixup_prob=0.0, cutmix_prob=0.0)


def test_sources_are_all_samples_once_and_then_always_others():
    for seed in range(10):
        samples = [(np.int32(0),)] * 7
        own, *others = run_stage(lambda _: mixing.draw_sources(4), samples, seed)
        assert sorted(map(int, own)) == list(range(7))
        for other in others:
            assert sorted(map(int, other)) == list(range(7))
            assert all(one != two for one, two in zip(own, other, strict=True))
    alone = run_stage(lambda _: mixing.draw_sources(4), [(np.int32(0),)])
    assert [int(source[0]) for source in alone] == [0, 0, 0, 0]


def test_a_rectangle_without_area_is_no_piece():
    """On the GPU it would cover what lies to its right and below."""

    def define(size):
        pieces = mixing.random_rectangle(fn.batch_permutation(), fn.random.coin_flip(probability=1.0), size)
        return pieces.sizes, pieces.count

    sizes, counts = map(np.array, run_stage(define, [(np.int32([5, 7]),)] * 400))
    np.testing.assert_array_equal(counts, (sizes > 0).all((1, 2)))
    assert 0.5 < counts.mean() < 1


@pytest.mark.parametrize("kind", ["mosaic_prob", "mixup_prob", "cutmix_prob"])
def test_a_batch_without_any_box_stays_without(kind):
    config = dataclasses.replace(OFF, **{kind: 1.0})
    nothing = np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.int32([64, 96])
    samples = [(np.full((64, 96, 3), level, np.float32), *nothing) for level in (0, 1, 0, 1)]

    def define(images, boxes, labels, size):
        images, objects = mixing.mix(config, images, Objects(boxes, labels), fn.cat([0, 0], size), size)
        return images, *objects

    _, boxes, labels = run_stage(define, samples)
    assert {*map(len, boxes), *map(len, labels)} == {0}
