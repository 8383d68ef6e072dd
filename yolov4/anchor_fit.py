"""Fits anchor shapes to the boxes of a data set by k-means (YOLOv2, arXiv 1612.08242 section 2)."""

import dataclasses

import numpy as np

MAX_BOXES = 50_000  # with more boxes, a sample of this size is used
STARTS = 10  # the best of several runs is used
MAX_ROUNDS = 200

REACHED_IOU = 0.5  # an anchor reaches a box if their IoU is above this
MARGIN = 0.02  # least gain of the mean IoU for which new anchors are worth using
MIN_ERRORS = 2.0  # the gain must also be at least this many standard errors
MAX_FALL = 0.01  # largest accepted fall of the share of boxes with an IoU above REACHED_IOU
MIN_BOXES = 20  # with fewer boxes, no anchors are suggested


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well anchors fit boxes.

    Attributes:
        mean_iou: mean over the boxes of the IoU with their best anchor.
        reached: share of the boxes whose best IoU is above REACHED_IOU.
    """

    mean_iou: float
    reached: float
    boxes: int

    @classmethod
    def of(cls, best_iou: np.ndarray) -> "Fit":
        """Computes the fit from the IoU (N,) of every box with its best anchor."""
        if not len(best_iou):
            return cls(0.0, 0.0, 0)
        return cls(float(best_iou.mean()), float((best_iou > REACHED_IOU).mean()), len(best_iou))

    def __str__(self) -> str:
        return f"mean best IoU {self.mean_iou:.3f}, {100 * self.reached:.1f} % of the boxes reached at 0.5"


def beats(new_iou: np.ndarray, old_iou: np.ndarray) -> bool:
    """Returns whether new anchors fit the same boxes clearly better than old anchors.

    The mean IoU must rise by at least MARGIN, and by at least MIN_ERRORS standard errors. The share of boxes
    with an IoU above REACHED_IOU must not fall by more than MAX_FALL.

    Args:
        new_iou, old_iou: float (N,), the IoU of each box with its best anchor.
    """
    if len(old_iou) < MIN_BOXES:
        return False
    gain = np.subtract(new_iou, old_iou, dtype=np.float64)
    error = float(gain.std(ddof=1)) / len(gain) ** 0.5
    fall = (old_iou > REACHED_IOU).mean() - (new_iou > REACHED_IOU).mean()
    return bool(gain.mean() >= max(MARGIN, MIN_ERRORS * error) and fall <= MAX_FALL)


def split(box_image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Splits N boxes into two halves, to fit anchors to one half and to evaluate them on the other.

    Returns bool (N,), True for the boxes to fit. If there are several images, all boxes of an image are in
    the same half.
    """
    different, image = np.unique(box_image, return_inverse=True)
    groups = image if len(different) > 1 else np.arange(len(box_image))
    count = int(groups.max(initial=-1)) + 1
    chosen = np.zeros(count, bool)
    chosen[random.permutation(count)[: count // 2]] = True
    return chosen[groups]


def fit_anchors(sizes: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Fits anchors to boxes by k-means with the distance 1 - IoU.

    Args:
        sizes: (N, 2), width and height of each box. At least `count` sizes must be different.

    Returns:
        float64 (count, 2), widths and heights, the smallest area first.
    """
    random = np.random.default_rng(seed)
    if len(sizes) > MAX_BOXES:
        sizes = random.choice(sizes, MAX_BOXES, replace=False)
    different = np.unique(sizes, axis=0)
    candidates = [_k_means(sizes, random.choice(different, count, replace=False)) for _ in range(STARTS)]
    best = max(candidates, key=lambda anchors: shape_iou(sizes, anchors).max(1).mean())
    return best[best.prod(1).argsort(kind="stable")]


def _k_means(sizes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    nearest = None
    for _ in range(MAX_ROUNDS):
        previous, nearest = nearest, shape_iou(sizes, anchors).argmax(1)
        if previous is not None and (nearest == previous).all():
            break
        groups = [sizes[nearest == i] for i in range(len(anchors))]
        anchors = np.array([g.mean(0) if len(g) else a for g, a in zip(groups, anchors, strict=True)])
    return anchors


def shape_iou(sizes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Returns the IoU (N, A) of boxes of sizes (N, 2) with anchors (A, 2) that have the same centre."""
    common = np.minimum(sizes[:, None], anchors[None]).prod(2)
    return common / (sizes.prod(1)[:, None] + anchors.prod(1)[None] - common)
