"""Writes one .onnx file for ONNX Runtime, TensorRT and other programs, for any batch size."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import onnx
import tensorflow as tf

from common.export import export_graph, onnx_graphs, onnx_nms
from common.export.export_graph import Exportable, Outputs
from common.export.quantization import NETWORK_INPUT
from common.weights import model_metadata

_NMS = {
    "standard": (onnx_nms.standard, onnx_nms.OUTPUTS),
    "efficientnms_trt": (onnx_nms.efficientnms_trt, onnx_nms.OUTPUTS),
    "none": (onnx_nms.none, onnx_nms.RAW_OUTPUTS),
}


def write(
    parts: Exportable,
    path: pathlib.Path,
    *,
    nms: str,
    metadata: dict[str, Any],
    quantize: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
) -> None:
    """Writes the ONNX file `path`.

    Args:
        nms: standard, efficientnms_trt or none.
        metadata: JSON values, which become metadata_props of the file.
        quantize: function that quantises the network, but not the parts before and after it.
    """
    images, image_sizes = export_graph.signature(parts, None)
    network_input = tf.TensorSpec([None, *parts.image_size, 3], tf.float32, NETWORK_INPUT)

    def to_input(images: tf.Tensor, image_sizes: tf.Tensor) -> Outputs:
        return {NETWORK_INPUT: export_graph.network_input(parts, images, image_sizes)}

    def run_network(images: tf.Tensor) -> Outputs:
        return {f"raw_{number:02}": output for number, output in enumerate(parts.network(images))}

    network = onnx_graphs.convert(run_network, [network_input])
    if quantize:
        network = quantize(network)
    raw = list(onnx_graphs.output_specs(run_network, [network_input]).values())
    suppress, outputs = _NMS[nms]
    model = onnx_graphs.join(
        [onnx_graphs.convert(to_input, [images, image_sizes]), network, *suppress(parts, raw)],
        [images.name, image_sizes.name],
        outputs,
    )
    for port in [*model.graph.input, *model.graph.output]:
        port.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, {model_metadata.KEY: json.dumps(metadata)})
    path.write_bytes(model.SerializeToString())
