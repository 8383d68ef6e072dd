"""The table of EfficientDet and RetinaNet models, and every hyper-parameter with its source.

Sources: EfficientDet (arXiv 1911.09070) and google/automl efficientdet/hparams_config.py; RetinaNet (arXiv
1708.02002) and NVIDIA/retinanet-examples, odtk/, with the defaults of odtk/main.py.
To change fields from the command line: --hparams=jitter_min=0.5,nms_method=hard
"""

import dataclasses
from typing import Literal

from common import hparams
from common.anchors import Anchors
from common.errors import unknown
from common.hparams import Count, CountOrZero, Detection, Loader, NotNegative, Positive, Share, ShareBelowOne


@dataclasses.dataclass(frozen=True)
class EfficientDetConfig:
    """The configuration of one model: its structure and recipe. Sizes are (height, width) in pixels.

    Types such as `Share` limit values. `Loader[...]` marks what changes training images, `Detection[...]`
    what changes only how outputs become detections (common/hparams.py).
    """

    # --- the network ---
    model_name: str
    image_size: tuple[int, int]
    backbone: str  # one of backbone.NAMES
    fpn_channels: Count
    fpn_cells: Count  # number of BiFPN cells; architecture=retinanet ignores it
    head_repeats: Count
    architecture: Literal["efficientdet", "retinanet"] = "efficientdet"  # see model.py, retinanet.py
    # How a node of BiFPN adds its inputs. fast: with learned weights; sum: without weights (d6 and larger)
    fpn_fusion: Literal["fast", "sum"] = "fast"
    separable: bool = True  # use separable convolutions in BiFPN and heads
    bn_momentum: ShareBelowOne = 0.99  # as in google/automl efficientdet/tf2/util_keras.py
    min_level: int = 3
    max_level: int = 7

    # --- anchors ---
    num_scales: Count = 3
    aspect_ratios: tuple[float, ...] = (1.0, 2.0, 0.5)  # width / height
    anchor_scale: float = 4.0

    # --- loader: preprocessing and augmentation of training images ---
    augmentation: Loader[Literal["scale_jitter", "min_iou_crop", "resize_range", "none"]] = "scale_jitter"
    jitter_min: Loader[float] = 0.1  # scale_jitter: smallest scale; 1 fits the image into the network input
    jitter_max: Loader[float] = 2.0  # scale_jitter: largest scale
    # smooth images that are shrunk, in training and evaluation; automl does not
    antialias: Loader[bool] = True
    # resize_range: the shorter side of an image is drawn between these limits, in pixels. An image that is
    # then too large for image_size is shrunk to fit. The defaults suit an image_size of 640.
    resize_min: Loader[int] = 320
    resize_max: Loader[int] = 512
    flip_prob: Loader[Share] = 0.5
    grid_mask_prob: Loader[Share] = 0.0  # probability of GridMask (arXiv 2001.04086); automl leaves it off
    brightness: Loader[Share] = 0.0  # random factor between 1 - brightness and 1 + brightness
    contrast: Loader[Share] = 0.0  # random factor between 1 - contrast and 1 + contrast
    saturation: Loader[Share] = 0.0  # random factor between 1 - saturation and 1 + saturation
    hue: Loader[NotNegative] = 0.0  # random angle between -hue and hue degrees
    rotation: Loader[NotNegative] = 0.0  # random from -rotation to rotation degrees, about the crop's centre
    # RandAugment (arXiv 1909.13719) or TrivialAugment (arXiv 2103.10158), without operations that move pixels
    auto_augment: Loader[Literal["none", "rand", "trivial"]] = "none"
    rand_augment_ops: Loader[Count] = 2  # operations per image; the paper has 2 for ResNet-50 (section 4.3)
    # strength of operations, 0 to 30; the paper has 9 for ResNet-50
    rand_augment_magnitude: Loader[CountOrZero] = 9
    cutout_prob: Loader[Share] = 0.0  # probability of one filled square (arXiv 1708.04552)
    # pixels of the network input; smaller boxes are dropped and counted
    min_box_size: Loader[NotNegative] = 1.0
    # boxes kept per image, the largest first; the rest are dropped and counted
    max_instances: Loader[Count] = 100

    # --- loss ---
    # max_iou: assign boxes to anchors by their IoU. task_aligned: assign boxes to the anchors that predict
    # them best (targets.py). Of the loss fields, task_aligned uses only box_loss_weight and
    # weight_decay.
    assignment: Literal["max_iou", "task_aligned"] = "max_iou"
    focal_alpha: Share = 0.25
    focal_gamma: NotNegative = 1.5
    label_smoothing: Share = 0.0
    huber_delta: Positive = 0.1
    box_loss_weight: NotNegative = 50.0
    weight_decay: NotNegative = 4e-5  # factor on half the sum of squared kernels (automl tf2/train_lib.py)

    # --- optimisation ---
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: ShareBelowOne = 0.9  # of SGD; beta_1 of Adam
    learning_rate: NotNegative = 0.08  # for reference_batch images per update; scales linearly with them
    reference_batch: Count = 64
    # At the start of the warm-up; scaled like learning_rate, and at most learning_rate
    warmup_learning_rate: NotNegative = 0.008
    warmup_epochs: NotNegative = 1.0
    epochs: CountOrZero = 300  # 0: the number of epochs that is nearest to `iterations`
    lr_schedule: Literal["cosine", "milestones"] = "cosine"
    # Number of updates in a run, at reference_batch images per update. If `epochs` changes the length of the
    # run, milestones and warmup_iterations change by the same factor.
    iterations: CountOrZero = 0
    milestones: tuple[int, ...] = ()  # iterations at which the learning rate falls
    warmup_iterations: CountOrZero = 0  # length of the warm-up; if above 0, it replaces warmup_epochs
    lr_step_factor: NotNegative = 0.1  # factor on the learning rate at each milestone
    clip_norm: NotNegative = 10.0  # largest global norm of the gradients; 0: off
    ema_decay: ShareBelowOne = 0.9998  # decay of the averaged weights; 0: off

    # --- detections ---
    nms_method: Detection[Literal["gaussian", "hard"]] = "gaussian"
    nms_iou: Detection[Share] = 0.5  # IoU threshold of nms_method=hard
    nms_sigma: Detection[Positive] = 0.5  # sigma of nms_method=gaussian (Soft-NMS)
    # A box also suppresses boxes of other classes: for data in which a place holds one object only
    nms_class_agnostic: Detection[bool] = False
    score_threshold: Detection[Share] = 0.001
    nms_candidates: Detection[Count] = 1000
    max_detections: Detection[Count] = 100

    def __post_init__(self) -> None:
        hparams.check(self)
        in_order = list(self.milestones) == sorted(self.milestones)
        in_run = all(0 < milestone <= self.iterations for milestone in self.milestones)
        unused = self.lr_schedule != "milestones" and not self.milestones
        milestones_fit = unused or (self.iterations and in_order and in_run)
        rules = {
            "1 <= min_level <= 5 <= max_level": 1 <= self.min_level <= 5 <= self.max_level,
            "0 < resize_min <= resize_max": 0 < self.resize_min <= self.resize_max,
            "0 < jitter_min <= jitter_max": 0 < self.jitter_min <= self.jitter_max,
            "epochs or iterations of at least 1": self.epochs or self.iterations,
            "milestones from 1 to iterations in ascending order": milestones_fit,
            "warmup_iterations <= iterations": self.warmup_iterations <= self.iterations,
            "rand_augment_magnitude of at most 30": self.rand_augment_magnitude <= 30,
        }
        hparams.require(self, rules)
        _ = self.anchors  # Anchors checks its arguments

    @property
    def anchors(self) -> Anchors:
        levels = self.min_level, self.max_level
        return Anchors(*levels, self.num_scales, self.aspect_ratios, self.anchor_scale, self.image_size)

    @property
    def anchors_per_location(self) -> int:
        return self.num_scales * len(self.aspect_ratios)


