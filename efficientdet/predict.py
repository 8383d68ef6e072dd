"""From weights to detections, for evaluation during training, eval.py and infer.py."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf

from common import boxes as box_ops
from common import letterbox
from common.errors import UserError
from common.evaluation.detector import Detector, change_config, open_exported, read_config
from common.evaluation.evaluate import Detect
from common.evaluation.exported import is_exported
from common.labels import LabelMap
from common.training import model_metadata
from common.training import weights as weight_files
from efficientdet import postprocess
from efficientdet.config import DETECTION_FIELDS, EfficientDetConfig
from efficientdet.model import build_model
from efficientdet.model_metadata import make_metadata
from efficientdet.pipeline import MEAN_RGB, STDDEV_RGB


def load_trained(
    weights: str | None, image_size: str | None = None, hparams_spec: str | None = None
) -> tuple[keras.Model, EfficientDetConfig, LabelMap, pathlib.Path]:
    """The model that `weights` was saved from, with them in it.

    Args:
        weights: a `.weights.h5` file of this project, or a run directory.
        image_size: N or HxW to run it at another size.
        hparams_spec: how to detect, for example `nms_method=hard`; what was trained cannot change any more.

    Returns:
        model, config, label map, and the file that was read.
    """
    if not weights:
        raise UserError("--weights is missing: name a .weights.h5 file or a run directory")
    file = weight_files.find(weights)
    metadata = weight_files.read_metadata(file)
    config = read_config(metadata, file, "efficientdet", EfficientDetConfig)
    config = change_config(config, image_size, hparams_spec, DETECTION_FIELDS)
    model = build_model(config.model_name, metadata["num_classes"], config=config)
    weight_files.load(model, file)
    label_map = LabelMap.from_json(metadata["label_map"])
    now = make_metadata(config, label_map, metadata["num_classes"])
    model_metadata.explain(metadata, now, f"{file} runs otherwise than it was saved")
    return model, config, label_map, file


def open_detector(
    weights: str | None, image_size: str | None = None, hparams_spec: str | None = None
) -> Detector:
    """A detector from weights or from an exported file, ready for the evaluation loader.

    Args:
        weights: a `.weights.h5` file of this project or a run directory; or what export.py wrote: a
            saved_model directory, an .onnx or a .tflite file.
        image_size: N or HxW to run it at another size.
        hparams_spec: how to detect; of an exported file neither this nor the size can change any more.

    Raises:
        UserError: there is no such file, it is damaged or not of this app, or cannot be changed like this.
    """
    if weights and is_exported(weights):
        file = pathlib.Path(weights)
        metadata = model_metadata.read(file)
        config = read_config(metadata, file, "efficientdet", EfficientDetConfig)
        return open_exported(file, metadata, config, to_pixels, image_size, hparams_spec)
    model, config, label_map, file = load_trained(weights, image_size, hparams_spec)
    return Detector(make_detect(model, config), config, label_map, file)


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


def to_pixels(images: tf.Tensor) -> tf.Tensor:
    """Normalised float images (..., 3) -> uint8 RGB; their padding becomes the mean colour."""
    pixels = tf.round(tf.cast(images, tf.float32) * STDDEV_RGB + MEAN_RGB)
    return tf.cast(tf.clip_by_value(pixels, 0.0, 255.0), tf.uint8)
