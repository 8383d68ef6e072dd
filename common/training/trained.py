"""A trained network: its weights in a model, and the function that detects with it."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from common import boxes as box_ops
from common import hparams, letterbox
from common.errors import UserError
from common.labels import LabelMap
from common.nms import Detections
from common.progress import log
from common.training import model_metadata, weights

if TYPE_CHECKING:
    from common.evaluation.evaluate import Detect


@dataclasses.dataclass(frozen=True)
class App:
    """The parts of an app that a trained network needs.

    Attributes:
        name: as metadata hold it.
        config_class: the app's config, a dataclass.
        detection_fields: fields of the config that do not change what was trained.
        build_model: (model name, number of classes, config) -> the network.
        make_metadata: of model_metadata.py.
        postprocess: (outputs of the network, config) -> detections in the network input.
        mean_rgb, stddev_rgb: what the loaders subtract from pixels 0..255, and then divide by.
        converter: the command that makes a weights file of published weights.
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

    def make_detect(self, model: keras.Model, config: Any) -> "Detect":
        """A compiled function from a batch of the evaluation loader to detections; see evaluate.Detect."""
        network, to_detections = self.make_halves(model, config)
        return tf.function(
            lambda images, letterbox_px: to_detections(network(images), letterbox_px), reduce_retracing=True
        )

    def make_halves(self, model: keras.Model, config: Any) -> tuple[Callable, Callable]:
        """`make_detect` as two compiled functions: images -> outputs; outputs, letterbox -> detections."""

        @tf.function(reduce_retracing=True)
        def network(images: tf.Tensor) -> Any:
            return model(images, training=False)

        @tf.function(reduce_retracing=True)
        def to_detections(outputs: Any, letterbox_px: tf.Tensor) -> tuple[tf.Tensor, ...]:
            boxes, scores, classes, _ = self.postprocess(outputs, config)
            boxes = letterbox.boxes_from_letterbox(boxes, letterbox_px[:, None], config.image_size)
            # A sum is finite only if all its terms are, and costs less than a test of each of them.
            floats = [tf.cast(output, tf.float32) for output in tf.nest.flatten(outputs)]
            sums = [tf.reduce_sum(output, axis=list(range(1, output.shape.rank))) for output in floats]
            return box_ops.clip(boxes), scores, classes, tf.math.is_finite(tf.add_n(sums))

        return network, to_detections

    def to_pixels(self, images: tf.Tensor) -> tf.Tensor:
        """Images of the loaders, normalised float (..., 3) -> uint8 RGB."""
        pixels = tf.round(tf.cast(images, tf.float32) * self.stddev_rgb + self.mean_rgb)
        return tf.cast(tf.clip_by_value(pixels, 0.0, 255.0), tf.uint8)

    def load(
        self, path: str | None, image_size: str | None = None, spec: str | None = None, **defaults: Any
    ) -> tuple[keras.Model, Any, LabelMap, pathlib.Path]:
        """The model that weights were saved from, with them in it.

        Args:
            path: a `.weights.h5` file of this project, or a run directory.
            image_size: N or HxW to run it at another size.
            spec: --hparams of the detection, for example `nms_method=hard`; what was trained cannot change.
            defaults: fields of the config to use instead of the trained ones where `spec` has none.

        Returns:
            The model, its config, the trained classes, and the weights file that was read.

        Raises:
            UserError: the file is missing, damaged or not of this app, or cannot be changed like this.
        """
        if not path:
            raise UserError("--weights is missing: name a .weights.h5 file or a run directory")
        file = weights.find(path)
        if file.suffix != ".h5":
            raise UserError(f"{file} is not a .weights.h5 file; convert other weights with {self.converter}")
        metadata = weights.read_metadata(file)
        config = hparams.replace(self.read_config(metadata, file), defaults)
        metadata["config"] |= defaults  # they are not differences to report
        if image_size:
            config = hparams.replace(config, {"image_size": image_size})
        config = hparams.override(config, spec, only=self.detection_fields)
        model = self.build_model(config.model_name, metadata["num_classes"], config=config)
        weights.load(model, file)
        label_map = LabelMap.from_json(metadata["label_map"])
        now = self.make_metadata(config, label_map, metadata["num_classes"])
        changed = model_metadata.differences(metadata, now)
        if changed:
            log("\n  ".join([f"{file} runs otherwise than it was saved:", *changed]))
        return model, config, label_map, file

    def read_config(self, metadata: Mapping[str, Any], file: pathlib.Path) -> Any:
        """The config that a file was saved with; UserError where another app saved it."""
        if metadata.get("app") != self.name:
            raise UserError(f"{file} was saved by {metadata.get('app')!r}, not by {self.name}")
        return hparams.from_json(self.config_class, metadata["config"])
