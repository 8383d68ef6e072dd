"""Inference on a directory, a file and a glob: pictures and detections.json."""

import collections
import json
import re
import zipfile

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


@pytest.mark.parametrize("images", ["/nowhere", "/nowhere/*.jpg", ""])
def test_no_images_is_one_line(trained, command, tmp_path, images):
    with pytest.raises(UserError, match=r"images|nowhere"):
        command("infer", f"--weights={trained}", f"--images={images}", f"--output_dir={tmp_path}")


def test_an_empty_directory_is_one_line(trained, command, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: no image there \(\.jpg") as error:
        command("infer", f"--weights={trained}", f"--images={tmp_path}/empty", f"--output_dir={tmp_path}/out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_order_seconds_and_a_submission(trained, drawn, command, tmp_path, capsys):
    """Twelve files whose names are numbers: what the server gets has those ids, all scores, no file names."""
    (tmp_path / "images").mkdir()
    numbers = [140 - 7 * i for i in range(12)]  # as text 105 comes before 63
    for file, number in zip(sorted((drawn / "images").iterdir()), numbers, strict=True):
        (tmp_path / "images" / f"{number}{file.suffix}").write_bytes(file.read_bytes())
    target = tmp_path / "detections_test-dev2017_tiny_results.zip"
    results = command(
        "infer",
        f"--weights={trained}",
        f"--images={tmp_path}/images",
        f"--output_dir={tmp_path}/out",
        f"--submission={target}",
        "--score_threshold=0.2",
        "--batch_size=2",
        "--nodraw",
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["detections.json"]
    with zipfile.ZipFile(target) as archive:
        (name,) = archive.namelist()
        sent = json.loads(archive.read(name))
    assert name == "detections_test-dev2017_tiny_results.json"
    per_image = collections.Counter(result["image_id"] for result in sent)
    assert set(per_image) <= set(numbers)
    assert max(per_image.values()) <= 100
    assert {result["category_id"] for result in sent} <= {3, 17, 90}
    assert set(sent[0]) == {"image_id", "category_id", "bbox", "score"}
    assert min(result["score"] for result in sent) < 0.2
    confident = [result for result in sent if result["score"] >= 0.2]
    assert sorted(map(str, confident)) == sorted(
        str({key: result[key] for key in sent[0]}) for result in results
    )
    said = capsys.readouterr().out
    assert f"{target}: {len(sent)} detections in 12 images" in said
    assert re.search(r"^12 images in \d+\.\d s, compiling included", said, re.MULTILINE)
    written = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert [result["image_id"] for result in written] == sorted(result["image_id"] for result in written)


def test_ids_from_an_image_list(trained, drawn, command, tmp_path):
    document = json.loads((drawn / "instances.json").read_text())
    del document["annotations"]
    del document["images"][3]
    (tmp_path / "info.json").write_text(json.dumps(document))
    results = command(
        "infer",
        f"--weights={trained}",
        f"--images={drawn}/images",
        f"--image_info={tmp_path}/info.json",
        f"--output_dir={tmp_path}/out",
        f"--submission={tmp_path}/out/detections_test-dev2017_tiny_results.json",
        "--score_threshold=0",
        "--nodraw",
    )
    names = {image["id"]: image["file_name"] for image in document["images"]}
    assert results
    assert all(names[result["image_id"]] == result["file_name"] for result in results)
    sent = json.loads((tmp_path / "out" / "detections_test-dev2017_tiny_results.json").read_text())
    assert {result["image_id"] for result in sent} <= set(names)


@pytest.fixture(scope="module")
def clip(drawn, tmp_path_factory):
    """Seven drawn images, all of one size, as a video; and the same images as files."""
    cv2 = pytest.importorskip("cv2")
    directory = tmp_path_factory.mktemp("clip")
    (directory / "frames").mkdir()
    code = cv2.VideoWriter_fourcc(*"FFV1")  # without loss
    writer = cv2.VideoWriter(str(directory / "clip.avi"), code, 5, (96, 64))
    for file in sorted((drawn / "images").iterdir())[:7]:
        image = PIL.Image.open(file).convert("RGB").resize((96, 64))
        writer.write(np.asarray(image)[..., ::-1].copy())
    writer.release()
    capture = cv2.VideoCapture(str(directory / "clip.avi"))
    for number in range(7):
        _, frame = capture.read()
        cv2.imwrite(str(directory / "frames" / f"{number}.png"), frame)
    return directory


def test_a_video_is_its_frames(trained, clip, command, tmp_path, capsys):
    """The same boxes as from the frames as files, in seven frames of which the last batch has three."""
    flags = [f"--weights={trained}", "--score_threshold=0", "--batch_size=4"]
    found = command("infer", *flags, f"--images={clip}/clip.avi", f"--output_dir={tmp_path}/video")
    assert "detections in 7 frames: see " in capsys.readouterr().out
    images = [f"--images={clip}/frames", f"--output_dir={tmp_path}/images", "--pipeline_type=tensorflow"]
    expected = command("infer", *flags, *images)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a["image_id"] == a["frame"] == b["image_id"]
        assert a["category_id"] == b["category_id"]
        np.testing.assert_allclose(a["bbox"], b["bbox"], atol=0.02)
        assert a["seconds"] == pytest.approx(a["frame"] / 5)
    assert json.loads((tmp_path / "video" / "detections.json").read_text())[0]["file_name"] == "clip.avi"
    import cv2

    capture = cv2.VideoCapture(str(tmp_path / "video" / "clip.mp4"))
    frames = [capture.read()[1] for _ in range(7)]
    assert frames[6].shape == (64, 96, 3)
    assert not capture.read()[0]
    plain = cv2.imread(str(clip / "frames" / f"{found[0]['frame']}.png"))
    assert np.abs(frames[found[0]["frame"]].astype(int) - plain).max() > 100  # a box is drawn
    assert not list((tmp_path / "video").glob(".tmp-*"))


REFUSED = {
    "no such video": (["--images={tmp}/none.mp4"], r"none\.mp4: there is no such file"),
    "video over itself": (["--images={clip}/clip.avi", "--output_dir={clip}"], "holds the images"),
    "video with ids": (["--images={clip}/clip.avi", "--submission=a.zip"], "--submission is for images"),
    "names without ids": (
        ["--images={clip}/frames", "--submission={tmp}/a.zip", "--image_info={tmp}/info.json"],
        r"knows none of the 7 images, not even '0\.png'",
    ),
    "no ids at all": (
        ["--images={tmp}/frog.png", "--submission={tmp}/a.zip"],
        r"'frog\.png' is not a number",
    ),
    "no results file": (["--images={clip}/frames", "--submission={tmp}/a.txt"], r"must end in \.json or"),
    "two lists of ids": (
        ["--images={tmp}/frog.png", "--annotations={tmp}/info.json", "--image_info={tmp}/info.json"],
        "give one of them",
    ),
    "other categories": (
        ["--images={clip}/frames/3.png", "--image_info={tmp}/other.json"],
        r"category 3 is 'car', in .*other\.json it is 'bus'",
    ),
    "other categories of annotations": (
        ["--images={clip}/frames/3.png", "--annotations={tmp}/other.json", "--submission={tmp}/a.zip"],
        r"category 3 is 'car', in .*other\.json it is 'bus'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_one_line(trained, clip, command, tmp_path, case):
    arguments, message = REFUSED[case]
    (tmp_path / "frog.png").write_bytes((clip / "frames" / "3.png").read_bytes())
    (tmp_path / "info.json").write_text('{"images": [{"id": 1, "file_name": "a.jpg"}]}')
    image = {"id": 1, "file_name": "3.png", "width": 96, "height": 64}
    box = {"id": 1, "image_id": 1, "category_id": 3, "bbox": [2, 3, 20, 10], "area": 200, "iscrowd": 0}
    other = {"images": [image], "categories": [{"id": 3, "name": "bus"}], "annotations": [box]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    filled = [argument.format(tmp=tmp_path, clip=clip) for argument in arguments]
    with pytest.raises(UserError, match=message) as error:
        command("infer", f"--weights={trained}", f"--output_dir={tmp_path}/out", *filled)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a.zip").exists()
