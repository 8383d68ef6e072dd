"""Measurements for tools/gpu_check.py that no other command makes. They never ran on a GPU.

    python -m tools.gpu_checks.parts decode '{"images": "my/images", "load": 0.65, "roi": false}'

The command calls the named function, and prints the result as JSON in the last line. The key "error" means
that the check failed.
"""

import collections
import contextlib
import ctypes
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from tools.gpu_checks import dali_alone
from tools.gpu_checks.images import BATCHES, KINDS, kind_of

# Largest mean pixel difference that passes, in levels from 0 to 255.
TOLERANCE = {"PNG": 0.5, "grey PNG": 0.5, "CMYK": 3.0}
OTHERS = 1.5  # the limit for all other file formats and for training batches
BOXES = 1e-5  # largest difference that passes in all other tensors, such as boxes
_HARDWARE = 3  # NVJPEG_BACKEND_HARDWARE of nvjpeg.h

Result = dict[str, Any]


# --- the host ---


def facts() -> Result:
    query = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    code, said = subprocess.getstatusoutput(query)
    return {
        **({"error": f"nvidia-smi failed: {said}"} if code else {"gpus": said.splitlines()}),
        "cuda": re.findall(r"CUDA Version: ([\d.]+)", subprocess.getoutput("nvidia-smi")),
        "cores": cores(),
        "libnvcuvid": _library("libnvcuvid.so.1") is not None,
        "jpeg_engines": _jpeg_engines(),
    }


def tensorflow(device: str = "GPU") -> Result:
    """Makes XLA compile a function; returns CUDA's and cuDNN's version."""
    import tensorflow as tf

    if not tf.config.list_physical_devices(device):
        return {"error": f"TensorFlow sees no {device}"}
    with tf.device(device):
        tf.function(lambda x: tf.atan2(x, x**x), jit_compile=True)(tf.ones(8))
    return {name: tf.sysconfig.get_build_info().get(f"{name}_version") for name in ("cuda", "cudnn")}


def nccl() -> Result:
    from horovod.common.util import nccl_built

    return {"nccl": nccl_built()} if nccl_built() else {"error": "Horovod has no NCCL"}


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _library(name: str) -> Any:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    return None


def _jpeg_engines() -> int | None:
    """Counts the JPEG engines of the first GPU in the same way as nvImageCodec (hw_decoder.cpp)."""
    from nvidia import dali

    package = pathlib.Path(dali.__file__).parents[1] / "nvjpeg"
    nvjpeg = _library(next(map(str, package.glob("lib/libnvjpeg.so.*")), "libnvjpeg.so.12"))
    if nvjpeg is None:
        return None
    handle, engines, each = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    if nvjpeg.nvjpegCreateEx(_HARDWARE, None, None, 0, ctypes.byref(handle)):
        return 0
    nvjpeg.nvjpegGetHardwareDecoderInfo(handle, ctypes.byref(engines), ctypes.byref(each))
    return engines.value


# --- DALI alone ---


