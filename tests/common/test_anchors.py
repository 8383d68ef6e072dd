"""Tests anchors.py against loops over levels, cells, scales and aspect ratios."""

import dataclasses
import math

import numpy as np
import pytest

from common.anchors import Anchors

RATIOS = [1.0, 2.0, 0.5]


def brute_force(min_level, max_level, num_scales, ratios, anchor_scale, image_size):
    """Returns anchors as tlbr pixels, ordered by level, row, column, scale and ratio."""
    sizes = [image_size]  # sizes of levels 0, 1, 2, ...: each is half of the previous size, rounded up
    while len(sizes) <= max_level:
        sizes.append(tuple((side + 1) // 2 for side in sizes[-1]))
    boxes = []
    for level in range(min_level, max_level + 1):
        rows, columns = sizes[level]
        stride_y, stride_x = image_size[0] / rows, image_size[1] / columns
        for row in range(rows):
            for column in range(columns):
                y, x = (row + 0.5) * stride_y, (column + 0.5) * stride_x
                for scale in range(num_scales):
                    for ratio in ratios:
                        size = anchor_scale * 2 ** (scale / num_scales)
                        height, width = size * stride_y / math.sqrt(ratio), size * stride_x * math.sqrt(ratio)
                        boxes.append([y - height / 2, x - width / 2, y + height / 2, x + width / 2])
    return np.array(boxes)


ANCHORS = {
    "d7": (3, 7, 3, RATIOS, 5.0, (128, 384)),
    "odd-sides": (3, 8, 3, RATIOS, 4.0, (130, 77)),
    "two-scales": (2, 5, 2, [0.7, 1.4], 3.0, (64, 48)),
    "tiny-image": (3, 7, 1, [1.0], 4.0, (5, 1)),
}


@pytest.mark.parametrize("arguments", ANCHORS.values(), ids=ANCHORS)
def test_anchors_equal_loops_over_levels_cells_scales_and_ratios_in_that_order(arguments):
    anchors = Anchors(*arguments)
    expected = brute_force(*arguments)
    assert anchors.boxes.dtype == anchors.boxes_normalized.dtype == np.float32
    assert anchors.levels == range(arguments[0], arguments[1] + 1)
    assert anchors.boxes.shape == (anchors.num_anchors, 4) == expected.shape
    np.testing.assert_allclose(anchors.boxes, expected, rtol=1e-6, atol=1e-4)
    height, width = arguments[-1]
    boxes_ltrb = expected[:, [1, 0, 3, 2]]
    normalized = boxes_ltrb / [width, height, width, height]
    np.testing.assert_allclose(anchors.boxes_normalized, normalized, rtol=1e-6, atol=1e-6)


def test_anchors_objects_made_from_lists_and_from_tuples_are_equal_with_equal_hashes():
    with_lists = Anchors(3, 7, 3, [1, 2, 0.5], 4, [512, 256])
    with_tuples = Anchors(3, 7, 3, (1.0, 2.0, 0.5), 4.0, (512, 256))
    assert len({with_lists, with_tuples}) == 1
    assert with_lists != Anchors(3, 7, 3, RATIOS, 4.0, (256, 512))


def test_anchor_arrays_are_cached_and_read_only():
    anchors = Anchors(3, 7, 3, RATIOS, 4.0, (512, 256))
    assert anchors.boxes is anchors.boxes
    for array in (anchors.boxes, anchors.boxes_normalized):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


IMPOSSIBLE = [("min_level", 8), ("min_level", -1), ("num_scales", 0), ("anchor_scale", 0.0)]
IMPOSSIBLE += [("aspect_ratios", []), ("aspect_ratios", [1.0, -2.0])]
IMPOSSIBLE += [("image_size", (512,)), ("image_size", (512, 0))]


@pytest.mark.parametrize(
    ("field", "value"), IMPOSSIBLE, ids=[f"{field}={value}" for field, value in IMPOSSIBLE]
)
def test_invalid_anchor_setting_is_refused(field, value):
    anchors = Anchors(3, 7, 3, RATIOS, 4.0, (512, 512))
    message = "need 0 <= min_level <= max_level, and all other numbers above 0"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(anchors, **{field: value})
