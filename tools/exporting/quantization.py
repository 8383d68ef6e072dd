"""FP16 and INT8 of the network inside an ONNX file; what surrounds it stays in float32.

INT8, for ONNX Runtime and TensorRT: ranges measured on the user's images, written as Q and DQ nodes. Only
convolutions and matrix products become INT8, weights by channel, activations by tensor
(https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html). Those that give the raw
outputs do not: 256 values are too few to order boxes by their scores.
"""

import logging
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
import onnx

NETWORK_INPUT = "network_input"
_QUANTIZED = ["Conv", "MatMul"]


def to_fp16(network: onnx.ModelProto) -> onnx.ModelProto:
    """Half precision for weights and arithmetic; inputs and outputs stay in float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(network, keep_io_types=True)


def to_int8(network: onnx.ModelProto, batches: Iterator[np.ndarray], *, tensorrt: bool) -> onnx.ModelProto:
    """INT8 by ranges that are measured.

    Args:
        network: in float32; its input is NETWORK_INPUT.
        batches: of network input, float32 (B, H, W, 3).
        tensorrt: as TensorRT wants it. Activations around 0, which wastes range where most are positive.
            Biases in float32: its DequantizeLinear takes no INT32 (microsoft/onnxruntime issue 17738). What
            convolutions give to activation functions in float32.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            images = next(batches, None)
            return None if images is None else {NETWORK_INPUT: images}

    logging.getLogger().setLevel(logging.ERROR)  # onnxruntime.quantization writes to the root
    with tempfile.TemporaryDirectory() as folder:
        before, simplified, after = (pathlib.Path(folder, f"{name}.onnx") for name in ("a", "b", "c"))
        onnx.save(network, before)
        quant_pre_process(before, simplified, skip_symbolic_shape=True)
        network = onnx.load(simplified)
        _separate_biases(network.graph)
        quantize_static(
            network,
            after,
            Reader(),
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
    """Gives each convolution a bias that no other one shares.

    ONNX Runtime would make copies, and call that of `tensor_6` perhaps `tensor_69`, which may be another one.
    """
    constants = {constant.name: constant for constant in graph.initializer}
    for number, node in enumerate(graph.node):
        if node.op_type == "Conv" and len(node.input) > 2 and node.input[2] in constants:
            bias = graph.initializer.add()
            bias.CopyFrom(constants[node.input[2]])
            bias.name = node.input[2] = f"bias_of_node_{number}"


def _last_nodes(graph: onnx.GraphProto) -> list[str]:
    """Names of the convolutions and products with no other one between them and an output."""
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
