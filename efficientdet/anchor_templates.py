"""The anchor shapes that `Anchors` repeats in grids. This module imports neither TensorFlow nor DALI."""

import functools
from typing import NamedTuple

import numpy as np

from common.anchors import Anchors


class Templates(NamedTuple):
    """The k anchors of the first cell of each level, T = L * k in total. All other cells repeat them.

    Attributes:
        sizes: float64 (T, 2), width and height of the anchor, normalised by the image.
        cells: int64 (T, 2), numbers of columns and rows of the anchor's level.
        first: int64 (T,), index in `Anchors.boxes` of the anchor in the first cell.
    """

    sizes: np.ndarray
    cells: np.ndarray
    first: np.ndarray


@functools.lru_cache(maxsize=16)
def templates(anchors: Anchors) -> Templates:
    """Returns the templates of `anchors`."""
    k = anchors.anchors_per_location
    cells = np.array(anchors.feature_sizes, np.int64)  # (L, 2): rows, columns
    starts = np.concatenate([[0], np.cumsum(cells.prod(axis=1) * k)[:-1]])
    first = (starts[:, None] + np.arange(k)).ravel()
    prior = anchors.boxes_normalized[first].astype(np.float64)
    return Templates(prior[:, 2:] - prior[:, :2], np.repeat(cells[:, ::-1], k, axis=0), first)
