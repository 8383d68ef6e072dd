"""Writes a model as a .cfg file for AlexeyAB/darknet and OpenCV (cv2.dnn.readNetFromDarknet).

    text = cfg_text(get_config("yolov4"), num_classes=80)

To train further with Darknet, add a recipe to [net] and [yolo], for example the recipe in cfg/yolov4.cfg.
"""

from typing import Any

from yolov4.config import YOLOv4Config
from yolov4.network import IMAGE_CHANNELS, Layer, describe


def cfg_text(config: YOLOv4Config, num_classes: int) -> str:
    height, width = config.image_size
    net = {"batch": 1, "width": width, "height": height, "channels": IMAGE_CHANNELS}
    sections = [_section("net", net | {"letter_box": int(config.letterbox)})]
    for layer in describe(config, num_classes):
        sections.append(_section(layer.kind, _options(layer, config, num_classes)))
    return "\n".join(sections)


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
    return {
        "mask": config.masks[head],
        "anchors": config.anchors,
        "classes": num_classes,
        "num": config.num_anchors,
        "scale_x_y": config.scale_xy[head],
        # In Darknet, NMS by IoU is "default". "greedynms" would be DIoU-NMS.
        "nms_kind": {"greedy": "default", "diou": "diounms"}[config.nms_method],
        "beta_nms": config.diou_beta,
    }


def _section(name: str, options: dict[str, Any]) -> str:
    return "".join([f"[{name}]\n", *(f"{key}={_text(value)}\n" for key, value in options.items())])


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(_text(item) for item in value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)
