"""Runs exported models: saved_model with TensorFlow, .onnx with ONNX Runtime, .tflite with LiteRT, .plan with
TensorRT. The code for TensorRT 10.16 has never run a real engine; its tests use fakes of TensorRT and CUDA.

run = open_runner(pathlib.Path("detector.onnx"))
outputs = run(images, image_sizes)  # boxes, scores, classes, count; see common/export/export_graph.py
"""

import os
import pathlib
from collections.abc import Callable
from ctypes import CDLL, byref, c_char_p, c_size_t, c_void_p
from typing import Any

import numpy as np
import tensorflow as tf

from common.errors import UserError
from common.layers import unfused
from common.progress import log_once

Outputs = dict[str, np.ndarray]
Run = Callable[[np.ndarray, np.ndarray], Outputs]  # images uint8 (B, H, W, 3), image_sizes int32 (B, 2)

RESIZED = "resized"  # signature of a saved_model for images that are already letterboxed
# For CUDA 12, as TensorFlow's wheels are: onnxruntime-gpu 1.27 needs CUDA 13. Quoted for the shell.
ONNX_RUNTIME, TENSORRT = "'onnxruntime-gpu==1.26.*'", "'tensorrt-cu12==10.16.*'"


def open_runner(path: pathlib.Path) -> Run:
    """Returns a function that runs the exported detector.

    Raises:
        UserError: the file is damaged, does not fit this GPU, or the package that runs it is missing.
    """
    openers = {".onnx": _open_onnx, ".tflite": _open_litert, ".plan": _open_engine}
    try:
        return (_open_saved_model if path.is_dir() else openers[path.suffix])(path)
    except ImportError as error:
        package = (error.name or "").partition(".")[0].replace("_", "-")
        package = TENSORRT if package.startswith("tensorrt") else package
        missing = f"the package {package}: pip install {package}" if package else f"a package: {error}"
        raise UserError(f"running {path} needs {missing}") from error
    except Exception as error:  # the packages raise many classes for damaged files
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} cannot be opened: {reason}; export the model again") from error


def make_detect(run: Run, to_pixels: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., tuple]:
    """Returns an exported detector as a function for common.evaluation.evaluate.

    The detector gets the size of each resized image instead of the original size.

    Args:
        to_pixels: converts the normalised images of the app's loader to uint8.
    """

    def detect(images: tf.Tensor, letterbox: tf.Tensor) -> tuple[np.ndarray, ...]:
        sizes = np.asarray(letterbox)[:, 2:].astype(np.int32)
        outputs = run(np.asarray(to_pixels(images)), sizes)
        boxes = outputs["boxes"] / sizes[:, np.newaxis, [1, 0, 1, 0]].astype(np.float32)
        # Non-finite outputs give no detections.
        return boxes, outputs["scores"], outputs["classes"], np.ones(len(sizes), bool)

    return detect


def _open_saved_model(path: pathlib.Path) -> Run:
    loaded = tf.saved_model.load(str(path))
    function = unfused(loaded.signatures[RESIZED])

    # The default argument keeps `loaded` alive.
    def run(images: np.ndarray, image_sizes: np.ndarray, _kept: Any = loaded) -> Outputs:
        outputs = function(images=tf.constant(images), image_sizes=tf.constant(image_sizes))
        return {name: value.numpy() for name, value in outputs.items()}

    return run


def onnx_session(path: pathlib.Path) -> Any:
    """Opens an onnxruntime.InferenceSession, on the GPU if CUDA can be loaded.

    `get_providers()` of the session begins with CUDAExecutionProvider if it runs on the GPU.
    """
    import onnxruntime

    onnxruntime.preload_dlls()  # loads CUDA's libraries from TensorFlow's wheels
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    # TF32 changes the outputs by more than export.py allows.
    on_gpu = [(cuda, {"use_tf32": "0"})] if cuda in onnxruntime.get_available_providers() else []
    return onnxruntime.InferenceSession(path, providers=[*on_gpu, cpu])


