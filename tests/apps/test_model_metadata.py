"""Tests model_metadata.py of each app."""

import dataclasses

import pytest

import common
from common.data.labels import LabelMap

LABELS = LabelMap((3, 17, 90), ("car", "Katze", "toothbrush"))


def test_metadata_hold_config_labels_versions_pixels_and_anchors_of_the_model(app):
    config = dataclasses.replace(app.package.config.get_config(app.model_name), image_size=(64, 96))
    metadata = app.package.model_metadata.make_metadata(config, LABELS, 3)
    saved = metadata["config"]
    assert (metadata["app"], saved["model_name"], saved["image_size"]) == (app.name, app.model_name, [64, 96])
    assert LabelMap.from_json(metadata["label_map"]) == LABELS
    assert {"python", "tensorflow", "keras", "nvidia-dali-cuda120"} <= metadata["versions"].keys()
    assert metadata["project"]["version"] == common.__version__
    pixels = metadata["preprocessing"]
    assert len(pixels["mean_rgb"]) == len(pixels["stddev_rgb"]) == len(pixels["fill_rgb"]) == 3
    red = {"efficientdet": (123.675, 58.395), "yolov4": (0, 255)}[app.name]
    assert (pixels["mean_rgb"][0], pixels["stddev_rgb"][0]) == pytest.approx(red)
    # Strides 8 to 64 have 8x12, 4x6, 2x3, 1x2 cells. YOLOv4 has 3 anchors per cell and no stride 64.
    count = {"efficientdet": 96 + 24 + 6 + 2, "yolov4": 3 * (96 + 24 + 6)}[app.name]
    assert metadata["anchors"]["count"] == count
