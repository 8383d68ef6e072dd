"""Metadata of this app's models; see common/training/model_metadata.py."""

from collections.abc import Mapping
from typing import Any

from common.labels import LabelMap
from common.sources import Source
from common.training import model_metadata
from yolov4.config import YOLOv4Config
from yolov4.pipeline import FILL


def make_metadata(
    config: YOLOv4Config,
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
    cells = [[side // stride for side in config.image_size] for stride in config.strides]
    return model_metadata.make(
        app="yolov4",
        config=config,
        label_map=label_map,
        num_classes=num_classes,
        anchors={
            "count": sum(height * width for height, width in cells) * config.anchors_per_location,
            "strides": config.strides,
            "cells": cells,
            "sizes_px": [[config.anchor_sizes[i] for i in mask] for mask in config.masks],  # (width, height)
            "scale_xy": config.scale_xy,
            "order": "head, row, column, anchor",
            "box_outputs": "x, y by a sigmoid in the cell; log width, log height relative to the anchor",
        },
        preprocessing={
            "color": "RGB, 0 to 255",
            "resize": "aspect ratio kept, in the centre" if config.letterbox else "stretched to the input",
            "antialias": config.antialias,
            "fill_rgb": [FILL] * 3,
            "mean_rgb": [0.0] * 3,
            "stddev_rgb": [255.0] * 3,
            "network_sees": "(pixel - mean) / stddev",
        },
        train_data=source and source.fingerprint,
        eval_data=eval_source and eval_source.fingerprint,
        recipe=recipe,
    )
