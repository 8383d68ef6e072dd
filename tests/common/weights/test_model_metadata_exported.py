"""Tests model_metadata.py with exported files."""

import json
import zipfile

import pytest

from common.weights import model_metadata
from tests.refusal import refusal

METADATA = {"app": "efficientdet", "num_classes": 3, "config": {"image_size": [64, 96]}}


def test_metadata_are_read_from_saved_model_and_litert_file(tmp_path):
    saved_model = tmp_path / "exported"
    (saved_model / "assets.extra").mkdir(parents=True)
    (saved_model / "saved_model.pb").touch()
    (saved_model / "assets.extra" / "metadata.json").write_text(json.dumps(METADATA))
    lite = tmp_path / "model.tflite"
    lite.write_bytes(b"\x20\0\0\0TFL3 and so on")
    with zipfile.ZipFile(lite, "a") as archive:
        archive.writestr("metadata.json", json.dumps(METADATA))
    assert model_metadata.read(saved_model) == model_metadata.read(lite) == METADATA


def test_metadata_are_read_from_onnx_file_and_onnx_without_metadata_is_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    model = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    onnx.save(model, tmp_path / "plain.onnx")
    onnx.helper.set_model_props(model, {"author": "x", "metadata": json.dumps(METADATA)})
    onnx.save(model, tmp_path / "model.onnx")
    assert model_metadata.read(tmp_path / "model.onnx") == METADATA
    assert "plain.onnx has no metadata" in refusal(model_metadata.read, tmp_path / "plain.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\xff\xff no protobuf")
    assert "bad.onnx has no metadata" in refusal(model_metadata.read, tmp_path / "bad.onnx")


def test_damaged_metadata_of_litert_file_are_refused(tmp_path):
    (tmp_path / "a.tflite").write_bytes(b"TFL3")
    message = refusal(model_metadata.read, tmp_path / "a.tflite")
    assert "has no metadata: it is damaged, or another project" in message
    for text in ("{cut", "[1]"):
        with zipfile.ZipFile(tmp_path / "a.tflite", "w") as archive:
            archive.writestr("metadata.json", text)
        assert "has no metadata: it is damaged" in refusal(model_metadata.read, tmp_path / "a.tflite")
