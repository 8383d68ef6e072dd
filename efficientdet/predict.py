"""From weights to detections: what evaluation during training, eval.py and infer.py share."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf

from common import boxes as box_ops
from common import errors, hparams, letterbox
from common.evaluation.detector import Detector, open_exported
from common.evaluation.evaluate import Detect
from common.evaluation.exported import is_exported
from common.labels import LabelMap
from common.training import model_metadata
from common.training import weights as weight_files
from efficientdet import postprocess
from efficientdet.config import DETECTION_FIELDS, EfficientDetConfig
from efficientdet.export_parts import to_pixels
from efficientdet.model import build_model
from efficientdet.model_metadata import make_metadata


def load_trained(
    weights: str | None, image_size: str | None = None, hparams_spec: str | None = None
) -> tuple[keras.Model, EfficientDetConfig, LabelMap, pathlib.Path]:
    """The model that `weights` was saved from, with them in it.

    Args:
        weights: a `.weights.h5` file of ours, or a run directory.
        image_size: N or HxW to run it at another size.
        hparams_spec: how to detect, for example `nms_method=hard`; what was trained cannot change any more.

    Returns:
        model, config, label map, and the file that was read.
    """
    if not weights:
        raise errors.UserError("--weights is missing: name a .weights.h5 file or a run directory")
    file = weight_files.find(weights)
    metadata = weight_files.read_metadata(file)
    if metadata.get("app") != "efficientdet":
        raise errors.UserError(f"weights {file} were saved by {metadata.get('app')!r}, not by efficientdet")
    config = hparams.from_json(EfficientDetConfig, metadata["config"])
    if image_size:
        config = hparams.replace(config, {"image_size": hparams.parse_image_size(image_size)})
    config = hparams.override(config, hparams_spec, only=DETECTION_FIELDS)
    model = build_model(config.model_name, metadata["num_classes"], config=config)
    weight_files.load(model, file)
    label_map = LabelMap.from_json(metadata["label_map"])
    now = make_metadata(config, label_map, metadata["num_classes"])
    model_metadata.explain(metadata, now, f"{file} runs otherwise than it was saved")
    return model, config, label_map, file


def open_detector(
    weights: str | None,
    image_size: str | None = None,
    hparams_spec: str | None = None,
) -> Detector:
    """Whatever detects, ready for the evaluation loader.

    Args:
        weights: a `.weights.h5` file of ours or a run directory; or what export.py wrote: a saved_model
            directory, an .onnx or a .tflite file.
        image_size: N or HxW to run it at another size.
        hparams_spec: how to detect; of an exported file neither this nor the size can change any more.

    Raises:
        UserError: there is no such file, it is damaged or not of this app, or cannot be changed like this.
    """
    if weights and is_exported(weights):
        return open_exported(
            pathlib.Path(weights),
            app="efficientdet",
            config_class=EfficientDetConfig,
            to_pixels=to_pixels,
            image_size=image_size,
            hparams_spec=hparams_spec,
        )
    model, config, label_map, file = load_trained(weights, image_size, hparams_spec)
    return Detector(make_detect(model, config), config, label_map, file, weight_files.read_metadata(file))


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
        # a sum is finite only if all its terms are, and costs less than asking each of them
        sums = [tf.reduce_sum(output, axis=[1, 2, 3]) for output in [*class_logits, *box_deltas]]
        return box_ops.clip(boxes), scores, classes, tf.math.is_finite(tf.add_n(sums))

    return network, to_detections
