"""saved_model: TensorFlow's own format, the only one that takes images of any size.

    detector = tf.saved_model.load("detector")
    found = detector.signatures["serving_default"](images=images)  # uint8 (B, h, w, 3), any one size

`resized` is the signature that the other formats have: images at their places in the network input, and
their original sizes.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from common.evaluation.exported import RESIZED
from common.training import model_metadata
from tools.exporting import export_graph
from tools.exporting.export_graph import Exportable, Outputs

ANY_SIZE = "serving_default"


def write(parts: Exportable, path: pathlib.Path, *, nms: str, metadata: dict[str, Any]) -> None:
    """Writes the directory `path`, which does not exist.

    Args:
        nms: standard or none.
        metadata: what JSON can hold, for assets.extra.
    """
    detect = export_graph.detect if nms == "standard" else export_graph.detect_raw
    module = tf.Module()
    module.model = parts.model  # so that its variables are saved
    signatures = {
        ANY_SIZE: tf.function(
            _any_size(parts, detect),
            input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, "images")],
        ),
        RESIZED: tf.function(
            lambda images, image_sizes: detect(parts, images, image_sizes),
            input_signature=export_graph.signature(parts, None),
        ),
    }
    tf.saved_model.save(module, str(path), signatures=signatures)
    folder = path / model_metadata.SAVED_MODEL_FOLDER
    folder.mkdir()
    (folder / model_metadata.FILE).write_text(json.dumps(metadata))


def _any_size(parts: Exportable, detect: Callable[..., Outputs]) -> Callable[[tf.Tensor], Outputs]:
    def function(images):
        shape = tf.shape(images)
        image_sizes = tf.repeat(shape[tf.newaxis, 1:3], shape[0], axis=0)
        return detect(parts, parts.resize(images), image_sizes)

    return function
