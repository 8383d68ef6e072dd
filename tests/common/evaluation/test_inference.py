"""Tests the inputs and outputs of infer.py: image ids, refused flags, detections.json and pictures."""

import io
import json
import os
import pathlib
import re

import PIL.Image
import pytest

from common.args import InferArgs
from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import inference, sheets
from common.evaluation.inference import InferenceJob, look_up, read_image_info
from tests.common.training.small_model import full_disk
from tests.refusal import refusal

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))
DETECTIONS = [{"image_id": 1, "category_id": 17, "bbox": [5.0, 6.0, 20.0, 10.0], "score": 0.5}]


@pytest.fixture
def jpeg(drawn) -> bytes:
    return (drawn / "images" / "00.jpg").read_bytes()


@pytest.fixture
def images(jpeg, tmp_path):
    for name in ("007.jpg", "7.jpg"):
        (tmp_path / name).write_bytes(jpeg)
    return tmp_path


def job(images, output_dir, **options):
    return InferenceJob(InferArgs(images=str(images), output_dir=str(output_dir), **options))


def image_info(tmp_path, images, **more):
    path = tmp_path / "image_info.json"
    path.write_text(json.dumps({"info": {"year": 2017}, "images": images, **more}))
    return str(path)


def test_inference_output_in_the_input_directory_is_refused_only_if_boxes_are_drawn(images):
    assert "has the input files: choose another directory" in refusal(job, images, images, draw=True)
    times = {path: path.stat().st_mtime_ns for path in images.iterdir()}
    (result,) = job(images, images, draw=False).write(DETECTIONS, LABELS)
    assert result["category_id"] == 17
    for name in ("detections.json", "image_info.json"):
        (images / name).unlink()
    assert {path: path.stat().st_mtime_ns for path in images.iterdir()} == times


@pytest.mark.parametrize("draw", [True, False])
def test_inference_on_a_full_disk_is_a_user_error_and_writes_neither_pictures_nor_detections(
    images, draw, monkeypatch
):
    ready = job(images, images / "out", draw=draw)
    (images / "out" / "detections.json").write_text("earlier")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"^--output_dir=.*: No space left on device$"):
        ready.write(DETECTIONS, LABELS)
    assert os.listdir(images / "out") == ["detections.json"]
    assert (images / "out" / "detections.json").read_text() == "earlier"


@pytest.mark.parametrize(
    ("seconds", "weights", "cpu_only", "named"),
    [
        (31.0, "best.weights.h5", True, True),
        (29.0, "best.weights.h5", True, False),
        (31.0, "best.weights.h5", False, False),
        (31.0, "model.onnx", True, False),
    ],
)
def test_only_long_inference_from_weights_on_a_cpu_names_the_faster_export(
    images, seconds, weights, cpu_only, named, monkeypatch, capsys
):
    monkeypatch.setattr(inference, "is_cpu_only", lambda: cpu_only)
    job(images, images / "out").print_time(seconds, pathlib.Path(weights))
    printed = capsys.readouterr().out
    assert printed.startswith(f"2 images in {seconds:.1f} s, compiling included\n")
    assert ("export.py --format=litert) is faster on a CPU than best.weights.h5" in printed) == named


