"""Shows the first augmented batch of a run."""

import pathlib

import tensorflow as tf

from common.data.labels import LabelMap
from common.evaluation import drawing, sheets
from efficientdet.predict import to_pixels


def report(images: tf.Tensor, targets: dict[str, tf.Tensor], label_map: LabelMap, path: pathlib.Path) -> str:
    """Writes a picture of the batch with its boxes to `path`, a .png file. Returns a line for the log.

    Args:
        images: float32 (B, H, W, 3), normalised.
        targets: the outputs of the training loader.
    """
    boxes, classes = targets["boxes"].numpy(), targets["classes"].numpy()
    sheet = sheets.batch_sheet(to_pixels(images).numpy(), boxes, classes, label_map.names)
    drawing.save_png(sheet, path)
    return (
        f"first batch: {len(boxes)} images, {int((classes >= 0).sum())} boxes, "
        f"{int(tf.reduce_sum(targets['num_positives']))} anchors matched by IoU; see {path}"
    )
