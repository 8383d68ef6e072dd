"""The anchor shapes that all cells of a level share."""

import functools
from typing import NamedTuple

import numpy as np

from common.anchors import Anchors


class Templates(NamedTuple):
    """The anchor shapes of all levels. Each of the L levels has k shapes, so there are T = L * k shapes.

    Attributes:
        sizes: float64 (T, 2), width and height of each shape, normalised by the image.
        cells: int64 (T, 2), for each shape the number of columns and the number of rows of its level.
        first: int64 (T,), for each shape the index of its first anchor in `Anchors.boxes`.
    """

    sizes: np.ndarray
    cells: np.ndarray
    first: np.ndarray


@functools.lru_cache(maxsize=16)
def templates(anchors: Anchors) -> Templates:
    k = anchors.anchors_per_location
    cells = np.array(anchors.feature_sizes, np.int64)  # (L, 2): rows, columns
    starts = np.concatenate([[0], np.cumsum(cells.prod(axis=1) * k)[:-1]])
    first = (starts[:, None] + np.arange(k)).ravel()
    prior = anchors.boxes_normalized[first].astype(np.float64)
    return Templates(prior[:, 2:] - prior[:, :2], np.repeat(cells[:, ::-1], k, axis=0), first)
