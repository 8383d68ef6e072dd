"""Mosaics against Darknet's copying loop in NumPy: equal bytes, and boxes on their own pixels."""

import itertools

import numpy as np
import pytest
from nvidia import dali
from nvidia.dali import fn

from yolov4 import mixing, mosaic
from yolov4.mixing import Objects

SIZES = [(96, 160), (160, 64), (64, 64)]  # height, width of the canvases
FILL = 127


def run_stage(define, samples: list[tuple[np.ndarray, ...]], seed=1) -> list[list[np.ndarray]]:
    """Runs a stage on a batch; `define` gets one node for each array of a sample. -> [output][sample]."""
    pipe = dali.Pipeline(batch_size=len(samples), num_threads=1, device_id=None, seed=seed, exec_dynamic=True)
    with pipe:
        columns = [list(column) for column in zip(*samples, strict=True)]
        nodes = [fn.external_source(source=itertools.repeat(c), batch=True) for c in columns]
        pipe.set_outputs(*define(*nodes))
    return [[np.array(sample) for sample in output] for output in pipe.run()]


def draw_canvas(random, size, index):
    """A canvas of noise below 100, padding of FILL around its place, and flat rectangles of unique levels.

    Returns (image, boxes_px, labels, place, size); label n is drawn as level 140 + n.
    """
    height, width = size
    image = np.full((height, width, 3), FILL, np.uint8)
    place_height, place_width = (
        random.integers(height // 4, height + 1),
        random.integers(width // 4, width + 1),
    )
    top, left = random.integers(0, height - place_height + 1), random.integers(0, width - place_width + 1)
    noise = random.integers(0, 100, (place_height, place_width, 3), np.uint8)
    image[top : top + place_height, left : left + place_width] = noise
    boxes, labels = [], []
    for number in range(index % 4):  # none in every fourth; side by side, so that none hides another
        x = left + number * (place_width // 3)
        w, h = place_width // 3 - 1, random.integers(place_height // 2, place_height + 1)
        y = random.integers(top, top + place_height - h + 1)
        label = 4 * index + number + 1
        image[y : y + h, x : x + w] = 140 + label
        boxes.append((x, y, x + w, y + h))
        labels.append(label)
    boxes = np.array(boxes, np.float32).reshape(-1, 4)
    place = np.array((top, left, place_height, place_width), np.int32)
    return image, boxes, np.array(labels, np.int32), place, np.array(size, np.int32)


def draw_canvases(size, count, seed=0):
    random = np.random.default_rng(seed)
    return [draw_canvas(random, size, index) for index in range(count)]


def run_mosaic(canvases, chosen, seed=1):
    """-> for each sample a dict of what `mosaic.tiles` drew, the image, the boxes in pixels, the labels."""

    def define(images, boxes, labels, place, size, is_chosen):
        sources = mixing.draw_sources(mosaic.TILES)
        cut = mosaic.random_cut(size)
        pieces = mosaic.tiles(sources, place, cut, size, is_chosen)
        image = mixing.paste(images, [pieces])
        parts = mixing.objects_of(Objects(boxes, labels), pieces)
        boxes, labels = (fn.cat(*nodes, axis=0) for nodes in zip(*parts, strict=True))
        return image, boxes, labels, cut, pieces.sizes, *sources

    samples = [(*canvas, np.int32(one)) for canvas, one in zip(canvases, chosen, strict=True)]
    names = ("image", "boxes", "labels", "cut", "sizes", *range(mosaic.TILES))
    outputs = run_stage(define, samples, seed)
    return [dict(zip(names, values, strict=True)) for values in zip(*outputs, strict=True)]


def darknet_mosaic(canvases, sources, cut_y, cut_x):
    """load_data_detection with use_mixup == 3, but boxes clipped to their tile: (image, boxes px, labels)."""
    height, width = canvases[0][0].shape[:2]
    out = np.zeros_like(canvases[0][0])
    all_boxes, all_labels = [], []
    for tile, source in enumerate(sources):
        image, boxes, labels, (top, left, place_height, place_width), _ = canvases[source]
        left_shift, top_shift = min(cut_x, left), min(cut_y, top)
        right_shift = min(width - cut_x, width - left - place_width)
        bottom_shift = min(height - cut_y, height - top - place_height)
        # What is added to a position in the image to get the one in the canvas.
        dx = width - cut_x - right_shift if tile in (0, 2) else left_shift - cut_x
        dy = height - cut_y - bottom_shift if tile in (0, 1) else top_shift - cut_y
        rows = range(cut_y) if tile in (0, 1) else range(cut_y, height)
        columns = np.arange(cut_x) if tile in (0, 2) else np.arange(cut_x, width)
        for y in rows:
            out[y, columns] = image[y + dy, columns + dx]
        low = np.array([columns[0], rows[0], columns[0], rows[0]])
        high = np.array([columns[-1], rows[-1], columns[-1], rows[-1]]) + 1
        all_boxes.append(np.clip(boxes - [dx, dy, dx, dy], low, high))
        all_labels.append(labels)
    return out, np.concatenate(all_boxes), np.concatenate(all_labels)


@pytest.mark.parametrize("size", SIZES)
def test_mosaic_is_darknets(size):
    canvases = draw_canvases(size, 12)
    for seed in range(4):
        chosen = np.random.default_rng(seed).integers(0, 2, len(canvases))
        for sample, is_mosaic in zip(run_mosaic(canvases, chosen, seed), chosen, strict=True):
            sources = [int(sample[tile]) for tile in range(4)]
            if not is_mosaic:
                image, boxes, labels, *_ = canvases[sources[0]]
            else:
                image, boxes, labels = darknet_mosaic(canvases, sources, *sample["cut"].tolist())
            assert sample["image"].tobytes() == image.tobytes()
            np.testing.assert_array_equal(sample["boxes"], boxes)
            np.testing.assert_array_equal(sample["labels"], labels)
        assert sorted(int(sample[0]) for sample in run_mosaic(canvases, chosen, seed)) == list(range(12))


@pytest.mark.parametrize("size", SIZES)
def test_boxes_are_found_on_their_own_pixels_and_none_crosses_a_border(size):
    canvases = draw_canvases(size, 12, seed=7)
    found = 0
    for seed in range(4):
        for sample in run_mosaic(canvases, [1] * 12, seed):
            image, (cut_y, cut_x) = sample["image"][..., 0], sample["cut"]
            spans = [(0, cut_y, 0, cut_x), (0, cut_y, cut_x, size[1])]
            spans += [(cut_y, size[0], 0, cut_x), (cut_y, size[0], cut_x, size[1])]
            expected = []  # of the picture alone: a rectangle of each level in each tile
            for top, bottom, left, right in spans:
                tile = image[top:bottom, left:right].astype(int) - 140
                for label in np.unique(tile[tile > 0]):
                    ys, xs = np.nonzero(tile == label)
                    box = xs.min() + left, ys.min() + top, xs.max() + left + 1, ys.max() + top + 1
                    expected.append((label, *box))
            boxes = sample["boxes"]
            shown = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
            got = np.concatenate([sample["labels"][shown, np.newaxis], boxes[shown]], 1)
            assert sorted(got.tolist()) == sorted(map(list, expected))
            found += len(got)
    assert found > 60


@pytest.mark.parametrize("size", SIZES)
def test_padding_shows_only_where_an_image_is_smaller_than_its_tile(size):
    canvases = draw_canvases(size, 12, seed=3)
    avoided = shown = 0
    for seed in range(4):
        for sample in run_mosaic(canvases, [1] * 12, seed):
            image, (cut_y, cut_x) = sample["image"], sample["cut"]
            parts = [
                image[:cut_y, :cut_x],
                image[:cut_y, cut_x:],
                image[cut_y:, :cut_x],
                image[cut_y:, cut_x:],
            ]
            for tile, part in enumerate(parts):
                place = canvases[int(sample[tile])][3]
                content = ~(part == FILL).all(-1)
                too_small = place[2] < part.shape[0], place[3] < part.shape[1]
                # The side of the tile along which some line has no content.
                assert too_small == (not content.any(1).all(), not content.any(0).all())
                shown += any(too_small)
                avoided += not any(too_small) and tuple(place[2:]) != size
    assert avoided > 5 and shown > 20


def test_cut_point_is_uniform_and_keeps_its_distance():
    size = np.array((1000, 600), np.int32)
    (cuts,) = run_stage(lambda s: [mosaic.random_cut(s)], [(size,)] * 2000)
    shares = np.array(cuts) / size
    assert shares.min() >= 0.2 and shares.max() <= 0.8
    for axis in (0, 1):
        counts, _ = np.histogram(shares[:, axis], 6, (0.2, 0.8))
        assert counts.min() > 0.8 * 2000 / 6
    assert abs(np.corrcoef(shares.T)[0, 1]) < 0.1


def test_one_image_alone_becomes_four_pieces_of_itself():
    canvases = draw_canvases((96, 160), 4)[3:]
    (sample,) = run_mosaic(canvases, [1])
    assert [int(sample[tile]) for tile in range(4)] == [0, 0, 0, 0]
    image, boxes, _ = darknet_mosaic(canvases, [0] * 4, *sample["cut"].tolist())
    np.testing.assert_array_equal(sample["image"], image)
    np.testing.assert_array_equal(sample["boxes"], boxes)
    assert len(boxes) == 12


def test_the_smallest_canvas_still_has_four_tiles():
    samples = run_mosaic(draw_canvases((32, 32), 4) * 50, [1] * 200)
    assert all((sample["sizes"] >= 6).all() for sample in samples)  # 0.2 * 32 is 6.4
