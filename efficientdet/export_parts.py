"""Splits a trained EfficientDet into the parts that common/export/export_graph.py joins and exports."""

import keras
import tensorflow as tf

from common import letterbox
from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.data import tf_readers
from common.export.export_graph import Exportable
from common.export.triton_repository import Placement
from efficientdet import postprocess, tf_pipeline
from efficientdet.config import EfficientDetConfig


def make_exportable(model: keras.Model, config: EfficientDetConfig) -> Exportable:
    """Returns the parts of `model`. Images are preprocessed as in eval.py with --pipeline_type=tensorflow."""
    height, width = config.image_size

    def place(image_sizes: tf.Tensor) -> tf.Tensor:
        sides = letterbox.fit(image_sizes[:, 0], image_sizes[:, 1], config.image_size, tf.minimum, tf.maximum)
        top_left = tf.zeros_like(image_sizes)
        return tf.concat([top_left, tf.stack(sides, axis=1)], axis=1)

    def resize(images: tf.Tensor) -> tf.Tensor:
        size = tf.cast(tf.shape(images)[1:3], tf.float32)
        crop = tf_pipeline.whole_image(size, config.image_size)
        images = tf_readers.resize(images, crop.size, config.antialias)
        return tf.image.pad_to_bounding_box(images, 0, 0, height, width)

    def normalize(images: tf.Tensor, inside: tf.Tensor) -> tf.Tensor:
        normalized = (tf.cast(images, tf.float32) - IMAGENET_MEAN) / IMAGENET_STD
        return tf.where(inside, normalized, 0.0)

    def network(images: tf.Tensor) -> list[tf.Tensor]:
        class_logits, box_deltas = model(images, training=False)
        return [*class_logits, *box_deltas]

    def halves(raw: list[tf.Tensor]) -> postprocess.Outputs:
        levels = len(raw) // 2
        return raw[:levels], raw[levels:]

    return Exportable(
        model=model,
        image_size=config.image_size,
        num_classes=model.output[0][0].shape[-1] // config.anchors_per_location,
        score_threshold=config.score_threshold,
        nms_iou=config.nms_iou,
        nms_class_agnostic=config.nms_class_agnostic,
        max_detections=config.max_detections,
        resize=resize,
        place=place,
        normalize=normalize,
        network=network,
        candidates=lambda raw: postprocess.candidates(halves(raw), config),
        decode_all=lambda raw: postprocess.decode_all(halves(raw), config),
    )


def placement(config: EfficientDetConfig) -> Placement:
    """Returns where preprocessing places an image in the network input."""
    return Placement(keep_aspect=True, centered=False, antialias=config.antialias)