def decode(images: str, annotations: str, load: float, roi: bool, device: str = "gpu") -> Result:
    """Measures how fast images are decoded and cropped to the middle 3/4 of their height and width.

    Args:
        load: value of hw_decoder_load, the share of the images that the GPU's JPEG engines decode.
        roi: whether a GPU decodes only the middle. This may crash in nvImageCodec 0.9 (its issue 55).
    """
    options: Result = {"training": True, "batch_size": 64, "hw_decoder_load": load, "roi_decoding": roi}
    decoder = _loader("yolov4", images, annotations, device, **options).decoder
    from nvidia.dali import Pipeline, fn, types

    with Pipeline(64, cores(), None if device == "cpu" else 0, exec_dynamic=True) as pipeline:
        jpegs, _ = fn.readers.file(files=sorted(map(str, pathlib.Path(images).iterdir())))
        size = fn.cast(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2], dtype=types.INT32)
        pipeline.set_outputs(decoder.crop(jpegs, fn.cat(size // 8, size - size // 4)))
    pipeline.build()
    return _rate(pipeline, 64)


def compare(
    app: str, images: str, annotations: str, training: bool, device: str = "gpu", **more: Any
) -> Result:
    """Compares three batches of the graph on `device` with three batches of the CPU graph.

    Args:
        images, annotations: the data of images.draw_kinds.
        training: whether to compare the training graphs or the evaluation graphs.

    Returns:
        File format -> mean pixel difference, in levels from 0 to 255. For training graphs the only key is
        "batch". If something differs too much, the key "error" has a message.
    """
    shared = {"training": training, "hparams": more.pop("hparams", "")}
    options: Result = {**shared, "batch_size": len(KINDS), "name_images": True}
    cpu = _loader(app, images, annotations, device="cpu", **options)
    gpu = _loader(app, images, annotations, device=device, **options, **more)
    from common.dali_ops import IMAGENET_STD

    unit = 255.0 if app == "yolov4" else np.array(IMAGENET_STD, np.float32)  # levels per unit of the input
    off, wrong = collections.defaultdict(list), {}
    for _ in range(BATCHES):
        one, other = _batch(cpu), _batch(gpu)
        levels = np.abs(one.pop("images") - other.pop("images")) * unit
        for image_id, difference in zip(one["image_ids"].ravel(), levels, strict=True):
            off["batch" if training else kind_of(int(image_id))].append(difference.mean())
        for name, expected in one.items():
            if not (largest := np.abs(expected - other[name]).max(initial=0)) <= BOXES:
                wrong[name] = f"{name} differs by up to {largest:.3g}"
    means = {kind: round(float(np.mean(each)), 3) for kind, each in off.items()}
    for kind, mean in means.items():
        if not mean <= (limit := TOLERANCE.get(kind, OTHERS)):
            wrong[kind] = f"{kind} is {mean:g} levels off, more than {limit:g}"
    return means | ({"error": "; ".join(wrong.values())} if wrong else {})


def rate(app: str, images: str, annotations: str, seconds: float = 5.0, **options: Any) -> Result:
    """Measures the speed of the training graph without TensorFlow."""
    loader = _loader(app, images, annotations, training=True, **options)
    return _rate(loader.pipeline, loader.batch_size, seconds)


def _loader(app: str, images: str, annotations: str, device: str = "gpu", **options: Any) -> Any:
    dali_alone.install()
    from common.data.open import open_source
    from common.hparams import override
    from efficientdet.config import get_config as efficientdet_config
    from efficientdet.pipeline import EfficientDetPipeline
    from yolov4.config import get_config as yolov4_config
    from yolov4.pipeline import YOLOv4Pipeline

    source = open_source(images, annotations, split="")
    options = {"num_threads": cores(), "device_id": None if device == "cpu" else 0, **options}
    pipeline: Any = YOLOv4Pipeline if app == "yolov4" else EfficientDetPipeline
    config: Any = yolov4_config(app) if app == "yolov4" else efficientdet_config(f"{app}-d0")
    return pipeline(source=source, config=override(config, options.pop("hparams", None)), **options)


def _batch(loader: Any) -> dict[str, np.ndarray]:
    outputs = [np.asarray(output.as_cpu().as_tensor()) for output in loader.pipeline.run()]
    return dict(zip(loader.element_spec, outputs, strict=True))


def _rate(pipeline: Any, batch_size: int, seconds: float = 5.0) -> Result:
    for _ in range(5):
        pipeline.run()
    start, cpu, images = time.monotonic(), time.process_time(), 0
    while time.monotonic() - start < seconds:
        outputs = pipeline.run()
        images += batch_size
    for output in outputs:
        output.as_cpu()  # waits for the GPU
    elapsed, cpu = time.monotonic() - start, time.process_time() - cpu
    return {
        "images_per_second": round(images / elapsed, 1),
        "cpu_ms_per_image": round(1000 * cpu / images, 3),
    }


# --- exported files ---


def latency(file: str, side: int) -> Result:
    """Measures the median time of a batch in ms, including copies from and to host memory.

    Args:
        file: an .onnx or .plan file that export.py wrote.
        side: side of the model's square input in pixels.
    """
    import onnxruntime

    from common.evaluation.exported import open_runner

    run, found = open_runner(pathlib.Path(file)), Result()
    for batch in (1, 8):
        images = np.random.default_rng(0).integers(0, 256, (batch, side, side, 3), np.uint8)
        times = [time.perf_counter()]
        for _ in range(55):
            run(images, np.full((batch, 2), side, np.int32))
            times.append(time.perf_counter())
        found[f"ms_batch_{batch}"] = round(1000 * statistics.median(np.diff(times)[5:].tolist()), 2)
    if file.endswith(".onnx") and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        found["error"] = "the model ran on the CPU: install onnxruntime-gpu instead of onnxruntime"
    return found


if __name__ == "__main__":
    PARTS = {each.__name__: each for each in (facts, tensorflow, nccl, decode, compare, rate, latency)}
    print("\n" + json.dumps(PARTS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
