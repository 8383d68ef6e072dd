"""Tests the picture and the log line of the first batch."""

import numpy as np
import tensorflow as tf
from PIL import Image

from common.data.labels import LabelMap
from yolov4 import show_batch
from yolov4.config import get_config
from yolov4.predict import to_pixels

# 64 x 96 pixels: 4 x 6 cells at stride 16, 2 x 3 at stride 32.
TINY = get_config("yolov4-tiny")
LABELS = LabelMap((1, 2), ("cat", "dog"))
SCALE = np.array([96, 64, 96, 64])


def batch_of(boxes_px: list[list[tuple]]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The boxes are in pixels; their classes alternate."""
    boxes = np.full((len(boxes_px), 5, 4), -1, np.float32)
    classes = np.full((len(boxes_px), 5), -1, np.int32)
    for i, rows in enumerate(boxes_px):
        for j, box in enumerate(rows):
            boxes[i, j], classes[i, j] = box / SCALE, j % 2
    images = np.full((len(boxes_px), 64, 96, 3), 0.5, np.float32)
    targets = {"boxes": boxes, "classes": classes, "num_boxes": (classes >= 0).sum(1).astype(np.int32)}
    return tf.constant(images), {name: tf.constant(value) for name, value in targets.items()}


def test_log_line_of_the_first_batch_counts_trained_predictions_and_boxes_without_a_prediction(tmp_path):
    # No head has anchor 10,14. Both heads have anchor 81,82. Only the head of stride 16 has anchor 23,27.
    small, smaller = (40, 10, 63, 37), (41, 10, 62, 37)
    images, targets = batch_of([[(20, 20, 30, 34), (0, 0, 81, 64), small], [small, smaller], []])
    path = tmp_path / "sheet.png"
    line = show_batch.report(images, targets, TINY, LABELS, path)
    assert line == (
        "first batch: 3 images, 5 boxes, predictions to train: 3 at stride 16, 1 at stride 32; "
        f"1 boxes without any prediction; see {path}"
    )
    sheet = np.asarray(Image.open(path)).astype(int)
    assert (np.ptp(sheet, axis=-1) > 40).any()
    assert (np.abs(sheet - 128).max(-1) < 8).mean() > 0.3


def test_to_pixels_rounds_and_clips_values_to_0_to_255():
    image = np.array([[[0.0, 1.0, 127 / 255]], [[-0.2, 1.3, 0.5]]], np.float32)
    assert to_pixels(image).numpy().tolist() == [[[0, 255, 127]], [[0, 255, 128]]]
    levels = np.arange(256, dtype=np.uint8).reshape(-1, 1, 1).repeat(3, 2)
    np.testing.assert_array_equal(to_pixels(levels.astype(np.float32) / 255), levels)
