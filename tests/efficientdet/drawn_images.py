"""Pictures with one red rectangle."""

import numpy as np

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from tests.common.drawn_sets import GREY

SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), (192, 256), (50, 700)]
RED = (230, 20, 30)


def find_rectangle(normalized: np.ndarray) -> np.ndarray | None:
    """Returns the box (ltrb) around the red pixels, or None if there are fewer than 12 red pixels."""
    colors = np.array([RED, GREY, IMAGENET_MEAN])
    pixels = normalized * IMAGENET_STD + IMAGENET_MEAN
    nearest = np.abs(pixels[:, :, np.newaxis] - colors).sum(-1).argmin(-1)
    ys, xs = np.nonzero(nearest == 0)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) if len(ys) >= 12 else None
