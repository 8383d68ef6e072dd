"""Tests what the commands do with data that have empty, unreadable and wrongly annotated images."""

import json
import subprocess
import sys

import pytest

from common.data.check.issues import DataError
from tests.apps.conftest import coco_flags, one_app
from tests.conftest import ROOT
from tests.faults.data_set import DataSet
from tests.refusal import refusal
from tests.small_apps import eagerly


@pytest.fixture
def faulty(tmp_path) -> DataSet:
    """An empty image file, an image file with text, and a box of three numbers."""
    data = DataSet(tmp_path / "data", 5)
    first, second = data.document["images"][1:3]
    (data.images_dir / first["file_name"]).write_bytes(b"")
    (data.images_dir / second["file_name"]).write_text("404: not found\n")
    data.annotation["bbox"] = [1, 2, 3]
    data.write()
    return data


@pytest.fixture
def with_bad_images(faulty) -> DataSet:
    faulty.annotation["bbox"] = [1, 2, 3, 4]
    faulty.json_path.write_text(json.dumps(faulty.document))
    return faulty


@one_app
def test_training_with_on_bad_image_skip_leaves_bad_images_out(with_bad_images, tiny_train, tmp_path, capsys):
    flags = ["--on_bad_image=skip", "--epochs=1", "--steps_per_epoch=1"]
    tiny_train(with_bad_images.directory, tmp_path / "run", *flags)
    messages = capsys.readouterr().err
    assert "training data: 4 images" in messages and "evaluation data: 4 images" in messages
    assert all(name in messages for name in ("001.jpg", "002.jpg"))
    assert (tmp_path / "run" / "metrics.json").exists()


@one_app
def test_train_py_refuses_data_with_an_image_above_its_max_megapixels_flag(drawn, tiny_train, tmp_path):
    flag = "--max_megapixels=0.005"
    assert "--max_megapixels" in refusal(tiny_train, drawn, tmp_path / "run", flag, error=DataError)


@one_app
def test_evaluation_and_inference_refuse_bad_images_and_inference_can_skip_them(
    with_bad_images, trained, command, tmp_path
):
    arguments = [f"--weights={trained}", f"--output_dir={tmp_path}/out"]
    data_flags = coco_flags(with_bad_images.directory, "eval")
    assert "001.jpg" in refusal(command, "eval", *arguments, *data_flags, error=DataError)
    arguments.append(f"--images={with_bad_images.images_dir}")
    message = refusal(command, "infer", *arguments, error=DataError)
    assert 0 <= message.find("001.jpg") < message.find("002.jpg")
    with eagerly():
        command("infer", *arguments, "--on_bad_image=skip")
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"000.png", "003.png", "004.png", "005.png", "contact_sheet.png"}


@one_app
def test_train_py_lists_every_error_of_the_data_without_a_traceback(app, faulty, tmp_path):
    command = [sys.executable, f"{ROOT}/{app.name}/train.py", f"--model_name={app.model_name}"]
    command += [*coco_flags(faulty.directory, "train"), f"--output_dir={tmp_path}/run"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 1, process.stderr
    assert process.stdout == "" and "Traceback" not in process.stderr
    *_, message = process.stderr.partition("error: 3 kinds of faults in the data:\n")
    assert len(message.splitlines()) == 3
    names = [image["file_name"] for image in faulty.document["images"][1:3]]
    words = [*names, f"annotation {faulty.annotation['id']} ", "[1, 2, 3]"]
    assert all(word in message for word in words)
    assert not (tmp_path / "run").exists()
