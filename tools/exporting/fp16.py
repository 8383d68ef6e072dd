"""FP16 for ONNX: the network's weights and arithmetic in half precision, what surrounds it in float32."""

import pathlib

import onnx


def quantize(before: pathlib.Path, after: pathlib.Path) -> None:
    """A Quantizer of onnx_file.py, which needs no images."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(before), keep_io_types=True), after)
