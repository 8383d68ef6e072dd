"""Builds a TensorRT engine for the GPU of this machine from an ONNX file. This has never run on a GPU.

The code is for TensorRT 10.16. The network is strongly typed: every tensor has the type that it has in the
ONNX file. TensorRT 11 supports only such networks:
https://docs.nvidia.com/deeplearning/tensorrt/11.4.0/api/migration/tensorrt-10x-to-11x-python-api-reference.html
Convolutions in float32 run as TF32, TensorRT's default.
"""

import pathlib

from common.errors import UserError
from common.evaluation.exported import TENSORRT
from common.files import write_bytes
from common.progress import log


def trtexec(onnx_file: pathlib.Path, engine: pathlib.Path, image_size: tuple[int, int]) -> str:
    """Returns a command of TensorRT's tool trtexec that builds the same engine as `build`."""
    height, width = image_size
    shapes = [
        f"--{bound}Shapes=images:{batch}x{height}x{width}x3,image_sizes:{batch}x2"
        for bound, batch in zip(("min", "opt", "max"), _BATCHES, strict=True)
    ]
    words = ["trtexec", f"--onnx={onnx_file}", f"--saveEngine={engine}", "--stronglyTyped", "--skipInference"]
    return " ".join(words + shapes)


_BATCHES = (1, 1, 16)  # batch sizes: smallest, optimal, largest


def build(onnx_file: pathlib.Path, engine: pathlib.Path, image_size: tuple[int, int]) -> None:
    """Builds and writes the engine. Raises UserError if TensorRT is missing or rejects the ONNX file."""
    try:
        import tensorrt as trt
    except ImportError as error:
        raise UserError(
            f"TensorRT is not installed, so no engine was built: pip install {TENSORRT} and run this "
            "command again, or build the engine from the ONNX file, which is already written: "
            f"{trtexec(onnx_file, engine, image_size)}"
        ) from error
    logger = trt.Logger(trt.Logger.WARNING)
    trt.init_libnvinfer_plugins(logger, "")
    builder = trt.Builder(logger)
    # TensorRT 10 needs the flag STRONGLY_TYPED; TensorRT 11 ignores it.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx_file.read_bytes()):
        raise UserError(f"TensorRT {trt.__version__} cannot read {onnx_file}: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("images", *[(batch, *image_size, 3) for batch in _BATCHES])
    profile.set_shape("image_sizes", *[(batch, 2) for batch in _BATCHES])
    config.add_optimization_profile(profile)
    log("building the TensorRT engine: this takes minutes")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UserError(f"TensorRT {trt.__version__} could not build an engine from {onnx_file}: see its log")
    write_bytes(engine, bytes(plan))
