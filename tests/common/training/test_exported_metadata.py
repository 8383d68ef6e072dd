"""Changes of exported files are noticed, wherever they are; other files in a saved_model do not count."""

import json
import pathlib
import shutil
import zipfile

import numpy as np
import pytest

from common.errors import UserError
from common.training import model_metadata

MADE = {"app": "yolov4", "label_map": {"names": ["car", "Ärger"]}, "AP": 0.1 + 0.2, "export": {"nms": "none"}}
BODY = np.random.default_rng(5).integers(0, 256, 400, np.uint8).tobytes()
SEALED = json.loads(model_metadata.seal(MADE, [BODY]))


def write_tflite(path: pathlib.Path) -> None:
    path.write_bytes(BODY)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(model_metadata.FILE, json.dumps(SEALED))


def write_onnx(path: pathlib.Path) -> None:
    onnx = pytest.importorskip("onnx")
    weights = onnx.helper.make_tensor("w", onnx.TensorProto.UINT8, [len(BODY)], BODY, raw=True)
    model = onnx.helper.make_model(onnx.helper.make_graph([], "weights", [], [], [weights]))
    body = model.SerializeToString()
    text = model_metadata.seal(MADE, [body])
    path.write_bytes(body + model_metadata.onnx_field(text))
    onnx.checker.check_model(onnx.load(path))  # protocol buffers may be continued like this


def write_saved_model(path: pathlib.Path) -> None:
    (path / "variables").mkdir(parents=True)
    (path / "saved_model.pb").write_bytes(BODY[:99])
    (path / "variables" / "variables.data-00000-of-00001").write_bytes(BODY)
    folder = path / model_metadata.SAVED_MODEL_FOLDER
    text = model_metadata.seal(MADE, model_metadata.directory_body(path))
    folder.mkdir()
    (folder / model_metadata.FILE).write_text(text)


def _read(path: pathlib.Path) -> dict:
    found = model_metadata.read(path)
    return {name: found.get(name) for name in MADE}


@pytest.mark.parametrize(("name", "write"), [("a.tflite", write_tflite), ("a.onnx", write_onnx)])
def test_a_flipped_bit_in_any_byte(tmp_path, name, write, capsys):
    """A warning or an error in one line; or the byte is not used: a date, or the name of the checksum."""
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    assert _read(path) == MADE
    assert capsys.readouterr().err == ""
    body = whole.index(BODY)
    unnoticed = 0
    for place, bit in enumerate(np.random.default_rng(6).integers(0, 8, len(whole)).tolist()):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            found = _read(path)
        except UserError as error:
            assert "damaged" in str(error)
            assert "\n" not in str(error)
            continue
        if not _warned(capsys):
            assert found == MADE, place
            unnoticed += 1
            assert not body <= place < body + len(BODY)
    assert unnoticed < 0.1 * len(whole)


def _warned(capsys) -> bool:
    said = capsys.readouterr().err
    assert not said or "was changed since it was exported, its checksum differs" in said
    return bool(said)


@pytest.mark.parametrize(("name", "write"), [("a.tflite", write_tflite), ("a.onnx", write_onnx)])
def test_a_file_cut_anywhere_is_refused(tmp_path, name, write):
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged"):
            model_metadata.read(path)


def test_a_simplified_onnx_file_is_read_with_a_warning(tmp_path, capsys):
    """As onnxsim and onnxoptimizer write: another graph, and the same metadata_props."""
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "a.onnx"
    write_onnx(path)
    model = onnx.load(path)
    model.graph.initializer[0].name = "renamed"
    onnx.save(model, path)
    assert _read(path) == MADE
    assert _warned(capsys)


def test_a_saved_model(tmp_path, capsys):
    good = tmp_path / "good"
    write_saved_model(good)
    (good / "assets.extra" / "tf_serving_warmup_requests").write_bytes(b"theirs")
    assert _read(good) == MADE
    assert not _warned(capsys)
    weights = "variables/variables.data-00000-of-00001"
    for number, name in enumerate(("saved_model.pb", weights)):
        copy = shutil.copytree(good, tmp_path / f"bad{number}")
        (copy / name).write_bytes(b"x" + (copy / name).read_bytes()[1:])
        assert _read(copy) == MADE
        assert _warned(capsys)
    copy = shutil.copytree(good, tmp_path / "less")
    (copy / weights).unlink()
    assert _read(copy) == MADE
    assert _warned(capsys)
    copy = shutil.copytree(good, tmp_path / "renamed")
    text = (copy / "assets.extra" / "passport.json").read_text()
    (copy / "assets.extra" / "passport.json").write_text(text.replace('"car"', '"cat"'))
    assert _read(copy)["label_map"]["names"][0] == "cat"
    assert _warned(capsys)
