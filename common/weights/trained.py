"""Loads a trained network, and makes the function that detects with it."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from common import boxes as box_ops
from common import hparams, letterbox
from common.data.labels import LabelMap
from common.errors import UserError
from common.layers import unfused
from common.nms import Detections
from common.progress import log
from common.weights import model_metadata
from common.weights import weight_files as weights

# The function that `App.make_detect` returns.
# Its arguments are images (B, H, W, 3) and letterbox (B, 4). It returns four tensors:
# - boxes (B, D, 4), ltrb, normalised to the original image and clipped;
# - scores (B, D);
# - classes (B, D), 0-based, -1 in the padding;
# - booleans (B,): whether all outputs of the network for this image were finite.
Detect = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class App:
    """The parts of an app that a trained network needs.

    Attributes:
        name: the name of the app in metadata.
        config_class: the app's config, a dataclass.
        detection_fields: fields of the config that affect only detection, not training.
        build_model: (model name, number of classes, config) -> the network.
        make_metadata: the function in the app's model_metadata.py.
        postprocess: (outputs of the network, config) -> detections, normalised to the network input.
        mean_rgb, stddev_rgb: loaders normalise pixels 0..255 to (pixel - mean_rgb) / stddev_rgb.
        converter: the command that converts published weights to a weights file.
    """

    name: str
    config_class: type
    detection_fields: Collection[str]
    build_model: Callable[..., keras.Model]
    make_metadata: Callable[..., dict[str, Any]]
    postprocess: Callable[[Any, Any], Detections]
    mean_rgb: Sequence[float]
    stddev_rgb: Sequence[float]
    converter: str

    def make_detect(self, model: keras.Model, config: Any) -> Detect:
        """Returns a compiled detection function."""

        @unfused
        @tf.function(reduce_retracing=True, autograph=False)
        def detect(images: tf.Tensor, letterbox_px: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return self._to_detections(model(images, training=False), letterbox_px, config)

        return detect

    def make_halves(self, model: keras.Model, config: Any) -> tuple[Callable, Callable]:
        """Returns `make_detect` in two parts: images -> outputs, and (outputs, letterbox) -> detections."""

        @unfused
        @tf.function(reduce_retracing=True, autograph=False)
        def network(images: tf.Tensor) -> Any:
            return model(images, training=False)

        @tf.function(reduce_retracing=True, autograph=False)
        def to_detections(outputs: Any, letterbox_px: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return self._to_detections(outputs, letterbox_px, config)

        return network, to_detections

    def _to_detections(self, outputs: Any, letterbox_px: tf.Tensor, config: Any) -> tuple[tf.Tensor, ...]:
        boxes, scores, classes, _ = self.postprocess(outputs, config)
        boxes = letterbox.boxes_from_letterbox(boxes, letterbox_px[:, None], config.image_size)
        # A sum is finite only if all its terms are finite.
        floats = [tf.cast(output, tf.float32) for output in tf.nest.flatten(outputs)]
        sums = [tf.reduce_sum(output, axis=list(range(1, output.shape.rank))) for output in floats]
        return box_ops.clip(boxes), scores, classes, tf.math.is_finite(tf.add_n(sums))

    def to_pixels(self, images: tf.Tensor) -> tf.Tensor:
        """Converts normalised float images (..., 3), as loaders return them, to uint8 RGB."""
        pixels = tf.round(tf.cast(images, tf.float32) * self.stddev_rgb + self.mean_rgb)
        return tf.cast(tf.clip_by_value(pixels, 0.0, 255.0), tf.uint8)

    def load(
        self, path: str | None, image_size: str | None = None, spec: str | None = None, **defaults: Any
    ) -> tuple[keras.Model, Any, LabelMap, pathlib.Path]:
        """Builds the model that a weights file belongs to, and loads the weights.

        Args:
            path: a `.weights.h5` file of this project, or a run directory.
            image_size: N or HxW, to run the model at another size.
            spec: --hparams for detection, such as `nms_method=hard`.
            defaults: values that replace those of the saved config, unless `spec` sets the field.

        Returns:
            The model, its config, the trained classes, and the weights file that was read.

        Raises:
            UserError: the file is missing, damaged or of another app; `image_size` or `spec` cannot be used.
        """
        if not path:
            raise UserError("--weights is missing: give a .weights.h5 file or a run directory")
        file = weights.find(path)
        if file.suffix != ".h5":
            raise UserError(f"{file} is not a .weights.h5 file; convert other weights with {self.converter}")
        metadata = weights.read_metadata(file)
        config = hparams.replace(self.read_config(metadata, file), defaults)
        metadata["config"] |= defaults  # so that `defaults` are not reported as differences
        if image_size:
            config = hparams.replace(config, {"image_size": image_size})
        config = hparams.override(config, spec, only=self.detection_fields)
        model = self.build_model(config.model_name, metadata["num_classes"], config=config)
        weights.load(model, file)
        label_map = LabelMap.from_json(metadata["label_map"])
        now = self.make_metadata(config, label_map, metadata["num_classes"])
        if changed := model_metadata.differences(metadata, now):
            log("\n  ".join([f"{file} runs with other settings than it was saved with:", *changed]))
        return model, config, label_map, file

    def read_config(self, metadata: Mapping[str, Any], file: pathlib.Path) -> Any:
        """Returns the config of a file; UserError if another app saved the file."""
        if metadata.get("app") != self.name:
            raise UserError(f"{file} was saved by {metadata.get('app')!r}, not by {self.name}")
        return hparams.from_json(self.config_class, metadata["config"])
