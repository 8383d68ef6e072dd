"""Anchor shapes that fit the boxes of a data set, by k-means, and when new anchors are worth having.

The distance is 1 - IoU of shapes on one centre, as in YOLOv2 (arXiv 1612.08242 section 2) and in Darknet's
calc_anchors (AlexeyAB/darknet src/detector.c).
"""

import dataclasses

import numpy as np

MAX_BOXES = 50_000  # more are sampled: they would move the anchors by less than a pixel
STARTS = 10  # k-means ends in the nearest optimum, so the best of several
MAX_ROUNDS = 200

REACHED_IOU = 0.5  # a box is reached where some anchor fits it better than this
MARGIN = 0.02  # of the mean IoU or of the share of boxes reached: less is not worth other anchors
MIN_ERRORS = 2.0  # and the gain must be this many standard errors
MAX_FALL = 0.01  # of the other of the two numbers: one box in a hundred decides nothing
MIN_BOXES = 20  # of fewer even the standard error is not known


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well anchors fit boxes.

    Attributes:
        mean_iou: mean over the boxes of the IoU with their best anchor.
        reached: share of the boxes whose best IoU is above REACHED_IOU.
        boxes: how many boxes that were.
    """

    mean_iou: float
    reached: float
    boxes: int

    @classmethod
    def of(cls, best_iou: np.ndarray) -> "Fit":
        """Of the IoU (N,) of every box with its best anchor."""
        if not len(best_iou):
            return cls(0.0, 0.0, 0)
        return cls(float(best_iou.mean()), float((best_iou > REACHED_IOU).mean()), len(best_iou))

    @property
    def merit(self) -> float:
        """What a search maximises."""
        return self.mean_iou + self.reached

    def words(self) -> str:
        """`mean best IoU 0.561, 65.3 % of the boxes reached at 0.5`"""
        return f"mean best IoU {self.mean_iou:.3f}, {100 * self.reached:.1f} % of the boxes reached at 0.5"


def beats(new_iou: np.ndarray, own_iou: np.ndarray, *, by_reach: bool) -> bool:
    """Whether new anchors fit the same boxes really better than the own ones; best IoU (N,) of each box.

    The gain is at least MARGIN and MIN_ERRORS standard errors. What gains is the share of boxes reached
    (`by_reach`: a box that no anchor reaches has but one anchor to train it), or the mean IoU (every box has
    its best anchor anyway, and less to correct the better that fits). The other of the two must not fall by
    more than MAX_FALL.
    """
    if len(own_iou) < MIN_BOXES:
        return False
    iou = np.subtract(new_iou, own_iou, dtype=np.float64)
    reach = np.subtract(new_iou > REACHED_IOU, own_iou > REACHED_IOU, dtype=np.float64)
    gaining, other = (reach, iou) if by_reach else (iou, reach)
    error = float(gaining.std(ddof=1)) / len(gaining) ** 0.5
    return float(gaining.mean()) >= max(MARGIN, MIN_ERRORS * error) and float(other.mean()) >= -MAX_FALL


def split(box_image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """bool (N,): the half of the boxes that anchors are fitted to; they are judged by the other half.

    Boxes of one image, which resemble each other, stay together, unless there is only one image.
    """
    different, image = np.unique(box_image, return_inverse=True)
    groups = image if len(different) > 1 else np.arange(len(box_image))
    count = int(groups.max()) + 1 if len(groups) else 0
    chosen = np.zeros(count, bool)
    chosen[random.permutation(count)[: count // 2]] = True
    return chosen[groups]


def fit_anchors(sizes: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """`count` anchors for boxes of these sizes, by k-means with the distance 1 - IoU.

    Args:
        sizes: (N, 2), widths and heights, at least `count` different ones.
        count: of anchors.
        seed: of the sample of boxes and of the starting points.

    Returns:
        float64 (count, 2), widths and heights, the smallest area first.
    """
    random = np.random.default_rng(seed)
    if len(sizes) > MAX_BOXES:
        sizes = random.choice(sizes, MAX_BOXES, replace=False)
    different = np.unique(sizes, axis=0)
    candidates = [_k_means(sizes, random.choice(different, count, replace=False)) for _ in range(STARTS)]
    best = max(candidates, key=lambda anchors: mean_fit(sizes, anchors))
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
    """IoU of every size (N, 2) with every anchor (A, 2) on one centre, (N, A)."""
    common = np.minimum(sizes[:, None], anchors[None]).prod(2)
    return common / (sizes.prod(1)[:, None] + anchors.prod(1)[None] - common)


def mean_fit(sizes: np.ndarray, anchors: np.ndarray) -> float:
    """Mean over the boxes of the IoU with their best anchor."""
    return float(shape_iou(sizes, anchors).max(1).mean())
