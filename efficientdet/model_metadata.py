"""Metadata of this app's models; see common/weights/model_metadata.py."""

import functools
from typing import Any

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.weights import model_metadata
from efficientdet.config import EfficientDetConfig


def describe(config: EfficientDetConfig) -> dict[str, Any]:
    return {
        "anchors": {
            "count": config.anchors.num_anchors,
            "levels": list(config.anchors.levels),
            "cells": config.anchors.feature_sizes,
            "scales_per_octave": config.num_scales,
            "aspect_ratios": config.aspect_ratios,
            "smallest_side_in_strides": config.anchor_scale,
            "order": "level, row, column, scale, ratio",
            "box_outputs": "dy, dx, log dh, log dw relative to the anchor",
        },
        "preprocessing": {
            "resize": "aspect ratio kept, at the top left",
            "fill_rgb": IMAGENET_MEAN,
            "mean_rgb": IMAGENET_MEAN,
            "stddev_rgb": IMAGENET_STD,
        },
    }


make_metadata = functools.partial(model_metadata.make, "efficientdet", describe)
