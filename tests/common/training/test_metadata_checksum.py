"""Damage of exported files is noticed, wherever it is; what is not ours does not count."""

import json
import pathlib
import shutil
import zipfile

import numpy as np
import pytest

from common.errors import UserError
from common.training import metadata_checksum, metadata_files, model_metadata

MADE = {"app": "yolov4", "label_map": {"names": ["car", "Ärger"]}, "AP": 0.1 + 0.2, "export": {"nms": "none"}}
BODY = np.random.default_rng(5).integers(0, 256, 400, np.uint8).tobytes()
SEALED = json.loads(metadata_checksum.seal(json.dumps(MADE), [BODY]))


def write_tflite(path: pathlib.Path) -> None:
    path.write_bytes(BODY)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(metadata_files.FILE, json.dumps(SEALED))


def write_onnx(path: pathlib.Path) -> None:
    onnx = pytest.importorskip("onnx")
    weights = onnx.helper.make_tensor("w", onnx.TensorProto.UINT8, [len(BODY)], BODY, raw=True)
    model = onnx.helper.make_model(onnx.helper.make_graph([], "weights", [], [], [weights]))
    body = model.SerializeToString()
    text = metadata_checksum.seal(json.dumps(MADE), [body])
    path.write_bytes(body + metadata_files.onnx_field(text))
    onnx.checker.check_model(onnx.load(path))  # protocol buffers may be continued like this


def write_saved_model(path: pathlib.Path) -> None:
    (path / "variables").mkdir(parents=True)
    (path / "saved_model.pb").write_bytes(BODY[:99])
    (path / "variables" / "variables.data-00000-of-00001").write_bytes(BODY)
    folder = path / metadata_files.SAVED_MODEL_FOLDER
    text = metadata_checksum.seal(json.dumps(MADE), metadata_checksum.directory_body(path, folder.name))
    folder.mkdir()
    (folder / metadata_files.FILE).write_text(text)


def _read(path: pathlib.Path) -> dict:
    found = model_metadata.read(path)
    return {name: found.get(name) for name in MADE}


@pytest.mark.parametrize(("name", "write"), [("a.tflite", write_tflite), ("a.onnx", write_onnx)])
def test_a_flipped_bit_in_any_byte(tmp_path, name, write):
    """It is refused in one line; or it hit what says nothing, a date or the name of the checksum."""
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    assert _read(path) == MADE
    body = whole.index(BODY)
    silent = 0
    for place, bit in enumerate(np.random.default_rng(6).integers(0, 8, len(whole)).tolist()):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            assert _read(path) == MADE, place
        except UserError as error:
            assert "damaged" in str(error)
            assert "\n" not in str(error)
        else:
            silent += 1
            assert not body <= place < body + len(BODY)
    assert silent < 0.1 * len(whole)


@pytest.mark.parametrize(("name", "write"), [("a.tflite", write_tflite), ("a.onnx", write_onnx)])
def test_a_file_cut_anywhere(tmp_path, name, write):
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged"):
            model_metadata.read(path)


def test_a_saved_model(tmp_path):
    write_saved_model(tmp_path / "good")
    assert _read(tmp_path / "good") == MADE
    (tmp_path / "good" / "assets.extra" / "tf_serving_warmup_requests").write_bytes(b"theirs")
    assert _read(tmp_path / "good") == MADE
    for number, name in enumerate(("saved_model.pb", "variables/variables.data-00000-of-00001")):
        copy = shutil.copytree(tmp_path / "good", tmp_path / f"bad{number}")
        (copy / name).write_bytes(b"x" + (copy / name).read_bytes()[1:])
        with pytest.raises(UserError, match="its checksum is wrong"):
            model_metadata.read(copy)
    copy = shutil.copytree(tmp_path / "good", tmp_path / "less")
    (copy / "variables" / "variables.data-00000-of-00001").unlink()
    with pytest.raises(UserError, match="its checksum is wrong"):
        model_metadata.read(copy)
    copy = shutil.copytree(tmp_path / "good", tmp_path / "renamed")
    text = (copy / "assets.extra" / "passport.json").read_text()
    (copy / "assets.extra" / "passport.json").write_text(text.replace('"car"', '"cat"'))
    with pytest.raises(UserError, match="its checksum is wrong"):
        model_metadata.read(copy)
