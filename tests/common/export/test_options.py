"""Tests options.py and tensorrt.py of common/export, and the choice of a GPU in evaluation/exported.py."""

import importlib.util
import pathlib
import sys
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf

from common.data.check.issues import DataError
from common.evaluation import exported
from common.export import exporter, tensorrt, verify
from common.export.options import ExportArgs
from tests.refusal import refusal

ONNX = {"weights": "w", "format": "onnx", "output": "a.onnx"}
SAVED_MODEL = {"format": "saved_model", "output": "a"}
LITERT = {"format": "litert", "output": "a.tflite"}
TENSORRT = {"format": "tensorrt", "output": "a.plan"}
TRITON = {"format": "triton", "output": "a"}
TRUTH = {"verify_annotations": "x", "verify_images": "y"}


WRONG_FLAGS = [
    ({"format": None}, "--format is missing: use one of saved_model, onnx, litert, tensorrt"),
    ({"format": "tflite"}, "--format=tflite is unknown: use one of"),
    ({"output": None}, "--output=None: give a file that ends in .onnx for --format=onnx"),
    ({"output": "a.tflite"}, "--output=a.tflite: give a file that ends in .onnx"),
    (TRITON | {"nms": "none"}, "--nms=none: --format=triton supports only standard"),
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


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS, ids=[message for _, message in WRONG_FLAGS])
def test_missing_or_contradictory_export_flag_is_refused(flags, message):
    assert message in refusal(ExportArgs(**ONNX | flags).check)


@pytest.mark.parametrize(
    "flags",
    [TENSORRT | {"quantize": "int8", "calibration_images": "x"}, TRUTH],
    ids=["calibration", "verification"],
)
def test_export_flags_that_fit_together_are_accepted(flags):
    ExportArgs(**ONNX | flags).check()


def test_default_nms_of_an_export_is_standard_for_onnx_and_efficientnms_trt_for_tensorrt():
    onnx, engine = ExportArgs(**ONNX), ExportArgs(**ONNX | TENSORRT)
    assert onnx.quantize == "none"
    assert (onnx.suppression, engine.suppression) == ("standard", "efficientnms_trt")
    assert (str(onnx.verified_file), str(engine.verified_file)) == ("a.onnx", "a.onnx")


@pytest.mark.parametrize(
    ("flags", "is_file"),
    [(ONNX, False), (SAVED_MODEL, True), (SAVED_MODEL, False), (TRITON, False)],
    ids=["onnx", "file", "directory", "triton"],
)
def test_output_of_another_kind_is_refused_and_not_replaced(flags, is_file, tmp_path):
    output = tmp_path / flags["output"]
    output.write_text("text") if is_file else output.mkdir()
    message = refusal(ExportArgs(**flags | {"output": str(output)}).check)
    assert (
        message == f"--output={output} exists and is not of --format={flags['format']}: choose another path"
    )


def test_missing_package_of_a_format_is_named_with_its_installation(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tf2onnx" else find_spec(name)
    )
    message = "--format={} needs the package tf2onnx: pip install '.[export]'"
    for flags in (ONNX, ONNX | TENSORRT):
        assert refusal(ExportArgs(**flags).check) == message.format(flags["format"])
    ExportArgs(**ONNX | LITERT).check()


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"quantize": "int8", "calibration_images": "{}"}, "--calibration_images"),
        ({"verify_images": "{}"}, "--verify_images"),
        ({"verify_images": "{}", "verify_annotations": "{}/a.json"}, "--verify_images"),
    ],
    ids=["calibration", "verification", "AP"],
)
def test_images_of_an_export_are_refused_with_their_flag_before_the_weights_are_read(flags, flag, tmp_path):
    def export(**more):
        values = {name: value.format(tmp_path) for name, value in flags.items()}
        options = ExportArgs(**ONNX | values | more)
        exporter.export(mock.NonCallableMock(spec=[]), options, None, None, None, nms_method="hard")

    assert refusal(export).startswith(f"{flag}={tmp_path}: no image files found")
    (tmp_path / "a.png").write_bytes(b"no image")
    message = refusal(export, error=DataError)
    assert (
        message.startswith(f"{flag}={tmp_path}: file that is not an image")
        and "--on_bad_image=skip" in message
    )
    assert f"{flag}={tmp_path}: no usable image" in refusal(export, error=DataError, on_bad_image="skip")


