"""Runs the commands of both apps on a GPU: training, evaluation, pictures, exported files.

Each command runs in a process of its own, as a user starts it. No command ever ran on a GPU. Without a GPU,
only its flags are tested.
"""

import csv
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import onnxruntime
import pytest
from nvidia.dali import backend

from tests.conftest import ROOT
from tests.test_readme import check_flags
from tools import synthetic

LIMIT = 1800  # seconds for one command: XLA and TensorRT compile
# app -> model, side of its square input in pixels, batch size
MODELS = {"efficientdet": ("efficientdet-d0", 512, 64), "yolov4": ("yolov4", 608, 16)}
AP_OF_DEMO = {"efficientdet": 0.55, "yolov4": 0.5}  # below the AP on a CPU, docs/benchmarks.md
RUNS = {  # name -> flags of a short training
    "bfloat16": {"precision": "mixed_bfloat16"},
    "bfloat16-xla": {"precision": "mixed_bfloat16", "xla": True},
    "bfloat16-accumulated": {"precision": "mixed_bfloat16", "accumulate_steps": 2},
    "float16-large": {"precision": "mixed_float16", "batch_size": 2},  # times the batch size
    "float16-xla-accumulated": {"precision": "mixed_float16", "xla": True, "accumulate_steps": 2},
    "float32-xla": {"xla": True},
    "mirrored": {"strategy": "mirrored"},
    "horovod": {"strategy": "horovod"},
    "two-gpus": {"strategy": "horovod", "precision": "mixed_bfloat16"},
}
RANKS = {"horovod": "1", "two-gpus": "2"}
# --quantize -> suffix of the file, largest loss of AP
EXPORTS = {"none": (".onnx", 0.005), "fp16": (".plan", 0.01), "int8": (".plan", 0.03)}
INSTALL = "pip uninstall -y onnxruntime; pip install '.[gpu-export]'"
LATENCY = """
import statistics, sys, time
from pathlib import Path
import numpy as np
from common.evaluation.exported import open_runner
file, side = Path(sys.argv[1]), int(sys.argv[2])
run = open_runner(file)
for batch in (1, 8):
    images = np.random.default_rng(0).integers(0, 256, (batch, side, side, 3), np.uint8)
    times = [time.perf_counter()]
    for _ in range(55):
        run(images, np.full((batch, 2), side, np.int32))
        times.append(time.perf_counter())
    print(f"{file}: {1000 * statistics.median(np.diff(times)[5:]):.2f} ms at batch {batch}")
"""

pytestmark = pytest.mark.timeout(2 * LIMIT)
both_apps = pytest.mark.parametrize("app", MODELS)


def python(program: str, **flags: Any) -> list[str]:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in flags.items()}
    return [sys.executable, program, *(f"--{name}={value}" for name, value in values.items())]


def split(data: pathlib.Path, name: str) -> dict[str, Any]:
    return {f"{name}_images": data / name / "images", f"{name}_annotations": data / name / "instances.json"}


def train(app: str, name: str, data: pathlib.Path, output_dir: pathlib.Path) -> list[str]:
    if name == "demo":
        flags = {"flagfile": f"{app}/flags/demo.txt", **split(data, "train"), **split(data, "eval")}
        return python(f"{app}/train.py", **flags, output_dir=output_dir)
    model, _, batch_size = MODELS[app]
    flags = {"model_name": model, "batch_size": 1, "epochs": 2, "steps_per_epoch": 60, "eval_every": 0}
    flags |= RUNS[name]
    flags["batch_size"] *= batch_size
    if app == "yolov4":
        flags["hparams"] = "multi_scale=1"  # one image size, so XLA compiles once
    command = python(f"{app}/train.py", **flags, **split(data, "train"), output_dir=output_dir)
    if name in RANKS:
        return [str(pathlib.Path(sys.executable).with_name("horovodrun")), "-np", RANKS[name], *command]
    return command


def evaluate(app: str, weights: pathlib.Path, data: pathlib.Path, output_dir: pathlib.Path, **flags):
    return python(f"{app}/eval.py", weights=weights, output_dir=output_dir, **split(data, "eval"), **flags)


def infer(app: str, weights: pathlib.Path, data: pathlib.Path, output_dir: pathlib.Path) -> list[str]:
    return python(f"{app}/infer.py", weights=weights, images=data / "eval" / "images", output_dir=output_dir)


def export(app: str, weights: pathlib.Path, quantize: str, data: pathlib.Path, output: pathlib.Path):
    flags = {"format": "onnx" if quantize == "none" else "tensorrt", "quantize": quantize, "output": output}
    if quantize == "int8":
        flags["calibration_images"] = data / "train" / "images"
    return python(f"{app}/export.py", weights=weights, **flags)


