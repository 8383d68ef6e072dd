"""The parts of an exported detector, and the whole detector, built of these parts in TensorFlow.

    images, image_sizes -> input -> network -> decoding -> suppression -> boxes in pixels of the originals

Each app makes an `Exportable`. Suppression is the hard NMS of common/nms.py.
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from common import boxes as box_ops
from common import letterbox, nms

Outputs = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Exportable:
    """The trained network of one app and the functions that exported files are made of. Boxes are ltrb.

    Attributes:
        model: the network with its variables.
        image_size: (height, width) of the network input.
        num_classes: C.
        score_threshold, nms_iou, nms_class_agnostic, max_detections: parameters of NMS.
        resize: images of one size, uint8 (B, h, w, 3) -> resized and padded images, uint8 (B, H, W, 3).
        place: heights and widths of original images, int32 (B, 2) -> their positions in the network input,
            int32 (B, 4): top, left, height, width.
        normalize: function (images, inside) -> input of the network, float32 (B, H, W, 3). `images` are the
            resized images. `inside`, bool (B, H, W, 1), is false in the padding.
        network: result of `normalize` -> the raw outputs.
        candidates: raw outputs -> boxes float32 (B, K, 4), scores float32 (B, K) and classes int32 (B, K) of
            the best K predictions, in descending order. Boxes are normalised to the network input.
        decode_all: raw outputs -> boxes float32 (B, N, 4) and scores float32 (B, N, C) of all predictions.
    """

    model: keras.Model
    image_size: tuple[int, int]
    num_classes: int
    score_threshold: float
    nms_iou: float
    nms_class_agnostic: bool
    max_detections: int
    resize: Callable[[tf.Tensor], tf.Tensor]
    place: Callable[[tf.Tensor], tf.Tensor]
    normalize: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    network: Callable[[tf.Tensor], list[tf.Tensor]]
    candidates: Callable[[list[tf.Tensor]], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]
    decode_all: Callable[[list[tf.Tensor]], tuple[tf.Tensor, tf.Tensor]]


def network_input(parts: Exportable, images: tf.Tensor, image_sizes: tf.Tensor) -> tf.Tensor:
    """Normalises resized images. The padding gets the same values as in training."""
    places = parts.place(image_sizes)[:, tf.newaxis]  # (B, 1, 4)
    top, left, height, width = tf.unstack(places, axis=-1)
    rows, columns = tf.range(parts.image_size[0])[tf.newaxis], tf.range(parts.image_size[1])[tf.newaxis]
    in_rows = (rows >= top) & (rows < top + height)  # (B, H)
    in_columns = (columns >= left) & (columns < left + width)  # (B, W)
    inside = in_rows[:, :, tf.newaxis, tf.newaxis] & in_columns[:, tf.newaxis, :, tf.newaxis]
    return parts.normalize(images, inside)


def to_pixels(parts: Exportable, boxes: tf.Tensor, image_sizes: tf.Tensor) -> tf.Tensor:
    """Converts boxes (B, N, 4) from the network input to pixels of the original images, and clips them."""
    places = parts.place(image_sizes)[:, tf.newaxis]
    boxes = box_ops.clip(letterbox.boxes_from_letterbox(boxes, places, parts.image_size))
    return boxes * tf.cast(tf.gather(image_sizes, [1, 0, 1, 0], axis=1), tf.float32)[:, tf.newaxis]


def name_outputs(parts: Exportable, detections: nms.Detections, image_sizes: tf.Tensor) -> Outputs:
    is_detection = (detections.classes >= 0)[..., tf.newaxis]
    return {
        "boxes": tf.where(is_detection, to_pixels(parts, detections.boxes, image_sizes), 0.0),
        "scores": detections.scores,
        "classes": detections.classes,
        "count": detections.count,
    }


def detect(parts: Exportable, images: tf.Tensor, image_sizes: tf.Tensor) -> Outputs:
    """Runs the whole detector with hard NMS.

    Args:
        images: resized and padded images, uint8 (B, H, W, 3), as `resize` returns them.
        image_sizes: int32 (B, 2), heights and widths of the original images.

    Returns:
        boxes: float32 (B, D, 4), ltrb, in pixels of the original image; 0 in the padding.
        scores: float32 (B, D), the best first; 0 in the padding.
        classes: int32 (B, D), 0-based; -1 in the padding.
        count: int32 (B,), number of detections without the padding.
    """
    raw = parts.network(network_input(parts, images, image_sizes))
    boxes, scores, classes = parts.candidates(raw)
    detections = nms.suppress(
        boxes,
        scores,
        classes,
        num_classes=parts.num_classes,
        method="hard",
        max_detections=parts.max_detections,
        score_threshold=parts.score_threshold,
        class_agnostic=parts.nms_class_agnostic,
        iou_threshold=parts.nms_iou,
    )
    return name_outputs(parts, detections, image_sizes)


def name_raw_outputs(parts: Exportable, raw: list[tf.Tensor], image_sizes: tf.Tensor) -> Outputs:
    boxes, scores = parts.decode_all(raw)
    return {"boxes": to_pixels(parts, boxes, image_sizes), "scores": scores}


def detect_raw(parts: Exportable, images: tf.Tensor, image_sizes: tf.Tensor) -> Outputs:
    """Runs the detector without NMS; returns boxes (B, N, 4) as in `detect`, and scores (B, N, C)."""
    raw = parts.network(network_input(parts, images, image_sizes))
    return name_raw_outputs(parts, raw, image_sizes)


DETECT = {"standard": detect, "none": detect_raw}


def signature(parts: Exportable, batch_size: int | None) -> list[tf.TensorSpec]:
    return [
        tf.TensorSpec([batch_size, *parts.image_size, 3], tf.uint8, name="images"),
        tf.TensorSpec([batch_size, 2], tf.int32, name="image_sizes"),
    ]
