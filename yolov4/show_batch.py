"""Shows the first augmented batch of a run."""

import pathlib

import numpy as np
import tensorflow as tf

from common.data.labels import LabelMap
from common.evaluation import drawing, sheets
from yolov4.config import YOLOv4Config
from yolov4.predict import to_pixels
from yolov4.targets import assign_targets


def report(
    images: tf.Tensor,
    targets: dict[str, tf.Tensor],
    config: YOLOv4Config,
    label_map: LabelMap,
    path: pathlib.Path,
) -> str:
    """Writes a picture of the batch with its boxes to `path`, a .png file. Returns a line for the log.

    Args:
        images: float32 (B, H, W, 3), in [0, 1].
        targets: the outputs of the training loader.
    """
    image_size = tuple(images.shape[1:3])
    boxes, classes = targets["boxes"].numpy(), targets["classes"].numpy()
    real = classes >= 0
    trained, trains_any = [], np.zeros_like(real)
    for head, stride in enumerate(config.strides):
        assignment = assign_targets(
            targets["boxes"],
            targets["classes"],
            config,
            head,
            grid_size=tuple(side // stride for side in image_size),
            num_classes=len(label_map.names),
        )
        trained.append(f"{np.count_nonzero(assignment.owner)} at stride {stride}")
        trains_any |= assignment.assigned.numpy()[:, : trains_any.shape[1]].any(axis=-1)
    sheet = sheets.batch_sheet(to_pixels(images).numpy(), boxes, classes, label_map.names)
    drawing.save_png(sheet, path)
    return (
        f"first batch: {len(boxes)} images, {np.count_nonzero(real)} boxes, "
        f"predictions to train: {', '.join(trained)}; "
        f"{np.count_nonzero(real & ~trains_any)} boxes without any prediction; see {path}"
    )