def test_existing_engine_is_not_replaced_without_tensorrt(tmp_path):
    engine = tmp_path / "a.plan"
    engine.write_bytes(b"engine")
    flags = ONNX | TENSORRT | {"output": str(engine)}
    assert "no new engine can be built without TensorRT" in refusal(ExportArgs(**flags).check)


def test_error_of_missing_tensorrt_shows_the_trtexec_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    message = refusal(tensorrt.build, pathlib.Path("a.onnx"), pathlib.Path("a.plan"), (64, 96))
    assert "no engine was built: pip install 'tensorrt-cu12==10.16.*' " in message
    shapes = "images:{0}x64x96x3,image_sizes:{0}x2"
    bounds = f"--minShapes={shapes} --optShapes={shapes} --maxShapes=".format(1) + shapes.format(16)
    command = "trtexec --onnx=a.onnx --saveEngine=a.plan --stronglyTyped --skipInference"
    assert message.endswith(f": {command} {bounds}")


def test_onnx_runtime_uses_the_gpu_if_its_package_supports_it_and_else_names_the_missing_package(
    monkeypatch, capsys
):
    known = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    session = mock.Mock(**{"return_value.get_outputs.return_value": [], "return_value.get_providers": list})
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    for available, expected in (known[2:], known[2:]), (known, [(known[1], {"use_tf32": "0"}), known[2]]):
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda names=available: names)
        exported.open_runner(pathlib.Path("a.onnx"))
        assert session.call_args.kwargs["providers"] == expected
    assert capsys.readouterr().err.count("onnxruntime-gpu==1.26.*") == 1


def _detections(rows):
    array = np.array(rows, np.float32).reshape(-1, 6)
    return array[:, :4], array[:, 4], array[:, 5].astype(np.int32)


A, B = (0.1, 0.1, 0.4, 0.5, 0.9, 0), (0.2, 0.3, 0.9, 0.8, 0.9, 1)
LAST, BETTER = (0.5, 0.5, 0.6, 0.6, 0.2, 0), (0.5, 0.5, 0.6, 0.6, 0.3, 0)
SAME_SCORE = (0.7, 0.1, 0.9, 0.3, 0.2, 0)


DIFFERENCES = {
    "other-order": ([A, B], [B, A], 100, 0),
    "no-reference": ([], [A], 100, 0),
    "other-box": ([A], [(0.1, 0.1, 0.4, 0.52, 0.9, 0)], 100, 0.02),
    "other-score": ([A], [(*A[:4], 0.85, 0)], 100, 0.05),
    "other-class": ([A], [(*A[:5], 1)], 100, 0.9),
    "missing": ([A, B], [A], 100, 0.9),
    # If scores are equal, max_detections may cut off either detection.
    "cut-off": ([A, LAST], [A, SAME_SCORE], 2, 0),
    "not-cut-off": ([A, LAST], [A, SAME_SCORE], 3, 0.2),
    "better-than-cut-off": ([A, BETTER], [A, SAME_SCORE], 2, 0.3),
}


@pytest.mark.parametrize(
    ("reference", "tested", "max_detections", "expected"), DIFFERENCES.values(), ids=DIFFERENCES
)
def test_difference_of_detections_ignores_order_and_ties_at_max_detections(
    reference, tested, max_detections, expected
):
    result = verify.difference(_detections(reference), _detections(tested), max_detections)
    assert result == pytest.approx(expected, abs=1e-6)


def test_synthetic_verification_images_differ_from_each_other_and_are_the_same_in_each_call(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    contents = []
    for directory in (first, second):
        directory.mkdir()
        verify.draw_images(directory)
        contents.append([file.read_bytes() for file in sorted(directory.iterdir())])
    assert len(set(contents[0])) == len(contents[0]) == 8
    assert contents[0] == contents[1]
