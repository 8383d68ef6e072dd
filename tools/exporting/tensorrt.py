"""TensorRT: an engine for the GPU of this machine, built from the ONNX file that is written beside it.

INT8 comes from the Q and DQ nodes of that file (explicit quantisation), so TensorRT calibrates nothing:
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
"""

import pathlib

from common.errors import UserError
from common.files import write_bytes
from common.progress import log


def trtexec(onnx_file: pathlib.Path, engine: pathlib.Path, image_size: tuple[int, int], quantize: str) -> str:
    """The command that builds the same engine by TensorRT's own tool."""
    height, width = image_size
    shapes = [
        f"--{bound}Shapes=images:{batch}x{height}x{width}x3,image_sizes:{batch}x2"
        for bound, batch in zip(("min", "opt", "max"), _BATCHES, strict=True)
    ]
    words = ["trtexec", f"--onnx={onnx_file}", f"--saveEngine={engine}", *_FLAGS[quantize], *shapes]
    return " ".join(words)


_BATCHES = (1, 1, 16)  # the smallest, the one to be fast at, the largest
_FLAGS = {"none": [], "fp16": ["--fp16"], "int8": ["--int8", "--fp16"]}


def build(onnx_file: pathlib.Path, engine: pathlib.Path, image_size: tuple[int, int], quantize: str) -> None:
    """Builds the engine.

    Raises:
        UserError: TensorRT is not installed, or refuses the file.
    """
    try:
        import tensorrt as trt
    except ImportError as error:
        raise UserError(
            "TensorRT is not installed, so there is no engine yet: pip install tensorrt and run this command "
            "again, or build it from the ONNX file, which is written: "
            f"{trtexec(onnx_file, engine, image_size, quantize)}"
        ) from error
    logger = trt.Logger(trt.Logger.WARNING)
    trt.init_libnvinfer_plugins(logger, "")  # EfficientNMS_TRT is one
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx_file.read_bytes()):
        raise UserError(f"TensorRT {trt.__version__} does not take {onnx_file}: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    if quantize != "none":
        config.set_flag(trt.BuilderFlag.FP16)
    if quantize == "int8":
        config.set_flag(trt.BuilderFlag.INT8)
    profile = builder.create_optimization_profile()
    profile.set_shape("images", *[(batch, *image_size, 3) for batch in _BATCHES])
    profile.set_shape("image_sizes", *[(batch, 2) for batch in _BATCHES])
    config.add_optimization_profile(profile)
    log("building the TensorRT engine: this takes minutes")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UserError(f"TensorRT {trt.__version__} could not build an engine from {onnx_file}: see above")
    write_bytes(engine, bytes(plan))
