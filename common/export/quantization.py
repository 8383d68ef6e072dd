"""Quantises the network inside an ONNX file to FP16 or INT8.

For INT8, the ranges of values are measured on the user's images. Only convolutions and matrix products become
INT8. Each channel of weights and each tensor of activations has one range
(https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html). The layers that compute the
raw outputs stay in float32, because 256 different scores are too few to sort boxes by them.
"""

import logging
import pathlib
import tempfile
import types
from collections.abc import Iterator

import numpy as np
import onnx

NETWORK_INPUT = "network_input"
_QUANTIZED = ["Conv", "MatMul"]


def to_fp16(network: onnx.ModelProto) -> onnx.ModelProto:
    """Converts weights and arithmetic to half precision; inputs and outputs stay in float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    network = convert_float_to_float16(network, keep_io_types=True)
    OnnxModel.graph_topological_sort(network.graph)
    return network


def to_int8(network: onnx.ModelProto, batches: Iterator[np.ndarray], *, tensorrt: bool) -> onnx.ModelProto:
    """Converts the network to INT8, with ranges that are measured on `batches`.

    Args:
        network: the float32 network; its input is NETWORK_INPUT.
        batches: batches of network input, float32 (B, H, W, 3).
        tensorrt: whether the result is for TensorRT. TensorRT needs symmetric ranges of activations, and
            biases in float32 (microsoft/onnxruntime issue 17738).
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    inputs = ({NETWORK_INPUT: images} for images in batches)
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        before, simplified, after = (pathlib.Path(folder, f"{name}.onnx") for name in ("a", "b", "c"))
        onnx.save(network, before)
        quant_pre_process(before, simplified, skip_symbolic_shape=True)
        network = onnx.load(simplified)
        _separate_biases(network.graph)
        quantize_static(
            network,
            after,
            types.SimpleNamespace(get_next=lambda: next(inputs, None)),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTIZED,
            nodes_to_exclude=_last_nodes(network.graph),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            extra_options={
                "ActivationSymmetric": tensorrt,
                "WeightSymmetric": True,
                "QuantizeBias": not tensorrt,
                "OpTypesToExcludeOutputQuantization": _QUANTIZED if tensorrt else [],
            },
        )
        return onnx.load(after)


def _separate_biases(graph: onnx.GraphProto) -> None:
    """Gives each convolution its own copy of its bias.

    ONNX Runtime would also copy shared biases, but may give a copy the name of another tensor.
    """
    constants = {constant.name: constant for constant in graph.initializer}
    for number, node in enumerate(graph.node):
        if node.op_type == "Conv" and len(node.input) > 2 and node.input[2] in constants:
            bias = graph.initializer.add()
            bias.CopyFrom(constants[node.input[2]])
            bias.name = node.input[2] = f"bias_of_node_{number}"


def _last_nodes(graph: onnx.GraphProto) -> list[str]:
    """Returns the names of the last convolution or matrix product on each path to an output."""
    makers = {name: node for node in graph.node for name in node.output}
    waiting = [port.name for port in graph.output]
    seen, last = set(), []
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        if node.op_type in _QUANTIZED:
            last.append(node.name)
        else:
            waiting.extend(node.input)
    return last
