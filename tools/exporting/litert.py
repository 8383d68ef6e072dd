"""LiteRT (TensorFlow Lite): one .tflite file for phones and small boards, one image at a time.

Quantised (https://ai.google.dev/edge/litert/models/post_training_quantization): fp16 stores the weights in
half the bytes; int8 stores them in a quarter and multiplies by 8-bit activations, whose range it takes from
each image (dynamic range), so that it needs no calibration, and decoding stays in float.
"""

import json
import pathlib
import tempfile
import zipfile
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from common.training import model_metadata
from tools.exporting import export_graph
from tools.exporting.export_graph import Exportable


def write(
    parts: Exportable, path: pathlib.Path, *, nms: str, quantize: str, metadata: dict[str, Any]
) -> None:
    """Writes `path`.

    Args:
        nms: standard or none.
        quantize: none, fp16 or int8.
        metadata: what JSON can hold, for the archive at the file's end.
    """
    detect = export_graph.detect if nms == "standard" else export_graph.detect_raw
    specs = export_graph.signature(parts, 1)
    # The converter leaves Keras' variables out, so they become constants before, which loses the names.
    whole = tf.function(
        lambda images, image_sizes: detect(parts, images, image_sizes), input_signature=specs
    ).get_concrete_function()
    names = sorted(whole.structured_outputs)
    frozen = convert_variables_to_constants_v2(whole)
    function = tf.function(
        lambda images, image_sizes: dict(zip(names, frozen(images, image_sizes), strict=True)),
        input_signature=specs,
    ).get_concrete_function()
    with tempfile.TemporaryDirectory() as folder:  # of a bare function it would not keep the names either
        tf.saved_model.save(
            tf.Module(),
            folder,
            signatures=function,
            options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
        )
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        if quantize != "none":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if quantize == "fp16":
            converter.target_spec.supported_types = [tf.float16]
        path.write_bytes(converter.convert())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(model_metadata.FILE, json.dumps(metadata))