def _open_onnx(path: pathlib.Path) -> Run:
    session = onnx_session(path)
    if "CUDAExecutionProvider" not in session.get_providers() and tf.config.list_physical_devices("GPU"):
        instead = f"pip uninstall onnxruntime; pip install {ONNX_RUNTIME}"
        log_once(f"ONNX Runtime runs on the CPU here. To use the GPU: {instead}")
    names = [output.name for output in session.get_outputs()]

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Outputs:
        outputs = session.run(names, {"images": images, "image_sizes": image_sizes})
        return dict(zip(names, outputs, strict=True))

    return run


def _open_litert(path: pathlib.Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=os.cpu_count())
    function = interpreter.get_signature_runner()

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Outputs:
        outputs = []
        for i in range(len(images)):
            one = function(images=images[i : i + 1], image_sizes=image_sizes[i : i + 1])
            outputs.append({name: value.copy() for name, value in one.items()})
        return {name: np.concatenate([one[name] for one in outputs]) for name in outputs[0]}

    return run


def _open_engine(path: pathlib.Path) -> Run:
    """Opens a TensorRT engine. This code has never run with TensorRT. It follows NVIDIA's samples:
    https://github.com/NVIDIA/TensorRT/blob/release/10.16/samples/python/common_runtime.py
    """
    import tensorrt as trt

    gpu = _Gpu()
    logger = trt.Logger(trt.Logger.ERROR)
    trt.init_libnvinfer_plugins(logger, "")  # registers plugins such as EfficientNMS_TRT
    engine = trt.Runtime(logger).deserialize_cuda_engine(path.read_bytes())
    context = engine and engine.create_execution_context()
    if context is None:  # TensorRT has written its reason to stderr
        raise ValueError(f"TensorRT {trt.__version__} takes only engines of this version and GPU model")
    inputs = ("images", "image_sizes")
    for name in inputs:
        context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[2])  # the largest
    # Memory is allocated once, for the largest batch.
    on_host: Outputs = {}
    on_gpu: dict[str, int] = {}
    for number in range(engine.num_io_tensors):
        name = engine.get_tensor_name(number)
        shape, dtype = context.get_tensor_shape(name), trt.nptype(engine.get_tensor_dtype(name))
        on_host[name], address = np.empty(tuple(shape), dtype), c_void_p()
        gpu.call("cudaMalloc", byref(address), c_size_t(on_host[name].nbytes))
        on_gpu[name] = int(address.value or 0)
        context.set_tensor_address(name, on_gpu[name])

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Outputs:
        if len(images) > len(on_host["images"]):
            halves = zip(np.array_split(images, 2), np.array_split(image_sizes, 2), strict=True)
            parts = [run(*half) for half in halves]
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        batch = {name: buffer[: len(images)] for name, buffer in on_host.items()}
        for name, array in zip(inputs, (images, image_sizes), strict=True):
            if not context.set_input_shape(name, array.shape):
                raise UserError(f"{path} does not accept {name} of shape {array.shape}: export it again")
            batch[name][:] = array
            gpu.copy(on_gpu[name], batch[name].ctypes.data, batch[name].nbytes)
        if not context.execute_async_v3(gpu.stream.value):
            raise RuntimeError(f"TensorRT could not run {path}")
        outputs = {name: value for name, value in batch.items() if name not in inputs}
        for name, value in outputs.items():
            gpu.copy(value.ctypes.data, on_gpu[name], value.nbytes)
        gpu.call("cudaStreamSynchronize", gpu.stream)
        return {name: value.copy() for name, value in outputs.items()}

    return run


class _Gpu:
    """Manages memory and a stream of the GPU with CUDA's runtime library, which TensorFlow's wheels load."""

    def __init__(self) -> None:
        self.library = CDLL("libcudart.so.12")
        self.library.cudaGetErrorString.restype = c_char_p
        self.stream = c_void_p()
        self.call("cudaStreamCreate", byref(self.stream))

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self.library.cudaGetErrorString(code).decode()}")

    def copy(self, to: int, source: int, size: int) -> None:
        """Copies between host and GPU in stream order (cudaMemcpyDefault)."""
        self.call("cudaMemcpyAsync", c_void_p(to), c_void_p(source), c_size_t(size), 4, self.stream)
