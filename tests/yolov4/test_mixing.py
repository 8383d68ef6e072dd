"""MixUp, CutMix and the choice between them and mosaic, on canvases that say where each pixel is from."""

import dataclasses

import numpy as np
import pytest
from nvidia.dali import fn

from tests.yolov4.dali_stage import run_stage
from yolov4 import mixing
from yolov4.config import get_config
from yolov4.mixing import Objects

SIZE = (64, 96)  # height, width
OFF = dataclasses.replace(get_config("yolov4"), mosaic_prob=0.0, mixup_prob=0.0, cutmix_prob=0.0)


def draw_canvases(count, size=SIZE, seed=0):
    """(noise, boxes in pixels, labels that tell whose they are, size); 1, 2, 3, 1, ... boxes."""
    random = np.random.default_rng(seed)
    canvases = []
    for index in range(count):
        corners = np.sort(random.uniform(0, 1, (index % 3 + 1, 2, 2)), axis=1) * size[::-1]
        image = random.integers(0, 256, (*size, 3)).astype(np.float32)
        labels = 10 * index + np.arange(index % 3 + 1)
        boxes = corners.reshape(-1, 4).astype(np.float32)
        canvases.append((image, boxes, labels.astype(np.int32), np.array(size, np.int32)))
    return canvases


def run_mix(config, canvases, seed=1):
    """-> [(image, boxes in pixels, labels)], of canvases without padding."""

    def define(images, boxes, labels, size):
        images, objects = mixing.mix(config, images, Objects(boxes, labels), fn.cat([0, 0], size), size)
        return images, *objects

    return list(zip(*run_stage(define, canvases, seed), strict=True))


# --- who mixes with whom, and how often ---


def test_sources_are_all_samples_once_and_then_always_others():
    for seed in range(20):
        samples = [(np.int32(0),)] * 7
        own, *others = run_stage(lambda _: mixing.draw_sources(4), samples, seed)
        assert sorted(map(int, own)) == list(range(7))
        for other in others:
            assert sorted(map(int, other)) == list(range(7))
            assert all(one != two for one, two in zip(own, other, strict=True))
    alone = run_stage(lambda _: mixing.draw_sources(4), [(np.int32(0),)])
    assert [int(source[0]) for source in alone] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "mosaic, mixup, cutmix", [(0.5, 0.5, 0.5), (0.5, 0.0, 0.0), (0.0, 1.0, 1.0), (0.0, 0.3, 0.0)]
)
def test_at_most_one_of_mosaic_mixup_cutmix_in_this_order(mosaic, mixup, cutmix):
    """Every canvas has one level, its number, and one box as large as itself."""
    config = dataclasses.replace(OFF, mosaic_prob=mosaic, mixup_prob=mixup, cutmix_prob=cutmix)
    full = np.array([[0, 0, SIZE[1], SIZE[0]]], np.float32)
    canvases = [
        (np.full((*SIZE, 3), index, np.float32), full, np.int32([index]), np.int32(SIZE))
        for index in range(200)
    ]
    kinds = []
    for seed in range(3):
        for image, boxes, labels in run_mix(config, canvases, seed):
            levels, own = set(np.unique(image).tolist()), labels[0]
            if len(boxes) == 1:
                kinds.append("plain")
                assert levels == {own} and (boxes == full).all()
            elif len(boxes) == 2 and (boxes == full).all():  # CutMix clips the other's box, or hides its own
                kinds.append("mixup")
                assert levels == {(own + labels[1]) / 2}
            else:
                kinds.append("mosaic" if len(boxes) == 4 else "cutmix")
                assert levels <= set(labels.tolist())
    shares = {"mosaic": mosaic, "mixup": (1 - mosaic) * mixup}
    shares["cutmix"] = (1 - mosaic) * (1 - mixup) * cutmix
    shares["plain"] = 1 - sum(shares.values())
    for kind, share in shares.items():
        got = kinds.count(kind) / len(kinds)
        assert abs(got - share) < 4 * (share * (1 - share) / len(kinds)) ** 0.5 + 0.01, kind


# --- MixUp ---


