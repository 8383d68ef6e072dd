"""Tests options.py and tensorrt.py of common/export, and the choice of a GPU in evaluation/exported.py."""

import pathlib
import sys
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf

from common.evaluation import exported
from common.export import tensorrt, verify
from common.export.options import ExportArgs
from tests.refusal import refusal

ONNX = {"weights": "w", "format": "onnx", "output": "a.onnx"}
SAVED_MODEL = {"format": "saved_model", "output": "a"}
LITERT = {"format": "litert", "output": "a.tflite"}
TENSORRT = {"format": "tensorrt", "output": "a.plan"}
TRUTH = {"verify_annotations": "x", "verify_images": "y"}


SENSELESS = [
    ({"format": None}, "--format is missing: use one of saved_model, onnx, litert, tensorrt"),
    ({"format": "tflite"}, "--format=tflite is unknown: use one of"),
    ({"output": None}, "--output=None: give a file that ends in .onnx for --format=onnx"),
    ({"output": "a.tflite"}, "--output=a.tflite: give a file that ends in .onnx"),
    (SAVED_MODEL | {"output": None}, "--output=None: give a directory for --format=saved_model"),
    (SAVED_MODEL | {"quantize": "fp16"}, "--quantize=fp16: --format=saved_model supports only none"),
    (LITERT | {"nms": "efficientnms_trt"}, "--nms=efficientnms_trt: --format=litert supports only standard"),
    ({"quantize": "int8"}, "needs --calibration_images"),
    ({"calibration_images": "x"}, "--calibration_images has no effect for --format=onnx --quantize=none"),
    (LITERT | {"quantize": "int8", "calibration_images": "x"}, "--calibration_images has no effect"),
    ({"verify_annotations": "x"}, "needs --verify_images"),
    (TRUTH | {"nms": "none"}, "a file with NMS that runs without TensorRT"),
    (TRUTH | TENSORRT | {"nms": "standard"}, "a file with NMS that runs without TensorRT"),
]


@pytest.mark.parametrize(("flags", "message"), SENSELESS)
def test_what_makes_no_sense_is_one_line(flags, message):
    assert message in refusal(ExportArgs(**ONNX | flags).check)


def test_defaults_follow_from_the_format():
    onnx, engine = ExportArgs(**ONNX), ExportArgs(**ONNX | TENSORRT)
    assert onnx.quantize == "none"
    assert (onnx.suppression, engine.suppression) == ("standard", "efficientnms_trt")
    assert (str(onnx.verified_file), str(engine.verified_file)) == ("a.onnx", "a.onnx")
    ExportArgs(**ONNX | TENSORRT | {"quantize": "int8", "calibration_images": "x"}).check()
    ExportArgs(**ONNX | TRUTH).check()


def test_without_tensorrt_the_command_for_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    said = refusal(tensorrt.build, pathlib.Path("a.onnx"), pathlib.Path("a.plan"), (64, 96))
    assert "no engine was built: pip install 'tensorrt-cu12==10.16.*' " in said
    shapes = "images:{0}x64x96x3,image_sizes:{0}x2"
    bounds = f"--minShapes={shapes} --optShapes={shapes} --maxShapes=".format(1) + shapes.format(16)
    command = "trtexec --onnx=a.onnx --saveEngine=a.plan --stronglyTyped --skipInference"
    assert said.endswith(f": {command} {bounds}")


def test_onnx_runtime_uses_the_gpu_or_says_why_not(monkeypatch, capsys):
    known = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    session = mock.Mock(**{"return_value.get_outputs.return_value": [], "return_value.get_providers": list})
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    for providers, expected in (known[2:], known[2:]), (known, [(known[1], {"use_tf32": "0"}), known[2]]):
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda given=providers: given)
        exported.open_runner(pathlib.Path("a.onnx"))
        assert session.call_args.kwargs["providers"] == expected
    assert capsys.readouterr().err.count("onnxruntime-gpu==1.26.*") == 1


def _detections(*rows):
    array = np.array(rows, np.float32).reshape(-1, 6)
    return array[:, :4], array[:, 4], array[:, 5].astype(np.int32)


A, B = (0.1, 0.1, 0.4, 0.5, 0.9, 0), (0.2, 0.3, 0.9, 0.8, 0.9, 1)
LAST, BETTER = (0.5, 0.5, 0.6, 0.6, 0.2, 0), (0.5, 0.5, 0.6, 0.6, 0.3, 0)
SAME_SCORE = (0.7, 0.1, 0.9, 0.3, 0.2, 0)


DIFFERENCES = [
    ([A, B], [B, A], 100, 0),
    ([], [A], 100, 0),
    ([A], [(0.1, 0.1, 0.4, 0.52, 0.9, 0)], 100, 0.02),
    ([A], [(*A[:4], 0.85, 0)], 100, 0.05),
    ([A], [(*A[:5], 1)], 100, 0.9),
    ([A, B], [A], 100, 0.9),
    # If scores are equal, max_detections may cut off either detection.
    ([A, LAST], [A, SAME_SCORE], 2, 0),
    ([A, LAST], [A, SAME_SCORE], 3, 0.2),
    ([A, BETTER], [A, SAME_SCORE], 2, 0.3),
]


@pytest.mark.parametrize(("wanted", "found", "max_detections", "difference"), DIFFERENCES)
def test_boxes_scores_and_classes_count_but_not_the_order(wanted, found, max_detections, difference):
    apart = verify.difference(_detections(*wanted), _detections(*found), max_detections)
    assert apart == pytest.approx(difference, abs=1e-6)


def test_drawn_images_are_the_same_in_each_call(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        verify.draw_images(tmp_path / name)
    first, second = (sorted((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert len({file.read_bytes() for file in first}) == len(first) == 8
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
