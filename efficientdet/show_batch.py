"""The first augmented batch of a run: a picture with its boxes, and one line of counts."""

import pathlib

import tensorflow as tf

from common import box_encoder
from common.evaluation import drawing
from common.labels import LabelMap
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import to_pixels


def report(
    images: tf.Tensor,
    targets: dict[str, tf.Tensor],
    config: EfficientDetConfig,
    label_map: LabelMap,
    path: pathlib.Path,
) -> str:
    """Writes a contact sheet of the batch to `path` and counts what its boxes match.

    Args:
        images: float32 (B, H, W, 3), normalised.
        targets: as the training loader gives them.
        config: names the levels, anchors and image size.
        label_map: names of the classes.
        path: a .png file.

    Returns:
        One line: images, boxes, positive anchors, and how many boxes own no anchor (nothing is
            trained to find those).
    """
    boxes, classes = targets["boxes"].numpy(), targets["classes"].numpy()
    levels = config.anchors.levels
    class_targets = [targets[f"class_targets_{level}"].numpy() for level in levels]
    box_targets = [targets[f"box_targets_{level}"].numpy() for level in levels]
    without_anchor = sum(
        box_encoder.boxes_without_anchor(
            boxes[i], [t[i] for t in class_targets], [t[i] for t in box_targets], config.anchors
        )
        for i in range(len(boxes))
    )
    drawing.save_batch(to_pixels(images).numpy(), boxes, classes, label_map.names, path)
    return (
        f"first batch: {len(boxes)} images, {int((classes >= 0).sum())} boxes, "
        f"{int(tf.reduce_sum(targets['num_positives']))} positive anchors, "
        f"{without_anchor} boxes without any anchor; look at {path}"
    )
