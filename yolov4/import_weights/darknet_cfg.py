"""A model as a .cfg file, which AlexeyAB/darknet and OpenCV (cv2.dnn.readNetFromDarknet) read.

    text = cfg_text(get_config("yolov4"), num_classes=80)

The layers are network.py's. The recipe is written as far as Darknet's detector knows it: CutMix,
close_mosaic, clip_norm, size_weighting, min_box_size, bn_momentum and the probabilities of mosaic and MixUp
(one half there, and only one of the two) have no counterpart, and iou_normalizer has Darknet's meaning under
box_gradient=darknet only.
"""

import math
from typing import Any

from yolov4.config import YOLOv4Config
from yolov4.network import IMAGE_CHANNELS, Layer, describe

COCO_IMAGES = 118_287  # train2017: Darknet counts batches, our configs epochs
SUBDIVISIONS = 8  # parts of a batch that a GPU takes at once, where they divide it


def cfg_text(config: YOLOv4Config, num_classes: int) -> str:
    """The complete text of the .cfg file of a model.

    `max_batches` is what the config's epochs are for COCO train2017; change it for other data.
    """
    sections = [_section("net", _net(config))]
    for layer in describe(config, num_classes):
        sections.append(_section(layer.kind, _options(layer, config, num_classes)))
    return "\n".join(sections)


def _net(config: YOLOv4Config) -> dict[str, Any]:
    height, width = config.image_size
    max_batches = round(config.epochs * COCO_IMAGES / config.reference_batch)
    mosaic = config.mosaic_prob > 0 and not config.letterbox  # Darknet refuses the two together
    options = {
        "batch": config.reference_batch,
        "subdivisions": math.gcd(config.reference_batch, SUBDIVISIONS),
        "width": width,
        "height": height,
        "channels": IMAGE_CHANNELS,
        "momentum": config.momentum,
        "decay": config.weight_decay,
        "saturation": config.saturation,
        "exposure": config.exposure,
        "hue": config.hue / 360,
        "flip": int(config.flip_prob > 0),
        "mosaic": int(mosaic),
        "mixup": int(config.mixup_prob > 0 and not mosaic),
        "letter_box": int(config.letterbox),
        "learning_rate": config.learning_rate,
        "burn_in": config.burn_in_steps,
        "power": config.burn_in_power,
        "max_batches": max_batches,
    }
    if config.lr_schedule == "cosine":
        options |= {"policy": "sgdr", "sgdr_cycle": max_batches}
    else:
        options |= {
            "policy": "steps",
            "steps": [round(share * max_batches) for share in config.lr_steps],
            "scales": [config.lr_step_factor] * len(config.lr_steps),
        }
    if config.optimizer == "adam":
        options |= {"adam": 1, "B1": config.momentum}
    if config.ema_decay:
        options["ema_alpha"] = config.ema_decay
    return options


def _options(layer: Layer, config: YOLOv4Config, num_classes: int) -> dict[str, Any]:
    steps_back = [index - layer.index for index in layer.inputs]
    match layer.kind:
        case "route":
            return {"layers": steps_back, **layer.options}
        case "shortcut":
            return {"from": steps_back[1], **layer.options}
        case "yolo":
            return _yolo(layer.options["head"], config, num_classes)
    return layer.options


def _yolo(head: int, config: YOLOv4Config, num_classes: int) -> dict[str, Any]:
    options = {
        "mask": config.masks[head],
        "anchors": config.anchors,
        "classes": num_classes,
        "num": config.num_anchors,
        "max": config.max_instances,
        "jitter": config.jitter,
        "ignore_thresh": config.ignore_thresh,
        "truth_thresh": 1,
        "random": config.multi_scale if config.multi_scale > 1 else 0,
        "scale_x_y": config.scale_xy[head],
        "cls_normalizer": config.cls_normalizer,
        "iou_normalizer": config.iou_normalizer,
        "obj_normalizer": config.obj_normalizer,
        "iou_loss": "ciou",
        # its greedynms is not plain IoU: common/nms.py
        "nms_kind": {"greedy": "default", "diou": "diounms"}[config.nms_method],
        "beta_nms": config.diou_beta,
    }
    if config.iou_thresh < 1:
        options["iou_thresh"] = config.iou_thresh
    if config.max_delta:
        options["max_delta"] = config.max_delta
    if config.label_smoothing:
        options["label_smooth_eps"] = config.label_smoothing
    return options


def _section(name: str, options: dict[str, Any]) -> str:
    return "".join([f"[{name}]\n", *(f"{key}={_text(value)}\n" for key, value in options.items())])


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(_text(item) for item in value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)
