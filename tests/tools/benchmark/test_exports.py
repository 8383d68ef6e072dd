"""Tests tools/benchmark/exports.py on a CPU. No latency was ever measured on a GPU."""

import importlib.util
import json
import time
import types

import keras
import numpy as np
import onnxruntime
import pytest

from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import exported
from tests.refusal import refusal
from tests.small_apps import TINY
from tools.benchmark import exports, options, worker
from tools.benchmark.options import BenchArgs

SHORT = {"batch_size": 4, "rounds": 2, "seconds": 0.03, "prefetch": 1}
IMAGE_SIZE = (8, 16)


@pytest.fixture
def batches(monkeypatch):
    """Replaces the runtimes of exported files. Lists the batches that they get."""
    batches = []

    def run(*arrays) -> None:
        time.sleep(0.001)
        batches.append(arrays)

    monkeypatch.setattr(exported, "open_runner", lambda file: run)
    return batches


def test_latency_of_an_export_is_measured_with_one_image_and_with_a_batch(batches, tmp_path):
    records = exports.latencies(tmp_path / "a.plan", IMAGE_SIZE, BenchArgs(**SHORT))
    assert [record["batch_size"] for record in records] == [1, 4]
    for record in records:
        rate = 1000 * record["batch_size"] / record["latency_ms"]
        assert record["images_per_second"] == pytest.approx(rate)
    assert {len(images) for images, _ in batches} == {1, 4}
    for images, image_sizes in batches:
        assert images.dtype == np.uint8 and images.shape[1:] == (*IMAGE_SIZE, 3)
        np.testing.assert_array_equal(image_sizes, [IMAGE_SIZE] * len(images))


def test_latency_of_an_onnx_file_that_would_run_on_the_cpu_is_not_measured(batches, monkeypatch, tmp_path):
    session = types.SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(exported, "onnx_session", lambda file: session)
    line = refusal(exports.latencies, tmp_path / "a.onnx", IMAGE_SIZE, BenchArgs(**SHORT))
    assert "would run on the CPU: pip " in line and not batches


def test_packages_that_run_exports_on_a_gpu_are_named_only_if_they_are_missing(monkeypatch):
    packages, providers = {"onnxruntime"}, ["CPUExecutionProvider"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    assert "because TensorRT is not installed: pip " in exports.missing("tensorrt")
    assert "because ONNX Runtime is the package for CPUs: pip " in exports.missing("onnx")
    providers.append("CUDAExecutionProvider")
    packages.add("tensorrt")
    assert exports.missing("tensorrt") == exports.missing("onnx") == ""
    packages.clear()
    assert "because ONNX Runtime is not installed: pip " in exports.missing("onnx")


@pytest.mark.parametrize("is_written", [True, False])
def test_export_whose_detections_differ_by_rounding_is_measured_but_not_one_without_a_file(
    batches, is_written
):
    def export(a) -> None:
        if is_written:
            a.file.touch()
        raise UserError("outputs differ")

    modules = {"export": types.SimpleNamespace(export=export), "predict": types.SimpleNamespace()}
    modules["predict"].APP = types.SimpleNamespace(make_metadata=lambda *_: {})
    app, model = (
        types.SimpleNamespace(module=modules.get),
        keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
    )
    config = types.SimpleNamespace(image_size=IMAGE_SIZE)
    arguments = (app, "tensorrt:fp16", model, config, LabelMap.numbered(3), BenchArgs(**SHORT))
    if is_written:
        assert len(exports.measure(*arguments)) == 2
    else:
        assert refusal(exports.measure, *arguments) == "outputs differ"


@pytest.mark.slow
def test_benchmark_worker_exports_a_random_model_and_prints_its_latencies(monkeypatch, capfd):
    monkeypatch.setattr(exports, "PROVIDER", "CPUExecutionProvider")
    model = {"model_name": "yolov4-nano", "hparams": TINY["yolov4"], "image_size": "64x96", "num_classes": 3}
    worker.work(options.APPS["yolov4"], "export:onnx:none", BenchArgs(**model, **SHORT))
    line = capfd.readouterr().out.splitlines()[-1]
    assert [each["batch_size"] for each in json.loads(line.removeprefix("result "))] == [1, 4]
