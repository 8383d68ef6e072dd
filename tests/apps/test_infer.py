"""Inference on a directory, a file and a glob: pictures and detections.json."""

import json

import numpy as np
import PIL.Image
import pytest

from common.errors import UserError


def test_a_directory_with_its_truth(trained, drawn, command, tmp_path):
    results = command(
        "infer",
        f"--weights={trained}",
        f"--images={drawn}/images",
        f"--annotations={drawn}/instances.json",
        f"--output_dir={tmp_path}",
        "--score_threshold=0.05",
        "--batch_size=5",
    )
    truth = json.loads((drawn / "instances.json").read_text())
    written = json.loads((tmp_path / "detections.json").read_text())
    assert len(written) == len(results)
    names = {image["id"]: image["file_name"] for image in truth["images"]}
    assert all(names[result["image_id"]] == result["file_name"] for result in written)
    assert all(result["score"] >= 0.05 for result in written)
    for image in truth["images"]:
        stem = image["file_name"].rpartition(".")[0]
        picture = PIL.Image.open(tmp_path / f"{stem}.png")
        assert picture.width > 2 * image["width"]  # truth and detections, side by side
    assert (tmp_path / "contact_sheet.png").exists()


def test_one_file_and_a_glob(trained, drawn, command, tmp_path):
    files = sorted((drawn / "images").glob("*.jpg"))
    one = command(
        "infer",
        f"--weights={trained}",
        f"--images={files[0]}",
        f"--output_dir={tmp_path}/one",
        "--score_threshold=0",
    )
    assert {result["file_name"] for result in one} == {files[0].name}
    assert (
        np.asarray(PIL.Image.open(tmp_path / "one" / f"{files[0].stem}.png")).shape[1]
        == PIL.Image.open(files[0]).width
    )
    several = command(
        "infer",
        f"--weights={trained}",
        f"--images={drawn}/images/*.jpg",
        f"--output_dir={tmp_path}/several",
        "--score_threshold=0",
    )
    assert {result["file_name"] for result in several} == {file.name for file in files}
    # An image's detections do not depend on what else is in its batch.
    again = [
        {k: v for k, v in r.items() if k != "image_id"} for r in several if r["file_name"] == files[0].name
    ]
    assert len(again) == len(one)
    for a, b in zip(one, again, strict=True):
        np.testing.assert_allclose(a["bbox"], b["bbox"], atol=0.05)
        assert a["category_id"] == b["category_id"]


def test_files_of_the_same_name_get_a_picture_each(trained, drawn, command, tmp_path):
    file = next((drawn / "images").glob("*.jpg"))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.jpg").write_bytes(file.read_bytes())
    (tmp_path / "a" / "notes.txt").write_text("no image")
    command("infer", f"--weights={trained}", f"--images={tmp_path}/*/*", f"--output_dir={tmp_path}/out")
    assert len(list((tmp_path / "out").glob("*1.png"))) == 2


def test_pictures_never_replace_the_images(trained, drawn, command, tmp_path):
    image = next((drawn / "images").glob("*.png"))
    (tmp_path / image.name).write_bytes(image.read_bytes())
    with pytest.raises(UserError, match=r"--output_dir=.* holds the images"):
        command("infer", f"--weights={trained}", f"--images={tmp_path}", f"--output_dir={tmp_path}")
    assert (tmp_path / image.name).read_bytes() == image.read_bytes()


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


@pytest.mark.parametrize("images", ["/nowhere", "/nowhere/*.jpg", ""])
def test_no_images_is_one_line(trained, command, tmp_path, images):
    with pytest.raises(UserError, match=r"images|nowhere"):
        command("infer", f"--weights={trained}", f"--images={images}", f"--output_dir={tmp_path}")