LOADER_FIELDS = hparams.marked_fields(EfficientDetConfig, "loader")
DETECTION_FIELDS = hparams.marked_fields(EfficientDetConfig, "detection")

_SUM = {"fpn_fusion": "sum"}
# Not published, and not a scaled-down EfficientDet: a small ResNet of plain convolutions with one BiFPN cell,
# one anchor per cell and task-aligned assignment. A laptop trains it in minutes. Objects are small at 256
# pixels, so the anchors are small, too.
_NANO = {
    "separable": False,
    "bn_momentum": 0.9,
    "max_level": 6,
    "num_scales": 1,
    "aspect_ratios": (1.0,),
    "anchor_scale": 2.0,
    "assignment": "task_aligned",
    "box_loss_weight": 2.0,
    "jitter_min": 0.8,
    "jitter_max": 1.25,
    "optimizer": "adam",
    "learning_rate": 0.024,
    "warmup_learning_rate": 0.001,
    "ema_decay": 0.99,
    "epochs": 30,
}

_RETINANET_BASE = {
    "architecture": "retinanet",
    "bn_momentum": 0.9,  # same as torchvision's 0.1, because PyTorch's momentum is the share of the new value
    "focal_gamma": 2.0,  # odtk/loss.py
    "huber_delta": 0.11,  # odtk/model.py: SmoothL1Loss(beta=0.11) is the Huber loss divided by 0.11
    "box_loss_weight": 4 / 0.11,  # odtk sums over four coordinates, losses.py averages them
    "weight_decay": 1e-4,
    "clip_norm": 0.0,
    "nms_method": "hard",
}
_RETINANET = _RETINANET_BASE | {
    "augmentation": "resize_range",
    "resize_min": 640,
    "resize_max": 1024,
    "learning_rate": 0.01,
    "reference_batch": 16,  # 2 images on each of 8 GPUs
    "warmup_learning_rate": 0.001,  # a tenth of the learning rate, as in odtk/train.py, schedule
    "epochs": 0,
    "lr_schedule": "milestones",
    "iterations": 90_000,  # 12.2 epochs of COCO train2017
    "milestones": (60_000, 80_000),
    "warmup_iterations": 1000,
    "ema_decay": 0.0,
}
# Not published, like _NANO.
_RETINANET_NANO = _RETINANET_BASE | {
    "anchor_scale": 2.0,
    "jitter_min": 0.8,
    "jitter_max": 1.25,
    "optimizer": "adam",
    "learning_rate": 0.012,  # for 64 images; lower than for efficientdet-nano, whose heads have batch norms
    "warmup_learning_rate": 0.001,
    "clip_norm": 10.0,
    "ema_decay": 0.99,
    "epochs": 30,
}

