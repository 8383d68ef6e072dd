r"""Fits anchors to the boxes of your own data, by k-means on their shapes.

    python yolov4/fit_anchors.py --model_name=yolov4 --image_size=608 \
        --annotations=coco/annotations/instances_train2017.json

The command prints how well the model's own anchors fit. It also fits new anchors to half of the images. If
these fit the other half better, it prints --hparams with new anchors. The new anchors are only for training
with the same --image_size and --letterbox.
"""

import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
from absl import flags

from common import args as shared_flags
from common import errors, hparams
from common.data.annotations import Annotations
from common.data.coco import load_coco
from common.data.open import log_issues
from common.letterbox import fit
from yolov4 import anchor_fit
from yolov4.anchor_fit import Fit, fit_anchors, shape_iou
from yolov4.config import MODEL_NAMES, YOLOv4Config, get_config


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string("annotations", None, "COCO json of the training images.", flag_values=fv)
    flags.DEFINE_string("model_name", "yolov4", f"Model: one of {', '.join(MODEL_NAMES)}.", flag_values=fv)
    flags.DEFINE_string("image_size", None, "Network input, N or HxW. Default: the model's.", flag_values=fv)
    flags.DEFINE_bool("letterbox", False, "Images will be letterboxed, not stretched.", flag_values=fv)
    flags.DEFINE_integer("seed", 0, "Seed of the starting points; default 0.", lower_bound=0, flag_values=fv)


def suggest(
    *,
    annotations: str | None = None,
    model_name: str = "yolov4",
    image_size: str | None = None,
    letterbox: bool = False,
    seed: int = 0,
) -> str:
    """Prints how well anchors fit. Returns "anchors=..." for --hparams; "" if new anchors are no better."""
    if not annotations:
        raise errors.UserError("--annotations is missing: give the COCO json of the training images")
    config = get_config(model_name)
    if image_size:
        config = hparams.replace(config, {"image_size": hparams.parse_image_size(image_size)})
    config = hparams.replace(config, {"letterbox": letterbox})
    truth = load_coco(annotations)
    log_issues(annotations, truth.issues)
    sizes, count = box_sizes(truth, config.image_size, letterbox), config.num_anchors
    if len(np.unique(sizes, axis=0)) < count:
        raise errors.UserError(
            f"{annotations}: the boxes have fewer than {count} different sizes, so {count} anchors cannot be "
            "fitted: give a file with more boxes"
        )
    height, width = config.image_size
    print(f"{len(sizes)} boxes at {height}x{width}")

    image = np.repeat(np.arange(truth.num_images), np.diff(truth.target_boxes.row_splits))
    is_fitted = anchor_fit.split(image, np.random.default_rng(seed))
    half = config
    if len(np.unique(sizes[is_fitted], axis=0)) >= count:
        half = with_fitted_anchors(sizes[is_fitted], config, seed)
    own_iou, new_iou = (trained_iou(sizes[~is_fitted], anchors) for anchors in (config, half))
    print(f"one half of the images with the anchors of {model_name}: {Fit.of(own_iou)}")
    print(f"the same half with new anchors, fitted to the other half: {Fit.of(new_iou)}")
    if not anchor_fit.beats(new_iou, own_iou):
        print(f"the anchors of {model_name} fit: new anchors are not clearly better")
        return ""
    fitted = with_fitted_anchors(sizes, config, seed)
    if headless := sorted(set(range(count)) - _with_head(config)):
        print(
            f"no head of {model_name} uses anchor {', '.join(map(str, headless))}, so its size is 1x1: boxes "
            "that fit 1x1 best are assigned to no anchor (with iou_thresh=0.213, they can get another anchor)"
        )
    text = "anchors=" + ",".join(f"{side:g}" for side in fitted.anchors)
    print(f"--hparams={text}")
    return text


def with_fitted_anchors(sizes: np.ndarray, config: YOLOv4Config, seed: int) -> YOLOv4Config:
    """Returns the config with anchors that are fitted to boxes.

    The anchors are in whole pixels, the smallest first. Anchors that no head uses get the size 1x1.

    Args:
        sizes: (N, 2), width and height of each box in pixels of the network input.
    """
    with_head = sorted(_with_head(config))
    anchors = np.ones((config.num_anchors, 2))
    anchors[with_head] = np.maximum(np.rint(fit_anchors(sizes, len(with_head), seed)), 1)
    return hparams.replace(config, {"anchors": tuple(anchors.ravel().tolist())})


def trained_iou(sizes: np.ndarray, config: YOLOv4Config) -> np.ndarray:
    """Returns the IoU (N,) of boxes of sizes (N, 2) with their best anchor that a head uses.

    Boxes that training assigns to no anchor get 0.
    """
    fit_of = shape_iou(sizes, np.array(config.anchor_sizes))
    with_head = sorted(_with_head(config))
    trains = np.isin(fit_of.argmax(1), with_head) | (fit_of[:, with_head].max(1) > config.iou_thresh)
    return np.where(trains, fit_of[:, with_head].max(1), 0.0)


def _with_head(config: YOLOv4Config) -> set[int]:
    return {anchor for mask in config.masks for anchor in mask}


def box_sizes(annotations: Annotations, image_size: tuple[int, int], keep_aspect: bool) -> np.ndarray:
    """Returns widths and heights of all boxes, float64 (N, 2), in pixels of the network input."""
    targets = annotations.target_boxes
    inner = np.full((annotations.num_images, 2), image_size, float)  # (height, width) of images in the input
    if keep_aspect:
        height, width = annotations.image_sizes.astype(np.int64).T
        inner = np.stack(fit(height, width, image_size, np.minimum, np.maximum), axis=1)
    per_box = np.repeat(inner, np.diff(targets.row_splits), axis=0)
    return (targets.boxes[:, 2:] - targets.boxes[:, :2]) * per_box[:, ::-1]


def main() -> None:
    suggest(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
