"""FP16 and INT8 of the network inside an ONNX file; what surrounds it stays in float32.

INT8, for ONNX Runtime and TensorRT: ranges measured on the user's images, written as Q and DQ nodes. Only
convolutions and matrix products become INT8, weights by channel, activations by tensor
(https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html). Those that give the raw
outputs do not: 256 values are too few to order boxes by their scores.
"""

import hashlib
import itertools
import json
import logging
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
import onnx

from common import atomic
from common.errors import UserError
from tools.exporting.onnx_file import NETWORK_INPUT, Quantizer

_QUANTIZED = ["Conv", "MatMul"]


def to_fp16(before: pathlib.Path, after: pathlib.Path) -> None:
    """A Quantizer of onnx_file.py that needs no images: half precision for weights and arithmetic."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(before), keep_io_types=True), after)


def make_int8(
    batches: Iterator[np.ndarray], count: int, table: pathlib.Path, *, symmetric: bool
) -> Quantizer:
    """A Quantizer of onnx_file.py.

    Args:
        batches: of network input, float32 (B, H, W, 3).
        count: how many of them.
        table: file of the measured ranges. That of the same network replaces the images, another is refused,
            and a missing one is written.
        symmetric: activations around 0, which TensorRT wants; it wastes range where they are mostly positive.
    """

    def quantize(before: pathlib.Path, after: pathlib.Path) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        class Reader(CalibrationDataReader):
            def __init__(self):
                self.inputs = ({NETWORK_INPUT: images} for images in itertools.islice(batches, count))

            def get_next(self):
                return next(self.inputs, None)

        logging.getLogger().setLevel(logging.ERROR)  # onnxruntime.quantization writes to the root
        digest = hashlib.sha256(before.read_bytes()).hexdigest()
        with tempfile.TemporaryDirectory() as folder:
            simplified, ranges = (pathlib.Path(folder) / name for name in ("simplified.onnx", "ranges.json"))
            quant_pre_process(before, simplified, skip_symbolic_shape=True)
            known = _read_table(table, digest)
            if known is not None:
                ranges.write_text(json.dumps(known))
            quantize_static(
                simplified,
                after,
                Reader(),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=_QUANTIZED,
                nodes_to_exclude=_last_nodes(onnx.load(simplified).graph),
                per_channel=True,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
                extra_options={"ActivationSymmetric": symmetric, "WeightSymmetric": True},
                calibration_cache_path=ranges,
            )
            if known is None:
                content = {"network_sha256": digest, "ranges": json.loads(ranges.read_text())}
                atomic.write_bytes(table, json.dumps(content).encode())

    return quantize


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


def _read_table(table: pathlib.Path, digest: str) -> dict | None:
    """The ranges in the file; None where there is no file."""
    if not table.exists():
        return None
    try:
        content = json.loads(table.read_text())
        is_same, ranges = content["network_sha256"] == digest, content["ranges"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--calibration_table={table} is not a calibration table: name another file"
        ) from error
    if not is_same:
        raise UserError(
            f"--calibration_table={table} was measured for another network, size or opset: name another "
            "file, or remove it to measure anew"
        )
    return ranges