def test_input_images_of_the_same_file_name_get_one_output_image_each_of_the_input_size(jpeg, tmp_path):
    for name in ("a/1.jpg", "b/1.jpg", "a/b_1.jpg", "a_b/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jpeg)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    job(f"{tmp_path}/*/*", tmp_path / "out").write(DETECTIONS, LABELS)
    files = [path for path in (tmp_path / "out").glob("*.png") if path.name != "contact_sheet.png"]
    assert [PIL.Image.open(file).size for file in files] == [PIL.Image.open(io.BytesIO(jpeg)).size] * 4


def test_contact_sheet_of_infer_py_shows_the_images_with_many_classes_and_objects_first(
    jpeg, tmp_path, monkeypatch
):
    for number in range(9):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg)
    categories = {8: [3, 17], 2: [90, 90], 5: [3, 3, 3], 0: [17], 1: [17]}
    detections = [
        DETECTIONS[0] | {"image_id": image_id, "category_id": category_id}
        for image_id, ids in categories.items()
        for category_id in ids
    ]
    titles, contact_sheet = [], sheets.contact_sheet
    monkeypatch.setattr(
        sheets,
        "contact_sheet",
        lambda tiles: titles.extend(tile[0].title for tile in tiles) or contact_sheet(tiles),
    )
    job(tmp_path, tmp_path / "out").write(detections, LABELS)
    assert titles == ["8.jpg", "2.jpg", "5.jpg", "0.jpg", "1.jpg", "3.jpg"]


def test_two_input_images_with_the_same_image_id_are_refused(images):
    listed = [{"id": 7, "file_name": name} for name in ("007.jpg", "7.jpg")]
    with pytest.raises(UserError, match=r"'007\.jpg' and '7\.jpg' both have the id 7"):
        job(images, images / "out", draw=False, image_info=image_info(images, listed))


def test_inference_does_not_overwrite_the_image_info_that_it_reads(images, tmp_path):
    path = image_info(tmp_path, [{"id": 7, "file_name": "7.jpg"}])
    message = refusal(job, images, tmp_path, draw=False, image_info=path)
    assert message == f"--image_info={path} would be overwritten: choose another --output_dir"


REFUSED = {
    "missing directory": ({"images": "/nowhere"}, "nowhere"),
    "no --images": ({"images": ""}, "--images is missing"),
    "no --output_dir": ({"output_dir": ""}, "--output_dir is missing"),
    "directory without images": ({"images": "{tmp}/empty"}, r"empty: no image files found \(\.jpg"),
    "video that cannot be decoded": (
        {"images": "{tmp}/clip.3gp", "pipeline_type": "tensorflow"},
        r"clip\.3gp is damaged or not a video",
    ),
    "video with another suffix": ({"images": "{tmp}/clip.dat"}, r"video in place of an image: '.*clip\.dat'"),
    "missing video": ({"images": "{tmp}/none.mp4"}, r"none\.mp4: no such file"),
    "video with image_info": ({"images": "a.mp4", "image_info": "a.json"}, "--image_info is for images"),
    "video with DALI": ({"images": "a.mp4", "pipeline_type": "dali_cpu"}, "cannot read videos"),
    "annotations and image_info": ({"annotations": "a.json", "image_info": "a.json"}, "give one of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_inference_flags_are_refused_with_a_one_line_message_before_any_output(
    images, tmp_path, case
):
    flags, message = REFUSED[case]
    (tmp_path / "empty").mkdir()
    for name in ("clip.3gp", "clip.dat"):
        (tmp_path / name).write_bytes(b"\0\0\0\x1cftyp3gp4\0\0\2\0" + bytes(50))
    options = {"images": str(images), "output_dir": f"{tmp_path}/out"} | flags
    options = {name: value.replace("{tmp}", str(tmp_path)) for name, value in options.items()}
    assert re.search(message, refusal(job, **options))
    assert not (tmp_path / "out").exists()


def test_image_info_json_without_annotations_gives_image_ids_by_the_end_of_the_file_path(tmp_path, capsys):
    images = [{"id": 9, "file_name": "b.jpg", "height": 3, "width": 4}, {"id": 4, "file_name": "a/c.jpg"}]
    categories = [{"id": 3, "name": "car", "supercategory": "vehicle"}, {"id": 17, "name": "cat"}]
    ids, label_map = read_image_info(image_info(tmp_path, images, categories=categories))
    assert label_map.names == ("car", "cat")
    assert look_up(["/data/a/c.jpg", "x/b.jpg"], {**ids, "c.jpg": 1}, "f") == [4, 9]
    assert look_up(["d.jpg", "b.jpg", "e.jpg"], ids, "f") == [None, 9, None]
    messages = capsys.readouterr().err.splitlines()
    assert messages[1] == "f lists 1 of 3 files in --images; 2 are skipped"
    with pytest.raises(UserError, match=r"f lists none of the files in --images \('d\.jpg', \.\.\.\)"):
        look_up(["d.jpg", "e.jpg"], ids, "f")


def test_issues_and_other_categories_of_the_annotations_of_inference_are_logged(images, capfd):
    an_object = {"image_id": 7, "category_id": 17, "bbox": [5, 5, 9999, 9]}
    listed = [{"id": 7, "file_name": "007.jpg", "width": 100, "height": 50}]
    categories = [{"id": 17, "name": "cat"}, {"id": 90, "name": "spoon"}, {"id": 91, "name": "fork"}]
    path = image_info(images, listed, annotations=[an_object], categories=categories)
    ready = job(images, images / "out", draw=False, annotations=path)
    prefix = f"--annotations={path}: "
    assert f"{prefix}box that reaches outside its image: annotations[0]" in capfd.readouterr().err
    ready.check_categories(LABELS)
    assert capfd.readouterr().err.splitlines() == [
        f"{prefix}category 90 is 'spoon', in the weights it is 'toothbrush'",
        f"{prefix}category 91 is 'fork', in the weights it is absent",
    ]


BAD_LISTS = {
    "id as text": (
        '{"images": [{"id": "1", "file_name": "a.jpg"}]}',
        "is not a json with COCO's images: .*id",
    ),
    "no file name": ('{"images": [{"id": 1}]}', "file_name"),
    "truncated json": ("[1, 2", "is not a json"),
    "missing file": (None, "No such file"),
}


@pytest.mark.parametrize("case", BAD_LISTS)
def test_bad_image_info_json_is_refused_with_a_one_line_message(tmp_path, case):
    text, message = BAD_LISTS[case]
    path = tmp_path / "info.json"
    if text is not None:
        path.write_text(text)
    assert re.search(message, refusal(read_image_info, path))
