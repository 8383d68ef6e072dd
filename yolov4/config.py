"""The table of YOLOv4 models, and every hyper-parameter with its source.

Sources: YOLOv4 (arXiv 2004.10934) and AlexeyAB/darknet cfg/yolov4.cfg, cfg/yolov4-tiny.cfg.
To change fields from the command line: --hparams=jitter=0.2,nms_method=diou
"""

import dataclasses
import math
from typing import Literal

from common import hparams
from common.errors import unknown
from common.hparams import (
    AtLeastOne,
    Count,
    CountOrZero,
    Detection,
    Loader,
    NotNegative,
    Positive,
    Share,
    ShareBelowOne,
)

MAX_MULTI_SCALE = 4.0  # a larger multi_scale must be a typing error
STRIDE = 32  # both sides of the network input are multiples of the coarsest head's stride
FILL = 127  # grey level of the padding, as in Darknet's evaluation (src/image.c, letterbox_image)


@dataclasses.dataclass(frozen=True)
class YOLOv4Config:
    """The configuration of one model: its structure and recipe. Sizes are (height, width) in pixels.

    Types such as `Share` limit values. `Loader[...]` marks what changes training images, `Detection[...]`
    what changes only how outputs become detections (common/hparams.py).
    """

    # --- the network ---
    model_name: str
    image_size: tuple[int, int]
    # csp_darknet53: SPP, PANet and three heads; csp_darknet_tiny: two heads; csp_darknet_nano: three heads
    backbone: Literal["csp_darknet53", "csp_darknet_tiny", "csp_darknet_nano"]
    width: Positive = 1.0  # factor on the number of channels
    bn_momentum: ShareBelowOne = 0.99  # as in src/batchnorm_layer.c, forward_batchnorm_layer_gpu
    objectness_bias: float = 0.0  # initial bias of the objectness logits; Darknet's biases all start at 0
    # Class probabilities start at 1 / number of classes; False: at 0.5, as in Darknet. ultralytics/yolov5
    # (models/yolo.py, _initialize_biases) has about 0.6 / number of classes.
    class_prior: bool = False

    # --- heads: one row of masks and one scale_xy per head, finest stride first ---
    anchors: tuple[float, ...] = ()  # width, height, width, height, ... in pixels of the network input
    masks: tuple[tuple[int, ...], ...] = ()  # the indices of each head's anchors
    scale_xy: tuple[float, ...] = ()  # box centres can be (scale_xy - 1) / 2 cells outside their cell
    iou_thresh: Share = 1.0  # a box also gets anchors above this shape IoU; 1: it gets only its best anchor
    neighbour_cells: bool = False  # assign a box also to the cells in the nearest column and the nearest row
    ignore_thresh: Share = 0.7  # an unassigned prediction above this IoU with a box is not background

    # --- loader: preprocessing and augmentation of training images ---
    # smooth images that are shrunk, in training and evaluation; Darknet does not
    antialias: Loader[bool] = True
    # keep the aspect ratio and pad; False: stretch, as Darknet's letter_box=0
    letterbox: Loader[bool] = False
    # each edge of the crop moves in or out by up to this share of the image's side
    jitter: Loader[NotNegative] = 0.3
    flip_prob: Loader[Share] = 0.5
    # random angle between -hue and hue degrees; 36 is Darknet's 0.1 of the circle
    hue: Loader[NotNegative] = 36.0
    # random factor between 1 and saturation, inverted with probability 0.5
    saturation: Loader[AtLeastOne] = 1.5
    # brightness factor between 1 and exposure, inverted with probability 0.5
    exposure: Loader[AtLeastOne] = 1.5
    rotation: Loader[NotNegative] = 0.0  # random from -rotation to rotation degrees, about the crop's centre
    # RandAugment (arXiv 1909.13719) or TrivialAugment (arXiv 2103.10158), without operations that move pixels
    auto_augment: Loader[Literal["none", "rand", "trivial"]] = "none"
    rand_augment_ops: Loader[Count] = 2  # operations per image; the paper has 2 for ResNet-50 (section 4.3)
    # strength of operations, 0 to 30; the paper has 9 for ResNet-50
    rand_augment_magnitude: Loader[CountOrZero] = 9
    cutout_prob: Loader[Share] = 0.0  # probability of one filled square (arXiv 1708.04552)
    # probability per image; in Darknet per batch (src/data.c, load_data_detection)
    mosaic_prob: Loader[Share] = 0.5
    # Where a mosaic gets its other three images. batch: from the same batch; fresh: by extra reads
    mosaic_tiles: Loader[Literal["batch", "fresh"]] = "batch"
    # drop a box if its tile of a mosaic, or CutMix's rectangle, shows less than this share of it (mosaic.py)
    min_visible: Loader[Share] = 0.0
    close_mosaic: Loader[CountOrZero] = 0  # number of last epochs without mosaic, MixUp and CutMix
    mixup_prob: Loader[Share] = 0.0
    cutmix_prob: Loader[Share] = 0.0
    # random factor on image_size per batch: 1 / multi_scale to multi_scale
    multi_scale: Loader[AtLeastOne] = 1.0
    # pixels of the network input; smaller boxes are dropped and counted
    min_box_size: Loader[NotNegative] = 1.0
    # boxes kept per image, the largest first (src/parser.c, parse_yolo: max)
    max_instances: Loader[Count] = 200

    # --- loss ---
    iou_normalizer: NotNegative = 0.07
    obj_normalizer: NotNegative = 1.0
    # Objectness target of an assigned prediction: 1 - objectness_iou * (1 - IoU with its box). Darknet has 0,
    # ultralytics/yolov5 (utils/loss.py) has 1.
    objectness_iou: Share = 0.0
    cls_normalizer: NotNegative = 1.0
    box_gradient: Literal["exact", "darknet"] = "darknet"  # gradient of the box loss (losses.py)
    size_weighting: bool = False  # multiply each box loss by 2 minus the box's share of the image (losses.py)
    max_delta: NotNegative = 0.0  # largest gradient of the box loss for each raw output; 0: no limit
    label_smoothing: Share = 0.0
    weight_decay: NotNegative = 5e-4  # factor on half the sum of squared kernels

    # --- optimisation ---
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: ShareBelowOne = 0.949  # of SGD; beta_1 of Adam
    learning_rate: NotNegative = 0.0013  # for reference_batch images per update; scales linearly with them
    reference_batch: Count = 64
    lr_schedule: Literal["steps", "cosine"] = "steps"
    lr_steps: tuple[float, ...] = (0.8, 0.9)  # shares of the run after which the learning rate falls
    lr_step_factor: NotNegative = 0.1  # factor on the learning rate at each of lr_steps
    burn_in_steps: CountOrZero = 1000  # updates of the warm-up, at most a tenth of the run
    burn_in_power: NotNegative = 4.0  # exponent of the warm-up
    epochs: Count = 271  # 500,500 batches of 64 images on COCO train2017, which has 118,287 images
    clip_norm: NotNegative = 0.0  # largest global norm of the gradients; 0: off
    ema_decay: ShareBelowOne = 0.0  # decay of the averaged weights; 0: off

    # --- detections ---
    nms_method: Detection[Literal["greedy", "diou"]] = "greedy"
    nms_iou: Detection[Share] = 0.6
    # A box also suppresses boxes of other classes: for data in which a place holds one object only
    nms_class_agnostic: Detection[bool] = False
    diou_beta: Detection[Positive] = 0.6  # exponent of nms_method=diou (src/parser.c, parse_yolo: beta_nms)
    score_threshold: Detection[Share] = 0.001
    nms_candidates: Detection[Count] = 1000
    max_detections: Detection[Count] = 100

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
            "masks of the same length": len(lengths) == 1,
            "anchors as pairs of numbers": self.anchors and len(self.anchors) % 2 == 0,
            "anchors above 0": min(self.anchors, default=0) > 0,
            "masks with indices of existing anchors": all(0 <= anchor < self.num_anchors for anchor in named),
            "scale_xy of at least 1, and at least 2 with neighbour_cells": (
                min(self.scale_xy, default=0) >= 1 + self.neighbour_cells
            ),
            f"multi_scale of at most {MAX_MULTI_SCALE}": self.multi_scale <= MAX_MULTI_SCALE,
            "lr_steps above 0, up to 1 and ascending": shares == sorted(shares) and 0.0 not in self.lr_steps,
            "rand_augment_magnitude of at most 30": self.rand_augment_magnitude <= 30,
            "rotation of 0 when mosaic_tiles is fresh": not self.rotation or self.mosaic_tiles == "batch",
            "jitter below 0.5, else a crop may be empty": self.jitter < 0.5,
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
        """The range of the shorter side of training images, in units of STRIDE."""
        side = min(self.image_size) / STRIDE
        return max(math.floor(side / self.multi_scale + 0.5), 1), math.floor(side * self.multi_scale + 0.5)

    def bucket(self, units: int) -> tuple[int, int]:
        """Returns the training size with a shorter side of `units` * STRIDE."""
        shorter = min(self.image_size)
        height, width = (STRIDE * math.floor(units * side / shorter + 0.5) for side in self.image_size)
        return height, width


