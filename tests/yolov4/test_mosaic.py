"""Mosaics against Darknet's copying loop in NumPy: equal bytes and equal boxes.

What is drawn for them is compared with NumPy's in tests/oracle/test_yolov4_oracle.py.
"""

import numpy as np
import pytest
from nvidia.dali import fn

from tests.yolov4.dali_stage import run_stage
from yolov4 import mixing, mosaic
from yolov4.mixing import Objects

SIZES = [(96, 160), (160, 64), (64, 64)]  # height, width of the canvases
FILL = 127


def draw_canvas(random, size, index):
    """Noise with padding of FILL around: (image, boxes_px, labels of their own, place, size)."""
    sides = [random.integers(side // 4, side + 1) for side in size]
    starts = [random.integers(0, side - shown + 1) for side, shown in zip(size, sides, strict=True)]
    (top, left), (height, width) = starts, sides
    image = np.full((*size, 3), FILL, np.uint8)
    image[top : top + height, left : left + width] = random.integers(0, 256, (height, width, 3))
    corners = np.sort(random.integers(0, (width + 1, height + 1), (index % 4, 2, 2)), axis=1)
    boxes = (corners + [left, top]).reshape(-1, 4).astype(np.float32)  # none in every fourth
    labels = 4 * index + np.arange(1, index % 4 + 1, dtype=np.int32)
    return image, boxes, labels, np.int32([top, left, height, width]), np.int32(size)


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
    random = np.random.default_rng(0)
    canvases = [draw_canvas(random, size, index) for index in range(40)]
    chosen = random.integers(0, 2, 40, np.int32)

    def define(images, boxes, labels, place, size, is_chosen):
        sources = mixing.draw_sources(mosaic.TILES)
        cut = mosaic.random_cut(size)
        pieces = mosaic.tiles(sources, place, cut, size, is_chosen)
        parts = mixing.objects_of(Objects(boxes, labels), pieces)
        boxes, labels = (fn.cat(*nodes, axis=0) for nodes in zip(*parts, strict=True))
        return mixing.paste(images, [pieces]), boxes, labels, cut, *sources

    outputs = run_stage(define, [(*canvas, one) for canvas, one in zip(canvases, chosen, strict=True)])
    for is_mosaic, *found, cut, one, two, three, four in zip(chosen, *outputs, strict=True):
        sources = [int(source) for source in (one, two, three, four)]
        mixed = darknet_mosaic(canvases, sources, *cut.tolist())
        if not is_mosaic:  # tiles that are not there have no area, and neither have their boxes
            mixed, (_, boxes, _) = canvases[sources[0]][:3], found
            own = len(mixed[1])
            assert (boxes[own:, 2:] <= boxes[own:, :2]).any(1).all()
            found[1:] = [rows[:own] for rows in found[1:]]
        for got, expected in zip(found, mixed, strict=True):
            np.testing.assert_array_equal(got, expected)
