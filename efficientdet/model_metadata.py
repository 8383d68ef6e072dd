"""Metadata of this app's models; see common/training/model_metadata.py."""

from collections.abc import Mapping
from typing import Any

from common.labels import LabelMap
from common.sources import Source
from common.training import model_metadata
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import MEAN_RGB, STDDEV_RGB


def make_metadata(
    config: EfficientDetConfig,
    label_map: LabelMap,
    num_classes: int,
    source: Source | None = None,
    eval_source: Source | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The metadata of a model.

    Args:
        config: of the model as it runs.
        label_map: of the trained classes.
        num_classes: rows of the class outputs.
        source, eval_source: the data, where they are known.
        recipe: flags of train.py.
    """
    return model_metadata.make(
        app="efficientdet",
        config=config,
        label_map=label_map,
        num_classes=num_classes,
        anchors={
            "count": config.anchors.num_anchors,
            "levels": list(config.anchors.levels),
            "cells": config.anchors.feature_sizes,
            "scales_per_octave": config.num_scales,
            "aspect_ratios": config.aspect_ratios,
            "smallest_side_in_strides": config.anchor_scale,
            "order": "level, row, column, scale, ratio",
            "box_outputs": "dy, dx, log dh, log dw relative to the anchor",
        },
        preprocessing={
            "color": "RGB, 0 to 255",
            "resize": "aspect ratio kept, at the top left",
            "antialias": config.antialias,
            "fill_rgb": MEAN_RGB,
            "mean_rgb": MEAN_RGB,
            "stddev_rgb": STDDEV_RGB,
            "network_sees": "(pixel - mean) / stddev",
        },
        train_data=source and source.fingerprint,
        eval_data=eval_source and eval_source.fingerprint,
        recipe=recipe,
    )