def test_mixup_is_half_and_half_with_the_boxes_of_both():
    canvases = draw_canvases(12)
    for seed in range(3):
        for image, boxes, labels in run_mix(dataclasses.replace(OFF, mixup_prob=1.0), canvases, seed):
            own, other = canvases[labels[0] // 10], canvases[labels[-1] // 10]
            assert own is not other
            np.testing.assert_array_equal(image, (own[0].astype(float) + other[0]) / 2)
            np.testing.assert_array_equal(boxes, np.concatenate([own[1], other[1]]))
            np.testing.assert_array_equal(labels, np.concatenate([own[2], other[2]]))


# --- CutMix ---


def test_rectangle_has_cutmixs_distribution():
    def define(size):
        pieces = mixing.random_rectangle(fn.batch_permutation(), fn.random.coin_flip(probability=1.0), size)
        return pieces.starts, pieces.sizes, pieces.targets, pieces.count

    size = (1000, 1500)
    starts, sizes, targets, counts = map(np.array, run_stage(define, [(np.int32(size),)] * 3000))
    starts, sizes = starts[:, 0], sizes[:, 0]
    np.testing.assert_array_equal(targets[:, 0], starts)
    assert ((sizes > 0).all(1) == counts).all()
    assert (starts >= 0).all() and (starts + sizes <= size).all()
    inside = (starts > 0).all(1) & (starts + sizes < size).all(1)  # nothing is cut off
    assert inside.sum() > 300
    shares = sizes[inside] / size
    np.testing.assert_allclose(shares[:, 0], shares[:, 1], atol=0.002)  # the canvas' shape
    # A rectangle of the area share a is inside with probability (1 - sqrt(a))**2: weigh by its inverse.
    area = shares.prod(1)
    small = area < 0.4
    counts, _ = np.histogram(area[small], 4, (0, 0.4), weights=1 / (1 - np.sqrt(area[small])) ** 2)
    assert counts.min() > 0.75 * counts.mean() and counts.max() < 1.25 * counts.mean()
    centers = (starts + sizes / 2)[inside] / size
    assert np.abs(centers.mean(0) - 0.5).max() < 0.03


def test_cutmix_against_numpy():
    canvases = draw_canvases(12)
    hidden = kept = pasted = 0
    for seed in range(8):
        for image, boxes, labels in run_mix(dataclasses.replace(OFF, cutmix_prob=1.0), canvases, seed):
            own, other = canvases[labels[0] // 10], canvases[labels[-1] // 10]
            if own is other:  # a rectangle without area
                np.testing.assert_array_equal(image, own[0])
                continue
            ys, xs = np.nonzero((image != own[0]).any(-1))
            low, high = np.array([xs.min(), ys.min()]), np.array([xs.max(), ys.max()]) + 1
            expected = own[0].copy()
            expected[low[1] : high[1], low[0] : high[0]] = other[0][low[1] : high[1], low[0] : high[0]]
            np.testing.assert_array_equal(image, expected)  # nothing has moved
            inside, others = (np.clip(c[1], np.tile(low, 2), np.tile(high, 2)) for c in (own, other))
            areas = [(b[:, 2:] - b[:, :2]).prod(1) for b in (inside, own[1])]
            is_hidden = areas[0] > 0.5 * areas[1]
            count = len(is_hidden)
            np.testing.assert_array_equal(labels, np.concatenate([own[2], other[2]]))
            np.testing.assert_allclose(boxes[count:], others, atol=1e-4)
            np.testing.assert_allclose(boxes[:count][~is_hidden], own[1][~is_hidden], atol=1e-4)
            gone = boxes[:count][is_hidden]
            assert not (gone[:, 2:] - gone[:, :2]).prod(1).any()
            hidden, kept = hidden + is_hidden.sum(), kept + (~is_hidden).sum()
            pasted += ((others[:, 2:] - others[:, :2]).prod(1) > 0).sum()
    assert hidden > 15 and kept > 40 and pasted > 20


# --- boxes of all kinds ---


@pytest.mark.parametrize("kind", ["mosaic_prob", "mixup_prob", "cutmix_prob"])
def test_batches_without_any_box_and_with_very_many(kind):
    config = dataclasses.replace(OFF, **{kind: 1.0})
    size = np.array(SIZE, np.int32)
    image = np.zeros((*SIZE, 3), np.float32)
    nothing = (image, np.zeros((0, 4), np.float32), np.zeros(0, np.int32), size)
    assert all(len(boxes) == len(labels) == 0 for _, boxes, labels in run_mix(config, [nothing] * 4))
    corners = np.sort(np.random.default_rng(0).uniform(0, 64, (500, 2, 2)), axis=1)
    many = (image, corners.reshape(-1, 4).astype(np.float32), np.arange(500, dtype=np.int32), size)
    canvases = [nothing, many, nothing, many]
    counts = {len(labels) for seed in range(3) for _, _, labels in run_mix(config, canvases, seed)}
    assert counts <= {0, 500, 1000, 1500, 2000} and len(counts) > 1
