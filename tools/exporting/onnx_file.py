"""ONNX: one .onnx file for ONNX Runtime, TensorRT and whoever else reads it, with any batch size."""

import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import onnx
import tensorflow as tf

from common.training import model_metadata
from tools.exporting import export_graph, onnx_graphs, onnx_nms
from tools.exporting.export_graph import Exportable

_NMS = {
    "standard": onnx_nms.standard,
    "efficientnms_trt": onnx_nms.efficientnms_trt,
    "none": onnx_nms.none,
}
NETWORK_INPUT = "network_input"

Quantizer = Callable[[pathlib.Path, pathlib.Path], None]  # (float network, where the quantised one goes)


def write(
    parts: Exportable,
    path: pathlib.Path,
    *,
    nms: str,
    opset: int,
    metadata: dict[str, Any],
    quantizer: Quantizer | None = None,
) -> None:
    """Writes `path`.

    Args:
        nms: standard, efficientnms_trt or none.
        opset: of ONNX.
        metadata: what JSON can hold, for metadata_props.
        quantizer: turns the network, and nothing before or after it, into one of fewer bits.
    """
    images, image_sizes = export_graph.signature(parts, None)
    to_input = onnx_graphs.convert(
        lambda *given: [export_graph.network_input(parts, *given)],
        [images, image_sizes],
        [NETWORK_INPUT],
        opset,
    )
    network, raw = _network(parts, opset)
    if quantizer:
        network = _quantized(network, quantizer)
    rest = _NMS[nms](parts, raw, opset)
    outputs = onnx_nms.RAW_OUTPUTS if nms == "none" else onnx_nms.OUTPUTS
    model = onnx_graphs.join([to_input, network, *rest], [images.name, image_sizes.name], outputs)
    for port in [*model.graph.input, *model.graph.output]:
        port.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, {model_metadata.KEY: json.dumps(metadata)})
    path.write_bytes(model.SerializeToString())


def _network(parts: Exportable, opset: int) -> tuple[onnx.ModelProto, list[tf.TensorSpec]]:
    """The network by itself, and the specs of its outputs."""
    given = tf.TensorSpec([None, *parts.image_size, 3], tf.float32, NETWORK_INPUT)
    found = tf.function(parts.network).get_concrete_function(given).structured_outputs
    raw = [tf.TensorSpec(output.shape, output.dtype, f"raw_{i}") for i, output in enumerate(found)]
    return onnx_graphs.convert(parts.network, [given], [spec.name for spec in raw], opset), raw


def _quantized(network: onnx.ModelProto, quantizer: Quantizer) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        before, after = pathlib.Path(folder) / "float.onnx", pathlib.Path(folder) / "quantized.onnx"
        onnx.save(onnx_graphs.canonical(network), before)  # the same in every run: ranges are kept by name
        quantizer(before, after)
        return onnx.load(after)