HEAD_STRIDES = {"csp_darknet53": (8, 16, 32), "csp_darknet_tiny": (16, 32), "csp_darknet_nano": (8, 16, 32)}

LOADER_FIELDS = hparams.marked_fields(YOLOv4Config, "loader")
DETECTION_FIELDS = hparams.marked_fields(YOLOv4Config, "detection")


# As in cfg/yolov4-tiny.cfg, anchor 3 is in both masks, and anchor 0 in none.
_TINY = {
    "backbone": "csp_darknet_tiny",
    "anchors": (10, 14, 23, 27, 37, 58, 81, 82, 135, 169, 344, 319),
    "masks": ((1, 2, 3), (3, 4, 5)),
    "scale_xy": (1.05, 1.05),
    "mosaic_prob": 0.0,
    "momentum": 0.9,
    "learning_rate": 0.00261,
    "epochs": 1082,  # 2,000,200 batches of 64 images
}

_YOLOV4 = {
    "backbone": "csp_darknet53",
    "anchors": (12, 16, 19, 36, 40, 28, 36, 75, 76, 55, 72, 146, 142, 110, 192, 243, 459, 401),
    "masks": ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    "scale_xy": (1.2, 1.1, 1.05),
    "iou_thresh": 0.213,
    "max_delta": 5.0,
    "multi_scale": 1.4,  # random=1 in the cfg: src/detector.c, train_detector
}
# Not published: yolov4-tiny with half the channels and smaller anchors. A laptop trains this model in
# minutes. The box and class losses have larger weights than the objectness loss, because the model
# otherwise learns boxes and classes late. In so short a run, mosaics and strong colours cost AP
# (docs/dev/performance_notes.md).
_NANO = _TINY | {
    "backbone": "csp_darknet_nano",
    "width": 0.5,
    "bn_momentum": 0.9,
    "objectness_bias": -4.0,
    "class_prior": True,
    "anchors": (9, 9, 14, 14, 21, 21, 31, 31, 46, 46, 68, 68, 100, 100, 150, 150, 220, 220),
    "masks": ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    "scale_xy": (2.0, 2.0, 2.0),
    "iou_thresh": 0.213,
    "jitter": 0.1,
    "hue": 10.0,
    "saturation": 1.2,
    "exposure": 1.2,
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
# 0.1.0 had these values. A run that 0.1.0 started keeps them.
_NANO_0_1_0 = _NANO | {
    "class_prior": False,
    "jitter": 0.2,
    "hue": 36.0,
    "saturation": 1.5,
    "exposure": 1.5,
    "mosaic_prob": 0.5,
}
_TABLE: dict[str, tuple[int, dict]] = {  # model: (image side, fields that differ from the defaults)
    "yolov4": (608, _YOLOV4),
    "yolov4-tiny": (416, _TINY),
    "yolov4-nano": (256, _NANO),
}

MODEL_NAMES = tuple(_TABLE)

# The fields that each --augmentation_preset changes. docs/training.md has the cost and the effect of presets.
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
    """Returns the configuration of a model. For an unknown name, UserError suggests the most similar name."""
    if model_name not in _TABLE:
        raise unknown("model", model_name, MODEL_NAMES)
    side, other = _TABLE[model_name]
    return YOLOv4Config(model_name=model_name, image_size=(side, side), **other)


def get_configs(model_name: str) -> list[YOLOv4Config]:
    """Returns the configuration of a model, and after it those of earlier versions with other defaults."""
    config = get_config(model_name)
    earlier = [_NANO_0_1_0] if model_name == "yolov4-nano" else []
    return [config, *(hparams.replace(config, fields) for fields in earlier)]
