"""Metadata of this app's models; see common/weights/model_metadata.py."""

import functools
from typing import Any

from common.weights import model_metadata
from yolov4.config import FILL, YOLOv4Config


def describe(config: YOLOv4Config) -> dict[str, Any]:
    cells = [[side // stride for side in config.image_size] for stride in config.strides]
    return {
        "anchors": {
            "count": sum(height * width for height, width in cells) * config.anchors_per_location,
            "strides": config.strides,
            "cells": cells,
            "sizes_px": [[config.anchor_sizes[i] for i in mask] for mask in config.masks],  # (width, height)
            "scale_xy": config.scale_xy,
            "order": "head, row, column, anchor",
            "box_outputs": "x, y by a sigmoid in the cell; log width, log height relative to the anchor",
        },
        "preprocessing": {
            "resize": "aspect ratio kept, in the centre" if config.letterbox else "stretched to the input",
            "fill_rgb": [FILL] * 3,
            "mean_rgb": [0.0] * 3,
            "stddev_rgb": [255.0] * 3,
        },
    }


make_metadata = functools.partial(model_metadata.make, "yolov4", describe)
