"""From weights to detections, for evaluation during training, eval.py and infer.py."""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from common import boxes as box_ops
from common import letterbox
from common.evaluation.evaluate import Detect
from common.training import trained
from efficientdet import postprocess
from efficientdet.config import DETECTION_FIELDS, EfficientDetConfig
from efficientdet.model import build_model
from efficientdet.model_metadata import make_metadata
from efficientdet.pipeline import to_pixels


def make_detect(model: keras.Model, config: EfficientDetConfig) -> Detect:
    """A compiled function from a batch of the evaluation loader to detections; see evaluate.predict."""
    network, to_detections = make_halves(model, config)
    return tf.function(
        lambda images, letterbox_px: to_detections(network(images), letterbox_px), reduce_retracing=True
    )


def make_halves(model: keras.Model, config: EfficientDetConfig) -> tuple[Callable, Callable]:
    """`make_detect` as two compiled functions: images -> outputs; outputs, letterbox -> detections."""
    anchors = config.anchors

    @tf.function(reduce_retracing=True)
    def network(images):
        return model(images, training=False)

    @tf.function(reduce_retracing=True)
    def to_detections(outputs, letterbox_px):
        class_logits, box_deltas = outputs
        boxes, scores, classes, _ = postprocess.detect(class_logits, box_deltas, config, anchors)
        boxes = letterbox.boxes_from_letterbox(boxes, letterbox_px[:, None], config.image_size)
        # A sum is finite only if all its terms are, and costs less than a test of each of them.
        sums = [tf.reduce_sum(output, axis=[1, 2, 3]) for output in [*class_logits, *box_deltas]]
        return box_ops.clip(boxes), scores, classes, tf.math.is_finite(tf.add_n(sums))

    return network, to_detections


APP = trained.App(
    name="efficientdet",
    config_class=EfficientDetConfig,
    detection_fields=DETECTION_FIELDS,
    build_model=build_model,
    make_metadata=make_metadata,
    make_detect=make_detect,
    to_pixels=to_pixels,
    converter="python efficientdet/automl_weights.py",
)
load_trained = functools.partial(trained.load, APP)
open_detector = functools.partial(trained.open_detector, APP)
