"""Runs the commands of both apps on a GPU: training, evaluation, pictures, exported files.

Each command runs in a process of its own, as a user starts it. No command ever ran on a GPU. Without a GPU,
only its flags are tested.
"""

import csv
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from nvidia.dali import backend

from tests.conftest import ROOT
from tests.test_readme import check_flags
from tools import synthetic
from tools.benchmark import exports

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


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert not done.returncode, f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
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
    """A difference in the detections of float32 ends the export with an error."""
    suffix, loss = EXPORTS[quantize]
    if reason := exports.missing("onnx" if suffix == ".onnx" else "tensorrt"):
        pytest.skip(reason)
    weights, file = trained(app, "demo"), tmp_path / f"{app}-{quantize}{suffix}"
    run(export(app, weights, quantize, data, file))
    output = run(evaluate(app, file, data, tmp_path / "metrics"))
    assert "ONNX Runtime runs on the CPU" not in output
    assert ap_of(tmp_path / "metrics") > ap_of(weights) - loss


# --- without a GPU ---


@both_apps
def test_flags_in_all_commands_of_the_gpu_tests_exist(app, tmp_path):
    commands = [train(app, name, tmp_path, tmp_path / "run") for name in ("demo", *RUNS)]
    commands.append(evaluate(app, tmp_path, tmp_path, tmp_path, pipeline_type="dali_gpu"))
    commands.append(infer(app, tmp_path, tmp_path, tmp_path))
    commands += [export(app, tmp_path, quantize, tmp_path, tmp_path / "x") for quantize in EXPORTS]
    for words in commands:
        check_flags([str(word) for word in words], on_a_page=False)
