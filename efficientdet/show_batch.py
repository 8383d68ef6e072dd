"""Look at the first augmented batch before the long run: a picture with its boxes, and one line of counts."""

import pathlib

import numpy as np
import tensorflow as tf

from common import box_encoder
from common import boxes as box_ops
from common.evaluation import drawing
from common.labels import LabelMap
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import MEAN_RGB, STDDEV_RGB

MAX_PICTURES = 16


def report(
    images: tf.Tensor,
    targets: dict[str, tf.Tensor],
    config: EfficientDetConfig,
    label_map: LabelMap,
    path: pathlib.Path,
) -> str:
    """Writes a contact sheet of the batch to `path` and says what its boxes match.

    Args:
        images: float32 (B, H, W, 3), normalised.
        targets: as the training loader gives them.
        config: names the levels, anchors and image size.
        label_map: names of the classes.
        path: a .png file.

    Returns:
        One line: images, boxes, positive anchors, and how many boxes own no anchor (a box nobody is trained
            to find).
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

    pictures = []
    for i in range(min(len(boxes), MAX_PICTURES)):
        real = classes[i] >= 0
        boxes_px = np.asarray(box_ops.denormalize(boxes[i][real], config.image_size))
        pictures.append(
            drawing.draw_boxes(to_pixels(images[i].numpy()), boxes_px, classes[i][real], label_map.names)
        )
    drawing.save_png(drawing.contact_sheet(pictures, columns=4), path)
    return (
        f"first batch: {len(boxes)} images, {int((classes >= 0).sum())} boxes, "
        f"{int(tf.reduce_sum(targets['num_positives']))} positive anchors, "
        f"{without_anchor} boxes without any anchor; look at {path}"
    )


def to_pixels(image: np.ndarray) -> np.ndarray:
    """Normalised float32 (H, W, 3) back to uint8 RGB."""
    return np.clip(np.rint(image * np.array(STDDEV_RGB) + np.array(MEAN_RGB)), 0, 255).astype(np.uint8)
