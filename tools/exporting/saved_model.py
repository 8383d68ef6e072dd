"""saved_model: TensorFlow's own format, the only one that takes images of any size.

    detector = tf.saved_model.load("detector")
    found = detector.signatures["serving_default"](images=images)  # uint8 (B, h, w, 3), any one size

`resized` is the signature that the other formats have: images at their places in the network input, and
their original sizes.
"""

import pathlib
from collections.abc import Callable

import tensorflow as tf

from common.training import metadata_checksum
from common.training.metadata_files import FILE, SAVED_MODEL_FOLDER
from tools.exporting import export_graph as parts_lib
from tools.exporting.export_graph import Exportable, Outputs

ANY_SIZE = "serving_default"
RESIZED = "resized"


def write(parts: Exportable, path: pathlib.Path, *, nms: str, passport: str) -> None:
    """Writes the directory `path`, which does not exist.

    Args:
        nms: standard or none.
        passport: JSON text, for assets.extra.
    """
    detect = parts_lib.detect if nms == "standard" else parts_lib.detect_raw
    module = tf.Module()
    module.model = parts.model  # so that its variables are saved
    signatures = {
        ANY_SIZE: tf.function(
            _any_size(parts, detect),
            input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, "images")],
        ),
        RESIZED: tf.function(
            lambda images, image_sizes: detect(parts, images, image_sizes),
            input_signature=parts_lib.signature(parts, None),
        ),
    }
    tf.saved_model.save(module, str(path), signatures=signatures)
    (path / SAVED_MODEL_FOLDER).mkdir()
    body = metadata_checksum.directory_body(path, SAVED_MODEL_FOLDER)
    (path / SAVED_MODEL_FOLDER / FILE).write_text(metadata_checksum.seal(passport, body))


def _any_size(parts: Exportable, detect: Callable[..., Outputs]) -> Callable[[tf.Tensor], Outputs]:
    def function(images):
        shape = tf.shape(images)
        image_sizes = tf.repeat(shape[tf.newaxis, 1:3], shape[0], axis=0)
        return detect(parts, parts.resize(images), image_sizes)

    return function
