"""Mosaic in DALI: one training image made from four images, each at its own scale.

Sources: AlexeyAB/darknet src/data.c, load_data_detection and blend_truth_mosaic; arXiv 2004.10934 figure 3.

A random cut point divides the image into four tiles. Each tile shows a part of another canvas (a finished
training image of the batch) at the scale of that canvas:

                cut_x                     the canvas of tile 0
    +-------------+-----------------+     +-------------------------------+
    |             |                 |     |  padding                      |
    |   tile 0    |     tile 1      |     |    +---------------------+    |
    |             |                 |     |    | its image           |    |
    +-------------+-----------------+     |    |       +-------------+    |
    |             |                 |     |    |       |             |    |
    |             |                 |     |    |       |   tile 0    |    |
    |   tile 2    |     tile 3      |     |    |       |             |    |
    |             |                 |     |    +-------+-------------+    |  |
    |             |                 |     |                               |  | bottom_shift
    +-------------+-----------------+     +-------------------------------+  |
     cut_y is the height of tile 0                                   -----
                                                               right_shift

    tile   part of its canvas    height x width         moved inwards by
    0      the lower right       cut_y, cut_x           bottom_shift, right_shift
    1      the lower left        cut_y, W - cut_x       bottom_shift, left_shift
    2      the upper right       H - cut_y, cut_x       top_shift, right_shift
    3      the upper left        H - cut_y, W - cut_x   top_shift, left_shift

    right_shift  = min(W - cut_x, padding on the right)    left_shift = min(cut_x, padding on the left)
    bottom_shift = min(H - cut_y, padding at the bottom)   top_shift  = min(cut_y, padding at the top)

So a tile shows padding only if the image is smaller than the tile.

Boxes move with their tile and are clipped to the tile. Darknet clips them only to the whole image, unless
mosaic_bound=1. Darknet also reads four new images for each mosaic. It draws once per batch: all images of a
batch become mosaics, or none.

A box stays if both sides are at least min_box_size. Darknet has the same rule, with one pixel (src/data.c
lines 1020 to 1024, commit 59596d7). So the edge of a bus still counts as a bus. min_visible also drops a box
if the tile shows less than this share of it. ultralytics/yolov5 drops shares up to 0.1
(utils/augmentations.py, box_candidates: area_thr).
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from yolov4.crops import round_half_up

MIN_OFFSET = 0.2  # least distance of the cut point from a border / side of the image (src/data.c: min_offset)
TILES = 4

# For each tile: whether it is an upper tile, and whether it is a left tile.
IS_FIRST = np.array([[1, 1], [1, 0], [0, 1], [0, 0]], np.int32)


class Objects(NamedTuple):
    boxes_px: DataNode  # float32 (N, 4), ltrb
    labels: DataNode  # int32 (N,)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Rectangles of canvases and their positions in a new image. int32 nodes on the CPU, in pixels.

    Only the first `count` of the R pieces are present.
    """

    sources: list[DataNode]  # R nodes (): index of the canvas in the batch
    starts: DataNode  # (R, 2): top, left in the canvas
    sizes: DataNode  # (R, 2): height, width; above 0 if the piece is present
    targets: DataNode  # (R, 2): top, left in the new image
    count: DataNode | int  # ()


def hide_slivers(boxes_px: DataNode, clipped_px: DataNode, min_visible: float) -> DataNode:
    """Sets a clipped box (N, 4) to 0 if its area is below `min_visible` times the area of the whole box."""
    if not min_visible:
        return clipped_px
    stays = fn.cast(_area(clipped_px) >= min_visible * _area(boxes_px), dtype=types.FLOAT)
    return clipped_px * fn.expand_dims(stays, axes=[1])


def random_cut(image_size: DataNode) -> DataNode:
    """Draws the cut point: int32 (2,), (cut_y, cut_x) in whole pixels."""
    share = fn.random.uniform(range=(MIN_OFFSET, 1.0 - MIN_OFFSET), shape=[2])
    return round_half_up(share * image_size)


def tiles(
    sources: list[DataNode], places: DataNode, cut: DataNode, image_size: DataNode, chosen: DataNode
) -> Pieces:
    """Returns the four pieces of a mosaic. If `chosen` is 0, only one is present, the whole first canvas.

    Args:
        sources: four int32 (), the indices of the canvases in the batch.
        places: int32 (4,), top, left, height and width of the image in its canvas, in pixels.
        cut: int32 (2,), from `random_cut`.
        image_size: int32 (2,), the size of the canvases.
        chosen: int32 (), 1 for a mosaic, else 0.
    """
    # With the cut point at the lower right corner, tile 0 is the whole canvas.
    cut = image_size + (cut - image_size) * chosen
    rest = image_size - cut
    place = fn.stack(*(fn.permute_batch(places, indices=source) for source in sources))  # (4, 4)
    before = place[:, 0:2]  # (4, 2): the padding above and on the left
    after = image_size - before - place[:, 2:4]  # (4, 2): the padding below and on the right

    is_first = types.Constant(IS_FIRST, device="cpu")
    return Pieces(
        sources,
        starts=tile_starts(is_first, cut, rest, before, after),
        sizes=rest + is_first * (cut - rest),
        targets=cut - is_first * cut,
        count=1 + (TILES - 1) * chosen,
    )


def tile_starts(
    is_first: DataNode, cut: DataNode, rest: DataNode, before: DataNode, after: DataNode
) -> DataNode:
    """Returns the first row, or the first column, of each tile in its canvas. Arguments are int32 nodes.

    Args:
        is_first: 1 for the upper tiles (rows) or the left tiles (columns), else 0.
        cut, rest: heights of upper and lower tiles, or widths of left and right tiles.
        before, after: padding above and below the image, or on its left and right.
    """
    first_start = rest - dali_math.min(rest, after)
    second_start = dali_math.min(cut, before)
    return second_start + is_first * (first_start - second_start)


def _area(boxes_px: DataNode) -> DataNode:
    return (boxes_px[:, 2] - boxes_px[:, 0]) * (boxes_px[:, 3] - boxes_px[:, 1])
