"""The YOLOv4 family as a table, and every hyper-parameter with its source.

Structure and recipe: YOLOv4 (arXiv 2004.10934) and AlexeyAB/darknet cfg/yolov4.cfg, cfg/yolov4-tiny.cfg.
Any field can be changed from the command line: --hparams=jitter=0.2,nms_method=diou
"""

import dataclasses
import math
from typing import Literal

from common import hparams
from common.errors import unknown
from common.hparams import AtLeastOne, Count, CountOrZero, NotNegative, Positive, Share, ShareBelowOne

MAX_MULTI_SCALE = 4.0  # sixteen times the pixels: more is a typing error
STRIDE = 32  # of the coarsest head: both sides of the network input are multiples of it
# Around the image: src/image.c, letterbox_image fills 0.5. (Darknet's training loader fills a jittered crop
# with the image's mean: src/image_opencv.cpp, image_data_augmentation. Ours looks like its evaluation.)
FILL = 127


@dataclasses.dataclass(frozen=True)
class YOLOv4Config:
    """One model of the family together with its training recipe. Sizes are (height, width) in pixels."""

    # --- the network ---
    model_name: str
    image_size: tuple[int, int]
    # csp_darknet53: with SPP and PANet, three heads; csp_darknet_tiny: two heads; csp_darknet_nano: three
    backbone: Literal["csp_darknet53", "csp_darknet_tiny", "csp_darknet_nano"]
    width: Positive = 1.0  # factor on the number of channels
    bn_momentum: ShareBelowOne = 0.99  # src/batchnorm_layer.c, forward_batchnorm_layer_gpu
    objectness_bias: float = 0.0  # initial bias of the objectness logits; Darknet's biases all start at 0

    # --- heads: one row of masks and one scale_xy for each, finest stride first ---
    anchors: tuple[float, ...] = ()  # width, height, width, height, ... in pixels of the network input
    masks: tuple[tuple[int, ...], ...] = ()  # which anchors each head predicts
    scale_xy: tuple[float, ...] = ()  # a predicted centre reaches (scale_xy - 1) / 2 cells outside its cell
    iou_thresh: Share = 1.0  # shape IoU above which other anchors train a box as well; 1: only the best one
    neighbour_cells: bool = False  # a box trains the nearest column's and the nearest row's cell, too
    ignore_thresh: Share = 0.7  # IoU with any box above which a free prediction is not called background

    # --- what the loader does to a training image ---
    antialias: bool = True  # where an image shrinks, in training and test; Darknet's resizing does not
    letterbox: bool = False  # keep the aspect ratio and pad; False: stretch, as Darknet's letter_box=0
    jitter: NotNegative = 0.3  # each edge of the crop moves in or out by up to this share of the image
    flip_prob: Share = 0.5
    hue: NotNegative = 36.0  # degrees, drawn from -x .. x; Darknet's 0.1 of the circle
    saturation: AtLeastOne = 1.5  # factor drawn from 1 .. x, or one over it, each half of the time
    exposure: AtLeastOne = 1.5  # of the brightness, likewise
    rotation: NotNegative = 0.0  # degrees, drawn from -x .. x, about the centre of the crop
    # RandAugment (arXiv 1909.13719) or TrivialAugment (arXiv 2103.10158), without what moves pixels
    auto_augment: Literal["none", "rand", "trivial"] = "none"
    rand_augment_ops: Count = 2  # operations of each image; as the paper's ResNet-50 (section 4.3)
    rand_augment_magnitude: CountOrZero = 9  # their strength, 0 to 30; likewise
    cutout_prob: Share = 0.0  # of one filled square (arXiv 1708.04552)
    mosaic_prob: Share = 0.5  # src/data.c, load_data_detection: every second batch; here every second image
    # batch: tiles are other images of the batch; fresh: three more images are read for each sample
    mosaic_tiles: Literal["batch", "fresh"] = "batch"
    close_mosaic: CountOrZero = 0  # the last epochs without mosaic, MixUp and CutMix
    mixup_prob: Share = 0.0
    cutmix_prob: Share = 0.0
    multi_scale: AtLeastOne = 1.0  # each batch has a size from image_size / x to image_size * x
    min_box_size: NotNegative = 1.0  # pixels of the network input; smaller boxes are dropped and counted
    max_instances: Count = 200  # boxes kept per image, the largest first (src/parser.c, parse_yolo: max)

    # --- loss ---
    iou_normalizer: NotNegative = 0.07
    obj_normalizer: NotNegative = 1.0
    # Objectness target of what a box trains: 1 - objectness_iou * (1 - IoU). 0: as in Darknet; 1: as in
    # ultralytics/yolov5 utils/loss.py
    objectness_iou: Share = 0.0
    cls_normalizer: NotNegative = 1.0
    box_gradient: Literal["exact", "darknet"] = "darknet"  # gradient of the box loss (losses.py)
    size_weighting: bool = False  # the box loss of each box times 2 - its share of the image (losses.py)
    max_delta: NotNegative = 0.0  # largest gradient of the box loss by a raw output; 0: no limit
    label_smoothing: Share = 0.0
    weight_decay: NotNegative = 5e-4  # times half the sum of squares of the kernels

    # --- optimisation ---
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: ShareBelowOne = 0.949  # adam: beta_1
    learning_rate: NotNegative = 0.0013  # per reference_batch images, scaled linearly
    reference_batch: Count = 64
    lr_schedule: Literal["steps", "cosine"] = "steps"
    lr_steps: tuple[float, ...] = (0.8, 0.9)  # shares of the run after which the rate falls
    lr_step_factor: NotNegative = 0.1
    burn_in_steps: CountOrZero = 1000  # updates; no longer than a tenth of the run
    burn_in_power: NotNegative = 4.0
    epochs: Count = 271  # 500,500 batches of 64 images of the 118,287 of COCO train2017
    clip_norm: NotNegative = 0.0  # global norm; 0: off
    ema_decay: ShareBelowOne = 0.0  # 0: off

    # --- detections ---
    nms_method: Literal["greedy", "diou"] = "greedy"
    nms_iou: Share = 0.6
    diou_beta: Positive = 0.6  # src/parser.c, parse_yolo: beta_nms
    score_threshold: Share = 0.001
    nms_candidates: Count = 1000
    max_detections: Count = 100

    def __post_init__(self) -> None:
        hparams.check(self)
        whole_cells = all(side % STRIDE == 0 for side in self.image_size)
        heads = len(HEAD_STRIDES[self.backbone])
        lengths = {len(mask) for mask in self.masks}
        named = [anchor for mask in self.masks for anchor in mask]
        shares = [0.0, *self.lr_steps, 1.0]
        rules = {
            f"image_size with sides that are multiples of {STRIDE}": whole_cells,
            f"masks and scale_xy for the {heads} heads of backbone": (
                len(self.masks) == len(self.scale_xy) == heads
            ),
            "masks of one length": len(lengths) == 1,
            "anchors as pairs of numbers": self.anchors and len(self.anchors) % 2 == 0,
            "anchors above 0": min(self.anchors, default=0) > 0,
            "masks that name some of anchors": all(0 <= anchor < self.num_anchors for anchor in named),
            "scale_xy of at least 1, and of 2 with neighbour_cells": (
                min(self.scale_xy, default=0) >= 1 + self.neighbour_cells
            ),
            f"multi_scale of at most {MAX_MULTI_SCALE}": self.multi_scale <= MAX_MULTI_SCALE,
            "lr_steps above 0 and up to 1 in order": shares == sorted(shares) and 0.0 not in self.lr_steps,
            "rand_augment_magnitude of at most 30": self.rand_augment_magnitude <= 30,
            "rotation of 0 where mosaic_tiles is fresh": not self.rotation or self.mosaic_tiles == "batch",
            "jitter below 0.5 or nothing may be left of the image": self.jitter < 0.5,
        }
        hparams.require(self, rules)

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels of the network input per cell of each head."""
        return HEAD_STRIDES[self.backbone]

    @property
    def num_anchors(self) -> int:
        return len(self.anchors) // 2

    @property
    def anchor_sizes(self) -> tuple[tuple[float, float], ...]:
        """(width, height) of every anchor in pixels of the network input."""
        return tuple(zip(self.anchors[0::2], self.anchors[1::2], strict=True))

    @property
    def anchors_per_location(self) -> int:
        return len(self.masks[0])

    @property
    def size_range(self) -> tuple[int, int]:
        """Smallest and largest shorter side of a training batch, in units of STRIDE."""
        side = min(self.image_size) / STRIDE
        return max(math.floor(side / self.multi_scale + 0.5), 1), math.floor(side * self.multi_scale + 0.5)

    def bucket(self, units: int) -> tuple[int, int]:
        """The training size whose shorter side is `units` times STRIDE; the other one is rounded to it."""
        shorter = min(self.image_size)
        height, width = (STRIDE * math.floor(units * side / shorter + 0.5) for side in self.image_size)
        return height, width


HEAD_STRIDES = {
    "csp_darknet53": (8, 16, 32),
    "csp_darknet_tiny": (16, 32),
    "csp_darknet_nano": (8, 16, 32),
}

_FIELDS = [field.name for field in dataclasses.fields(YOLOv4Config)]
# What the loader does to a training image: the fields of that section.
LOADER_FIELDS = _FIELDS[_FIELDS.index("antialias") : _FIELDS.index("iou_normalizer")]

# What may change after training: eval.py and infer.py take these, and a resumed run may have others.
DETECTION_FIELDS = tuple(_FIELDS[_FIELDS.index("nms_method") :])


# cfg/yolov4-tiny.cfg. Its masks name anchor 3 twice and anchor 0 never: a box that fits anchor 3 best trains
# both heads, one that fits anchor 0 best trains none.
_TINY = {
    "backbone": "csp_darknet_tiny",
    "anchors": (10, 14, 23, 27, 37, 58, 81, 82, 135, 169, 344, 319),
    "masks": ((1, 2, 3), (3, 4, 5)),
    "scale_xy": (1.05, 1.05),
    "mosaic_prob": 0.0,
    "momentum": 0.9,
    "learning_rate": 0.00261,
    "epochs": 1082,  # 2,000,200 batches of 64
}

_YOLOV4 = {
    "backbone": "csp_darknet53",
    "anchors": (12, 16, 19, 36, 40, 28, 36, 75, 76, 55, 72, 146, 142, 110, 192, 243, 459, 401),
    "masks": ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    "scale_xy": (1.2, 1.1, 1.05),
    "iou_thresh": 0.213,
    "max_delta": 5.0,
    "multi_scale": 1.4,  # random=1: src/detector.c, train_detector
}
# Not published: a network like tiny's with half the channels, at a size that a laptop trains in minutes, and
# anchors to match. A short run from scratch learns faster with Adam; and after a few hundred steps a momentum
# of 0.99 would still hold much of the initial variance of 1. Boxes and classes weigh more than objectness, or
# they would learn late beside thousands of predictions (docs/yolov4.md).
_NANO = _TINY | {
    "backbone": "csp_darknet_nano",
    "width": 0.5,
    "bn_momentum": 0.9,
    "objectness_bias": -4.0,
    "anchors": (9, 9, 14, 14, 21, 21, 31, 31, 46, 46, 68, 68, 100, 100, 150, 150, 220, 220),
    "masks": ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    "scale_xy": (2.0, 2.0, 2.0),
    "iou_thresh": 0.213,
    "jitter": 0.2,
    "mosaic_prob": 0.5,
    "close_mosaic": 5,
    "max_instances": 100,
    "box_gradient": "exact",
    "size_weighting": True,
    "neighbour_cells": True,
    "iou_normalizer": 10.0,
    "cls_normalizer": 8.0,
    "objectness_iou": 1.0,
    "optimizer": "adam",
    "learning_rate": 0.032,
    "lr_schedule": "cosine",
    "burn_in_steps": 100,
    "burn_in_power": 1.0,
    "clip_norm": 10.0,
    "ema_decay": 0.99,
    "epochs": 30,
}
_TABLE: dict[str, tuple[int, dict]] = {  # model: image side, and what differs from the defaults
    "yolov4": (608, _YOLOV4),
    "yolov4-tiny": (416, _TINY),
    "yolov4-nano": (256, _NANO),
}

MODEL_NAMES = tuple(_TABLE)

# --augmentation_preset: what replaces fields of a model's row. Ours, from no paper; docs/training.md has
# their cost and their effect on a small data set.
_NONE = {
    "saturation": 1.0,
    "exposure": 1.0,
    "multi_scale": 1.0,
    **dict.fromkeys(("jitter", "flip_prob", "hue", "mosaic_prob", "mixup_prob", "cutmix_prob"), 0.0),
}
PRESETS: dict[str, dict] = {
    "none": _NONE,
    "light": _NONE | {"jitter": 0.1, "flip_prob": 0.5, "hue": 10.0, "saturation": 1.2, "exposure": 1.2},
    "default": {},
    "strong": {"auto_augment": "rand", "cutout_prob": 0.5, "mixup_prob": 0.1},
}


def get_config(model_name: str) -> YOLOv4Config:
    """The published configuration of `model_name`; UserError with the nearest name for an unknown one."""
    if model_name not in _TABLE:
        raise unknown("model", model_name, MODEL_NAMES)
    side, other = _TABLE[model_name]
    return YOLOv4Config(model_name=model_name, image_size=(side, side), **other)
