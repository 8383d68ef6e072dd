"""Which flags of export.py go together, and how two sets of detections are compared."""

import numpy as np
import pytest

from common.errors import UserError
from tools.exporting import tensorrt, verify
from tools.exporting.options import Options

GIVEN = {
    "weights": "w",
    "format": "onnx",
    "output": "a.onnx",
    "quantize": "none",
    "nms": None,
    "calibration_images": None,
    "verify_images": None,
    "verify_annotations": None,
}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"format": None}, "--format=None: it must be one of saved_model, onnx, litert, tensorrt"),
        ({"format": "tflite"}, "--format=tflite: it must be one of"),
        ({"output": None}, r"--output=None: name a file that ends in \.onnx for --format=onnx"),
        ({"output": "a.tflite"}, r"--output=a\.tflite: name a file that ends in \.onnx"),
        (
            {"format": "saved_model", "output": "a", "quantize": "fp16"},
            "--quantize=fp16: --format=saved_model has only none",
        ),
        (
            {"format": "litert", "output": "a.tflite", "nms": "efficientnms_trt"},
            "--nms=efficientnms_trt: --format=litert has only standard, none",
        ),
        ({"quantize": "int8"}, "needs --calibration_images"),
        ({"calibration_images": "x"}, "nothing is calibrated"),
        (
            {"quantize": "int8", "format": "litert", "output": "a.tflite", "calibration_images": "x"},
            "nothing",
        ),
        ({"verify_annotations": "x"}, "needs --verify_images"),
        ({"verify_annotations": "x", "verify_images": "y", "nms": "none"}, "detections that run here"),
    ],
)
def test_what_makes_no_sense_is_one_line(flags, message):
    with pytest.raises(UserError, match=message) as caught:
        Options(**GIVEN | flags).check()
    assert "\n" not in str(caught.value)


def test_defaults_follow_from_the_format():
    assert Options(**GIVEN).suppression == "standard"
    engine = {"format": "tensorrt", "output": "a.engine"}
    made = Options(**GIVEN | engine)
    assert made.suppression == "efficientnms_trt"
    assert str(made.verified_file) == "a.onnx"
    int8 = Options(**GIVEN | engine | {"quantize": "int8", "calibration_images": "x"})
    int8.check()


def test_the_command_for_tensorrt(tmp_path):
    command = tensorrt.trtexec(tmp_path / "a.onnx", tmp_path / "a.engine", (64, 96), "fp16")
    assert command.startswith(f"trtexec --onnx={tmp_path}/a.onnx --saveEngine={tmp_path}/a.engine --fp16 ")
    assert "--maxShapes=images:16x64x96x3,image_sizes:16x2" in command


def _detections(*rows):
    array = np.array(rows, np.float32).reshape(-1, 6)
    return array[:, :4], array[:, 4], array[:, 5].astype(np.int32)


A, B = (0.1, 0.1, 0.4, 0.5, 0.9, 0), (0.2, 0.3, 0.9, 0.8, 0.9, 1)


def _difference(wanted, found, max_detections=100):
    return verify.difference(_detections(*wanted), _detections(*found), max_detections)


def test_order_is_no_difference():
    assert _difference([A, B], [B, A]) == 0
    assert _difference([], [A]) == 0


def test_boxes_scores_and_classes_count():
    moved = (0.1, 0.1, 0.4, 0.52, 0.9, 0)
    assert _difference([A], [moved]) == pytest.approx(0.02, abs=1e-6)
    lower = (*A[:4], 0.85, 0)
    assert _difference([A], [lower]) == pytest.approx(0.05, abs=1e-6)
    other = (*A[:5], 1)
    assert _difference([A], [other]) == pytest.approx(0.9)
    assert _difference([A, B], [A]) == pytest.approx(0.9)


def test_a_full_list_may_lack_its_worst():
    """Which of two equal scores is cut off is chance; one that is clearly better must be there."""
    last, same_score = (0.5, 0.5, 0.6, 0.6, 0.2, 0), (0.7, 0.1, 0.9, 0.3, 0.2, 0)
    assert _difference([A, last], [A, same_score], max_detections=2) == 0
    assert _difference([A, last], [A, same_score], max_detections=3) == pytest.approx(0.2)
    better = (0.5, 0.5, 0.6, 0.6, 0.3, 0)
    assert _difference([A, better], [A, same_score], max_detections=2) > 0.1
