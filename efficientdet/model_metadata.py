"""Metadata of this app's models; see common/training/model_metadata.py."""

import functools
from typing import Any

from common.training import model_metadata
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import MEAN_RGB, STDDEV_RGB


def describe(config: EfficientDetConfig) -> dict[str, Any]:
    """What box outputs are relative to, and what is done to the pixels of an image."""
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
            "color": "RGB, 0 to 255",
            "resize": "aspect ratio kept, at the top left",
            "antialias": config.antialias,
            "fill_rgb": MEAN_RGB,
            "mean_rgb": MEAN_RGB,
            "stddev_rgb": STDDEV_RGB,
            "network_sees": "(pixel - mean) / stddev",
        },
    }


make_metadata = functools.partial(model_metadata.make, "efficientdet", describe)
