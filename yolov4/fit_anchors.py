r"""Anchors for your own data: the sizes that fit its boxes best, by k-means on their shapes.

    python yolov4/fit_anchors.py --model_name=yolov4 --image_size=608 \
        --annotations=coco/annotations/instances_train2017.json

Prints how well the model's own anchors fit and how well new ones do, and the --hparams that takes them. The
distance is 1 - IoU of shapes on one centre, as in YOLOv2 (arXiv 1612.08242 section 2) and in Darknet's
calc_anchors (AlexeyAB/darknet src/detector.c). Anchors are in pixels of the network input, so they belong to
one --image_size, and to stretched or to letterboxed images.
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from absl import flags

from common import errors, hparams
from common import flags as shared_flags
from common.annotations import Annotations, load_coco
from common.letterbox import fit
from yolov4.config import MODEL_NAMES, get_config

MAX_BOXES = 50_000  # more are sampled: they would move the anchors by less than a pixel
STARTS = 10  # k-means ends in the nearest optimum, so the best of several
MAX_ROUNDS = 200


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string("annotations", None, "COCO json of the training images.", flag_values=fv)
    flags.DEFINE_string("model_name", "yolov4", f"One of {', '.join(MODEL_NAMES)}.", flag_values=fv)
    flags.DEFINE_string("image_size", None, "N or HxW in pixels. Default: the model's.", flag_values=fv)
    flags.DEFINE_bool("letterbox", False, "Images will be letterboxed, not stretched.", flag_values=fv)
    flags.DEFINE_integer("seed", 0, "Of the starting points.", lower_bound=0, flag_values=fv)


def suggest(
    *,
    annotations: str | None = None,
    model_name: str = "yolov4",
    image_size: str | None = None,
    letterbox: bool = False,
    seed: int = 0,
) -> str:
    """Fits, reports and returns `anchors=...`; see the flags of the same names."""
    if not annotations:
        raise errors.UserError("--annotations is missing: name the COCO json of the training images")
    config = get_config(model_name)
    if image_size:
        config = hparams.replace(config, {"image_size": hparams.parse_image_size(image_size)})
    sizes = box_sizes(load_coco(annotations, None), config.image_size, letterbox)
    count = config.num_anchors
    if len(np.unique(sizes, axis=0)) < count:
        raise errors.UserError(
            f"{annotations} has boxes of fewer than {count} sizes: too few for {count} anchors"
        )
    own = np.array(config.anchor_sizes)
    fitted = np.maximum(np.rint(fit_anchors(sizes, count, seed)), 1).astype(int)
    height, width = config.image_size
    print(
        f"{len(sizes)} boxes at {height}x{width}: the anchors of {model_name} fit with a mean IoU of "
        f"{mean_fit(sizes, own):.3f}, these with {mean_fit(sizes, fitted):.3f}"
    )
    if unused := sorted(set(range(count)) - {i for mask in config.masks for i in mask}):
        best = shape_iou(sizes, fitted).argmax(1)
        lost = np.isin(best, unused).mean()
        print(
            f"{100 * lost:.0f} % of the boxes fit an anchor best that no head of {model_name} has: "
            "iou_thresh=0.213 trains them by the others"
        )
    text = "anchors=" + ",".join(str(side) for side in fitted.ravel())
    print(f"--hparams={text}")
    return text


def box_sizes(annotations: Annotations, image_size: tuple[int, int], keep_aspect: bool) -> np.ndarray:
    """Widths and heights of all boxes to train on, float64 (N, 2), in pixels of the network input."""
    targets = annotations.target_boxes
    shown = np.full((annotations.num_images, 2), image_size, float)  # height, width of each image there
    if keep_aspect:
        sides = annotations.image_sizes.tolist()
        shown = np.array([fit(height, width, image_size) for height, width in sides], float)
    per_box = np.repeat(shown, np.diff(targets.row_splits), axis=0)
    return (targets.boxes[:, 2:] - targets.boxes[:, :2]) * per_box[:, ::-1]


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


def main() -> None:
    suggest(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
