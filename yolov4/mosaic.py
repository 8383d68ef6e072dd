"""Mosaic: one training image of four, each at its own scale, in DALI.

AlexeyAB/darknet src/data.c, load_data_detection and blend_truth_mosaic; YOLOv4, arXiv 2004.10934, figure 3.

A random cut point divides the image into four tiles. Each shows a part of another canvas, a finished training
image of the batch, at that canvas' own scale:

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

    tile   shows of its canvas   height x width         moved inwards by
    0      the lower right       cut_y, cut_x           bottom_shift, right_shift
    1      the lower left        cut_y, W - cut_x       bottom_shift, left_shift
    2      the upper right       H - cut_y, cut_x       top_shift, right_shift
    3      the upper left        H - cut_y, W - cut_x   top_shift, left_shift

    right_shift  = min(W - cut_x, padding on the right)    left_shift = min(cut_x, padding on the left)
    bottom_shift = min(H - cut_y, padding at the bottom)   top_shift  = min(cut_y, padding at the top)

So padding shows only where an image is smaller than its tile.

Boxes move with their tile and are clipped to it. Darknet clips them to the whole image only, unless
mosaic_bound=1, and so leaves boxes on a neighbour's pixels. It reads four new images for each mosaic, moves
half of them towards the cut point before it crops them, and a batch of it is all mosaics or none; here the
four are of one batch, so that nothing is decoded or cropped for a mosaic, and each image is one or not by its
own chance.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from yolov4.crops import round_half_up

MIN_OFFSET = 0.2  # of either side: the cut point keeps this far from the border (src/data.c: min_offset)
TILES = 4

# Whether a tile is the upper, and whether it is the left one.
IS_FIRST = np.array([[1, 1], [1, 0], [0, 1], [0, 0]], np.int32)


class Objects(NamedTuple):
    """The objects of one canvas, or image."""

    boxes_px: DataNode  # float32 (N, 4), ltrb
    labels: DataNode  # int32 (N,)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Rectangles of canvases and where they go. int32 nodes on the CPU, in pixels.

    Of the R that are described the first `count` are there.
    """

    sources: list[DataNode]  # R times (): which canvas of the batch
    starts: DataNode  # (R, 2): top, left in the canvas
    sizes: DataNode  # (R, 2): height, width; above 0 where the piece is there
    targets: DataNode  # (R, 2): top, left in the image
    count: DataNode | int  # ()


def random_cut(image_size: DataNode) -> DataNode:
    """int32 (2,): (cut_y, cut_x) in whole pixels."""
    share = fn.random.uniform(range=(MIN_OFFSET, 1.0 - MIN_OFFSET), shape=[2])
    return round_half_up(share * image_size)


def tiles(
    sources: list[DataNode], places: DataNode, cut: DataNode, image_size: DataNode, chosen: DataNode
) -> Pieces:
    """The four pieces of a mosaic; the whole canvas of the first source where `chosen` is 0.

    Args:
        sources: four int32 (), which canvases of the batch.
        places: int32 (4,), where the image lies in each canvas: top, left, height, width in pixels. What is
            around it is padding.
        cut: int32 (2,), from `random_cut`.
        image_size: int32 (2,), of the canvases.
        chosen: int32 (), 1 or 0.
    """
    # With the cut point at the lower right corner tile 0 is the whole canvas, and the others are not there.
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
    """Where each tile starts in its canvas. All are int32 nodes that broadcast; rows and columns are alike.

    Args:
        is_first: 1 for the upper, or left, tiles.
        cut, rest: the length of these, and of the others.
        before, after: the padding above, or on the left, and at the other end.
    """
    first_start = rest - dali_math.min(rest, after)
    second_start = dali_math.min(cut, before)
    return second_start + is_first * (first_start - second_start)
