"""Bad data stop each entry point at its door, all of it listed, before anything is built or written."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from common.datacheck.issues import DataError
from common.errors import UserError
from tests.faults.data_set import DataSet

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def faulty(tmp_path) -> DataSet:
    """Two unreadable images and a box of three numbers."""
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


def words(data: DataSet) -> list[str]:
    names = [image["file_name"] for image in data.document["images"][1:3]]
    return [*names, f"annotation {data.annotation['id']} ", "[1, 2, 3]"]


def test_training_lists_every_fault(faulty, tiny_train, tmp_path):
    with pytest.raises(DataError) as raised:
        tiny_train(faulty.directory, tmp_path / "run")
    assert all(word in str(raised.value) for word in words(faulty))
    assert not (tmp_path / "run").exists()


def test_training_can_skip_images(with_bad_images, tiny_train, tmp_path, capsys):
    tiny_train(with_bad_images.directory, tmp_path / "run", "--on_bad_image=skip", "--epochs=1")
    said = capsys.readouterr().err
    assert "training data: 4 images" in said and "evaluation data: 4 images" in said
    assert all(name in said for name in ("001.jpg", "002.jpg"))
    assert (tmp_path / "run" / "metrics.json").exists()


def test_a_lower_limit_of_pixels(drawn, tiny_train, tmp_path):
    with pytest.raises(DataError, match="--max_megapixels"):
        tiny_train(drawn, tmp_path / "run", "--max_megapixels=0.005")


def test_a_batch_larger_than_the_data(drawn, tiny_train, tmp_path):
    with pytest.raises(DataError, match="12 images, --batch_size=13"):
        tiny_train(drawn, tmp_path / "run", "--batch_size=13")


def test_evaluation_and_inference_stop_too(faulty, with_bad_images, trained, command, tmp_path):
    data = with_bad_images
    given = [f"--weights={trained}", f"--output_dir={tmp_path}/out"]
    truth = [f"--eval_images={data.images_dir}", f"--eval_annotations={data.json_path}"]
    with pytest.raises(DataError, match=r"001\.jpg"):
        command("eval", *given, *truth)
    with pytest.raises(DataError, match=r"(?s)001\.jpg.*002\.jpg"):
        command("infer", *given, f"--images={data.images_dir}")
    command("infer", *given, f"--images={data.images_dir}", "--on_bad_image=skip")
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"000.png", "003.png", "004.png", "005.png", "contact_sheet.png"}


def test_exit_code_and_no_traceback(app, faulty, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, f"{app.name}/train.py", f"--model_name={app.model_name}"),
            *(f"--train_images={faulty.images_dir}", f"--train_annotations={faulty.json_path}"),
            f"--output_dir={tmp_path}/run",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    *_, said = done.stderr.partition("error: 3 kinds of faults in the data:\n")
    assert len(said.splitlines()) == 3
    assert all(word in done.stderr for word in words(faulty))


@pytest.mark.parametrize("pipeline_type", ["dali_cpu", "tensorflow"])
@pytest.mark.parametrize("damage", ["text", "empty", "truncated"])
def test_a_damaged_image_is_named(trained, drawn, command, tmp_path, pipeline_type, damage):
    good = sorted((drawn / "images").glob("*.jpg"))[:2]
    for file in good:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = {"text": b"not an image" * 50, "empty": b"", "truncated": good[0].read_bytes()[:700]}[damage]
    (tmp_path / "bad.jpg").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.jpg") as error:
        command(
            "infer",
            f"--weights={trained}",
            f"--images={tmp_path}",
            f"--output_dir={tmp_path}/out",
            f"--pipeline_type={pipeline_type}",
        )
    assert good[0].name not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_image_stops_training_by_its_name(tiny_train, drawn, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(drawn, data)
    victim = sorted((data / "images").glob("*.jpg"))[3]
    victim.write_bytes(b"not an image" * 50)
    with pytest.raises(UserError, match=re.escape(victim.name)):
        tiny_train(data, tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"bad\.mp4: no frame of it can be decoded"),
        (["--pipeline_type=dali_cpu"], "reads no videos"),
    ],
)
def test_a_video_that_cannot_be_read_is_one_line(trained, command, tmp_path, arguments, message):
    pytest.importorskip("cv2")
    (tmp_path / "bad.mp4").write_bytes(b"no video" * 99)
    with pytest.raises(UserError, match=message) as error:
        command(
            "infer",
            f"--weights={trained}",
            f"--images={tmp_path}/bad.mp4",
            f"--output_dir={tmp_path}/out",
            *arguments,
        )
    assert "\n" not in str(error.value)