# model: (image side, backbone, BiFPN channels, BiFPN cells, head repeats, other fields with changed values)
# From arXiv 1911.09070 table 1; google/automl efficientdet/hparams_config.py efficientdet_model_param_dict.
_TABLE: dict[str, tuple[int, str, int, int, int, dict]] = {
    "efficientdet-d0": (512, "efficientnet-b0", 64, 3, 3, {}),
    "efficientdet-d1": (640, "efficientnet-b1", 88, 4, 3, {}),
    "efficientdet-d2": (768, "efficientnet-b2", 112, 5, 3, {}),
    "efficientdet-d3": (896, "efficientnet-b3", 160, 6, 4, {}),
    "efficientdet-d4": (1024, "efficientnet-b4", 224, 7, 4, {}),
    "efficientdet-d5": (1280, "efficientnet-b5", 288, 7, 4, {}),
    "efficientdet-d6": (1280, "efficientnet-b6", 384, 8, 5, _SUM),
    "efficientdet-d7": (1536, "efficientnet-b6", 384, 8, 5, _SUM | {"anchor_scale": 5.0, "epochs": 600}),
    "efficientdet-d7x": (1536, "efficientnet-b7", 384, 8, 5, _SUM | {"max_level": 8, "epochs": 600}),
    "efficientdet-nano": (256, "resnet-pico", 48, 1, 2, _NANO),
    # odtk/backbones/fpn.py. 1280 is the side of odtk's exported models; its training resizes to at most 1333.
    # A RetinaNet has no BiFPN, so its number of cells has no effect.
    "retinanet-rn18fpn": (1280, "resnet-18", 256, 1, 4, _RETINANET),
    "retinanet-rn34fpn": (1280, "resnet-34", 256, 1, 4, _RETINANET),
    "retinanet-rn50fpn": (1280, "resnet-50", 256, 1, 4, _RETINANET),
    "retinanet-rn101fpn": (1280, "resnet-101", 256, 1, 4, _RETINANET),
    "retinanet-rn152fpn": (1280, "resnet-152", 256, 1, 4, _RETINANET),
    "retinanet-mobilenetv2fpn": (1280, "mobilenet-v2", 256, 1, 4, _RETINANET),
    "retinanet-nano": (256, "resnet-nano", 64, 1, 2, _RETINANET_NANO),
}

MODEL_NAMES = tuple(_TABLE)

# The fields that each --augmentation_preset changes. docs/training.md has the cost and the effect of presets.
_NONE = {
    "augmentation": "none",
    "flip_prob": 0.0,
    "grid_mask_prob": 0.0,
    **dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0),
}
PRESETS: dict[str, dict] = {
    "none": _NONE,
    "light": _NONE | {"augmentation": "scale_jitter", "jitter_min": 0.9, "jitter_max": 1.1, "flip_prob": 0.5},
    "default": {},
    "strong": {"rotation": 5.0, "auto_augment": "rand", "cutout_prob": 0.5},
}


def get_config(model_name: str) -> EfficientDetConfig:
    """Returns the configuration of a model. For an unknown name, UserError suggests the most similar name."""
    if model_name not in _TABLE:
        raise unknown("model", model_name, MODEL_NAMES)
    side, backbone, channels, cells, repeats, other = _TABLE[model_name]
    return EfficientDetConfig(model_name, (side, side), backbone, channels, cells, repeats, **other)
