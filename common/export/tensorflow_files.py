"""Writes saved_model, TensorFlow's own format, and LiteRT (TensorFlow Lite).

A saved_model takes images of any size:

    detector = tf.saved_model.load("detector")
    found = detector.signatures["serving_default"](images=images)  # uint8 (B, h, w, 3)

Its second signature, `resized`, has the inputs of the other formats.

LiteRT is one .tflite file for phones and small boards. It takes one image at a time. Its quantisation
(https://ai.google.dev/edge/litert/models/post_training_quantization) needs no calibration: int8 measures the
range of the activations on each image.
"""

import json
import pathlib
import tempfile
import zipfile
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from common.evaluation.exported import RESIZED
from common.export.export_graph import DETECT, Exportable, Outputs, signature
from common.weights import model_metadata

ANY_SIZE = "serving_default"


def write_saved_model(parts: Exportable, path: pathlib.Path, *, nms: str, metadata: dict[str, Any]) -> None:
    """Writes a saved_model into the empty directory `path`.

    Args:
        nms: standard or none.
        metadata: JSON values for a file in assets.extra.
    """
    detect = DETECT[nms]

    def of_any_size(images: tf.Tensor) -> Outputs:
        shape = tf.shape(images)
        image_sizes = tf.repeat(shape[tf.newaxis, 1:3], shape[0], axis=0)
        return detect(parts, parts.resize(images), image_sizes)

    any_size = [tf.TensorSpec([None, None, None, 3], tf.uint8, "images")]
    module = tf.Module()
    module.model = parts.model  # so that its variables are saved
    signatures = {
        ANY_SIZE: tf.function(of_any_size, input_signature=any_size),
        RESIZED: tf.function(
            lambda images, image_sizes: detect(parts, images, image_sizes),
            input_signature=signature(parts, None),
        ),
    }
    tf.saved_model.save(module, str(path), signatures=signatures)
    folder = path / model_metadata.SAVED_MODEL_FOLDER
    folder.mkdir()
    (folder / model_metadata.FILE).write_text(json.dumps(metadata))


def write_litert(
    parts: Exportable, path: pathlib.Path, *, nms: str, metadata: dict[str, Any], quantize: str
) -> None:
    """Writes the .tflite file `path`.

    Args:
        nms: standard or none.
        metadata: JSON values for the zip archive at the end of the file.
        quantize: none, fp16 or int8.
    """
    specs = signature(parts, 1)
    # The converter leaves out the variables of a Keras model, so they are made constants first.
    detector = tf.function(
        lambda images, image_sizes: DETECT[nms](parts, images, image_sizes), input_signature=specs
    ).get_concrete_function()
    names = sorted(detector.structured_outputs)
    frozen = convert_variables_to_constants_v2(detector)
    function = tf.function(
        lambda images, image_sizes: dict(zip(names, frozen(images, image_sizes), strict=True)),
        input_signature=specs,
    ).get_concrete_function()
    with tempfile.TemporaryDirectory() as folder:
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(tf.Module(), folder, signatures=function, options=options)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        if quantize != "none":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if quantize == "fp16":
            converter.target_spec.supported_types = [tf.float16]
        path.write_bytes(converter.convert())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(model_metadata.FILE, json.dumps(metadata))
