"""Splits a trained YOLOv4 into the parts that common/export/export_graph.py joins and exports."""

import keras
import tensorflow as tf

from common import letterbox
from common.data import tf_readers
from common.export.export_graph import Exportable
from common.export.triton_repository import Placement
from yolov4 import postprocess, tf_pipeline
from yolov4.config import FILL, YOLOv4Config


def make_exportable(model: keras.Model, config: YOLOv4Config) -> Exportable:
    """Returns the parts of `model`. Images are preprocessed as in eval.py with --pipeline_type=tensorflow."""
    image_size = config.image_size  # numbers, because a tensor would become an input of the exported graph

    def place(image_sizes: tf.Tensor) -> tf.Tensor:
        if config.letterbox:
            height, width = image_sizes[:, 0], image_sizes[:, 1]
            fitted = letterbox.fit(height, width, config.image_size, tf.minimum, tf.maximum)
            sides = tf.stack(fitted, axis=1)
        else:
            sides = tf.zeros_like(image_sizes) + image_size
        return tf.concat([(image_size - sides) // 2, sides], axis=1)

    def resize(images: tf.Tensor) -> tf.Tensor:
        size = tf.shape(images)[1:3]
        place = tf_pipeline.whole_image(size, tf.constant(image_size), config.letterbox).place
        images = tf_readers.resize(images, place[2:], config.antialias)
        return tf.image.pad_to_bounding_box(images, place[0], place[1], *config.image_size)

    def normalize(images: tf.Tensor, inside: tf.Tensor) -> tf.Tensor:
        return tf.where(inside, tf.cast(images, tf.float32), FILL) / 255

    return Exportable(
        model=model,
        image_size=config.image_size,
        num_classes=model.output[0].shape[-1] - 5,
        score_threshold=config.score_threshold,
        nms_iou=config.nms_iou,
        nms_class_agnostic=config.nms_class_agnostic,
        max_detections=config.max_detections,
        resize=resize,
        place=place,
        normalize=normalize,
        network=lambda images: model(images, training=False),
        candidates=lambda raw: postprocess.candidates(raw, config),
        decode_all=lambda raw: postprocess.decode_all(raw, config),
    )


def placement(config: YOLOv4Config) -> Placement:
    """Returns where preprocessing places an image in the network input."""
    return Placement(keep_aspect=config.letterbox, centered=True, antialias=config.antialias)
