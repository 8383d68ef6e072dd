"""Measures the latency of exported files on a GPU, with random weights. It never ran on a GPU.

A latency is the time from a batch in the host's memory to its detections there.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import statistics
import tempfile
from typing import Any

import keras
import numpy as np

from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import exported
from common.export import verify
from common.export.options import FORMATS, ExportArgs
from common.weights import weight_files
from tools.benchmark import stages
from tools.benchmark.options import BenchApp, BenchArgs
from tools.benchmark.rounds import Record

# roles of worker.work: --format and --quantize of export.py
ROLES = ("export:onnx:none", "export:tensorrt:none", "export:tensorrt:fp16", "export:tensorrt:int8")
INSTALL = "pip uninstall -y onnxruntime; pip install '.[gpu-export]'"
PROVIDER = "CUDAExecutionProvider"


def missing(export_format: str) -> str:
    """Returns a line that names the missing package that runs this format on a GPU, or ""."""
    if export_format == "tensorrt":
        problem = "" if importlib.util.find_spec("tensorrt") else "TensorRT is not installed"
    elif not importlib.util.find_spec("onnxruntime"):
        problem = "ONNX Runtime is not installed"
    else:
        import onnxruntime

        is_for_gpus = PROVIDER in onnxruntime.get_available_providers()
        problem = "" if is_for_gpus else "ONNX Runtime is the package for CPUs"
    return problem and f"no export to {export_format} runs on the GPU, because {problem}: {INSTALL}"


def measure(
    app: BenchApp, kind: str, model: keras.Model, config: Any, label_map: LabelMap, a: BenchArgs
) -> list[Record]:
    """Exports a model and returns its `latencies`.

    Args:
        kind: FORMAT:QUANTIZE, two flags of export.py.

    Raises:
        UserError: a package is missing, or the file cannot be written or does not run on the GPU.
    """
    export_format, _, quantize = kind.partition(":")
    metadata = app.module("predict").APP.make_metadata(config, label_map, label_map.num_classes)
    with tempfile.TemporaryDirectory(prefix="bench-export-") as name:
        folder = pathlib.Path(name)
        weights, file = folder / "random.weights.h5", folder / f"detector{FORMATS[export_format].suffix}"
        weight_files.save(model, weights, metadata)
        options = ExportArgs(weights=str(weights), format=export_format, quantize=quantize, output=str(file))
        if quantize == "int8":
            (folder / "images").mkdir()
            verify.draw_images(folder / "images")
            options = dataclasses.replace(options, calibration_images=str(folder / "images"))
        try:
            app.module("export").export(options)
        except UserError:
            if not file.exists():  # else rounding has changed the detections of random weights
                raise
        return latencies(file, config.image_size, a)


def latencies(file: pathlib.Path, image_size: tuple[int, int], a: BenchArgs) -> list[Record]:
    """Measures batches of 1 and of --batch_size random images.

    Returns:
        A record for each batch size: `batch_size`, `latency_ms` (the median of the rounds) and
        `images_per_second`.
    """
    if file.suffix == ".onnx" and PROVIDER not in exported.onnx_session(file).get_providers():
        raise UserError(f"ONNX Runtime cannot load CUDA's libraries and would run on the CPU: {INSTALL}")
    run = exported.open_runner(file)
    images = np.random.default_rng(0).integers(0, 256, (a.batch_size, *image_size, 3), np.uint8)
    image_sizes = np.tile(np.array(image_size, np.int32), (a.batch_size, 1))
    batch_sizes = sorted({1, a.batch_size})
    steps = {str(size): functools.partial(run, images[:size], image_sizes[:size]) for size in batch_sizes}
    rounds = stages.measure(steps, a)
    records = []
    for size in batch_sizes:
        milliseconds = statistics.median(costs[str(size)].ms for costs in rounds)
        rate = 1000 * size / milliseconds
        records.append({"batch_size": size, "latency_ms": milliseconds, "images_per_second": rate})
    return records