def run(command: list[str], codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode in codes, (
        f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
    return done.stdout + done.stderr


def ap_of(directory: pathlib.Path) -> float:
    return json.loads((directory / "metrics.json").read_bytes())["AP"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("data")
    synthetic.draw_dataset(directory / "train", 600, seed=1)
    synthetic.draw_dataset(directory / "eval", 100, seed=2)
    return directory


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A function trained(app, name) that returns the directory of a run, and trains it at the first call."""
    directories: dict[tuple[str, str], pathlib.Path] = {}

    def train_once(app: str, name: str) -> pathlib.Path:
        if (app, name) not in directories:
            directories[app, name] = tmp_path_factory.mktemp(f"{app}-{name}")
            run(train(app, name, data, directories[app, name]))
        return directories[app, name]

    return train_once


@pytest.mark.gpu
@both_apps
@pytest.mark.parametrize("name", RUNS)
def test_short_training_on_a_gpu_has_a_finite_loss_with_each_set_of_flags(app, name, trained):
    if name == "two-gpus" and backend.GetCUDADeviceCount() < 2:
        pytest.skip("this host has one GPU")
    rows = list(csv.DictReader((trained(app, name) / "results.csv").read_text().splitlines()))
    print(
        f"{app} {name}: {rows[-1]['images_per_second']} images/s, {rows[-1]['skipped_steps']} skipped steps"
    )
    assert math.isfinite(float(rows[-1]["loss"]))


@pytest.mark.gpu
@both_apps
def test_training_on_a_gpu_continues_after_its_last_epoch_with_the_next_steps(app, data, tmp_path):
    command = train(app, "bfloat16", data, tmp_path)
    run([*command, "--epochs=1"])
    assert "nothing left to train" not in run(command)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [int(row["epoch"]) for row in rows] == [1, 2]
    assert float(rows[1]["loss"]) < float(rows[0]["loss"])


@pytest.mark.gpu
@both_apps
def test_trained_demo_reaches_its_ap_in_evaluations_with_the_gpu_loader_and_the_cpu_loader(
    app, trained, data, tmp_path
):
    for pipeline_type in ("dali_gpu", "dali_cpu"):
        output_dir = tmp_path / pipeline_type
        run(evaluate(app, trained(app, "demo"), data, output_dir, pipeline_type=pipeline_type))
    on_gpu, on_cpu = ap_of(tmp_path / "dali_gpu"), ap_of(tmp_path / "dali_cpu")
    assert on_gpu == pytest.approx(on_cpu, abs=0.01)
    assert on_gpu > AP_OF_DEMO[app]


@pytest.mark.gpu
@both_apps
def test_inference_of_the_demo_draws_every_image(app, trained, data, tmp_path):
    run(infer(app, trained(app, "demo"), data, tmp_path))
    assert len(list(tmp_path.glob("0*.png"))) == 100


@pytest.mark.gpu
@both_apps
@pytest.mark.parametrize("quantize", EXPORTS)
def test_exported_demo_has_the_ap_of_its_weights(app, trained, data, tmp_path, quantize):
    weights, loss = trained(app, "demo"), EXPORTS[quantize][1]
    file = exported(app, weights, quantize, data, tmp_path)
    output = run(evaluate(app, file, data, tmp_path / "metrics"))
    assert "ONNX Runtime runs on the CPU" not in output
    assert ap_of(tmp_path / "metrics") > ap_of(weights) - loss


@pytest.mark.gpu
@both_apps
@pytest.mark.parametrize("quantize", EXPORTS)
def test_exported_full_size_model_runs_on_the_gpu(app, trained, data, tmp_path, quantize):
    """Prints the median time of a batch. After 120 steps, rounding can change outputs by more than 1e-4."""
    file = exported(app, trained(app, "bfloat16"), quantize, data, tmp_path, compared=False)
    output = run([sys.executable, "-c", LATENCY, str(file), str(MODELS[app][1])])
    print(output)
    assert "ONNX Runtime runs on the CPU" not in output


def exported(
    app: str,
    weights: pathlib.Path,
    quantize: str,
    data: pathlib.Path,
    directory: pathlib.Path,
    compared: bool = True,
) -> pathlib.Path:
    """Exports weights and returns the file. Skips the test if the package that runs it is not installed.

    With `compared=False`, detections that differ from those of the weights are no failure.
    """
    file = directory / f"{app}-{quantize}{EXPORTS[quantize][0]}"
    if file.suffix == ".plan" and importlib.util.find_spec("tensorrt") is None:
        pytest.skip(f"TensorRT is not installed: {INSTALL}")
    if file.suffix == ".onnx" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip(f"ONNX Runtime is the package for CPUs: {INSTALL}")
    run(export(app, weights, quantize, data, file), codes=(0,) if compared else (0, 1))
    assert file.exists()
    return file


# --- without a GPU ---


@both_apps
def test_flags_in_all_commands_of_the_gpu_tests_exist(app, tmp_path):
    commands = [train(app, name, tmp_path, tmp_path / "run") for name in ("demo", *RUNS)]
    commands.append(evaluate(app, tmp_path, tmp_path, tmp_path, pipeline_type="dali_gpu"))
    commands.append(infer(app, tmp_path, tmp_path, tmp_path))
    commands += [export(app, tmp_path, quantize, tmp_path, tmp_path / "x") for quantize in EXPORTS]
    for words in commands:
        check_flags([str(word) for word in words], on_a_page=False)
