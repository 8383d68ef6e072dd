"""Tests model_metadata.py of each app."""

import dataclasses
import importlib

import pytest

import common
from common.data.labels import LabelMap

LABELS = LabelMap((3, 17, 90), ("car", "Katze", "toothbrush"))
MODELS = {"efficientdet": "efficientdet-nano", "yolov4": "yolov4-nano"}


@pytest.mark.parametrize("app", MODELS)
def test_metadata_hold_what_is_needed_to_run_the_model_elsewhere(app):
    config = importlib.import_module(f"{app}.config").get_config(MODELS[app])
    make = importlib.import_module(f"{app}.model_metadata").make_metadata
    found = make(dataclasses.replace(config, image_size=(64, 96)), LABELS, 3)
    config = found["config"]
    assert (found["app"], config["model_name"], config["image_size"]) == (app, MODELS[app], [64, 96])
    assert LabelMap.from_json(found["label_map"]) == LABELS
    assert {"python", "tensorflow", "keras", "nvidia-dali-cuda120"} <= found["versions"].keys()
    assert found["project"]["version"] == common.__version__
    pixels = found["preprocessing"]
    assert len(pixels["mean_rgb"]) == len(pixels["stddev_rgb"]) == len(pixels["fill_rgb"]) == 3
    red = {"efficientdet": (123.675, 58.395), "yolov4": (0, 255)}[app]
    assert (pixels["mean_rgb"][0], pixels["stddev_rgb"][0]) == pytest.approx(red)
    # Strides 8 to 64 have 8x12, 4x6, 2x3, 1x2 cells. YOLOv4 has 3 anchors per cell and no stride 64.
    count = {"efficientdet": 96 + 24 + 6 + 2, "yolov4": 3 * (96 + 24 + 6)}[app]
    assert found["anchors"]["count"] == count
