import functools
import json

import PIL.Image
import pytest

from common.data.check.issues import DataError
from common.data.coco import load_coco
from tests.refusal import refusal
from tests.tools.conversion.exports import write_coco_results
from tests.tools.conversion.labelled_images import options_of
from tools.convert import convert

BOXES = [[3, 4, 7, 8], [1, 1, 9.5, 9], [0, 5, 20, 10]]


@pytest.fixture
def detections(tmp_path):
    """The file detections.json, with its images next to it."""
    return write_coco_results(tmp_path / "found")


def run(source, target, **options):
    return convert(source, target, options_of(**options))


refused = functools.partial(refusal, run, "detections", "coco")


def change(path, **values):
    """Replaces values of the last record of a json."""
    document = json.loads(path.read_text())
    records = document["images"] if isinstance(document, dict) else document
    records[-1] |= values
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("target", ["coco", "yolo", "voc", "cvat"])
def test_detections_written_as_labels_and_read_back_have_the_same_boxes_and_ids(detections, tmp_path, target):
    found, labels = detections.parent, tmp_path / "labels.json"
    names = {"input": detections, "images": found}
    run("detections", target, **names, output=labels, score_threshold=0.1)
    images = found
    if target != "coco":
        back = {"input": labels, "output": tmp_path / "back.json", "label_map": found / "image_info.json"}
        labels, images = back["output"], run(target, "coco", **back)[1]
    annotations = load_coco(labels, images)
    assert annotations.boxes_ltwh_px.tolist() == BOXES
    assert annotations.category_ids.tolist() == [7, 5, 5]
    assert annotations.label_map.names == ("dog", "cat")
    assert annotations.file_names == ["a.png", "b.png"]
    if target == "coco":
        assert annotations.image_ids.tolist() == [1, 2]


def test_detections_below_the_score_threshold_are_left_out_but_their_image_is_not(detections, tmp_path):
    change(detections, image_id=2)
    document = json.loads(detections.read_text())
    detections.write_text(json.dumps(document[::2]))  # the dog of b.png is left out
    names = {"input": detections, "images": detections.parent}
    for threshold, boxes in ((0.2, BOXES[:2]), (0.21, BOXES[:1])):
        parts, _ = run(
            "detections", "yolo", **names, output=tmp_path / str(threshold), score_threshold=threshold
        )
        assert next(iter(parts.values())).boxes_ltwh_px.tolist() == boxes
    assert (tmp_path / "0.21/labels/b.txt").read_text() == ""
    message = refused(**names, output=tmp_path / "x.json", score_threshold=0.99)
    assert message.endswith("has none of the 2 detections with a score of at least 0.99: nothing to convert")


def test_detections_of_eval_py_are_read_with_the_json_of_the_evaluation_data(detections, tmp_path):
    info = detections.with_name("image_info.json").rename(tmp_path / "instances.json")
    names = {"input": detections, "images": detections.parent, "output": tmp_path / "x.json"}
    message = refused(**names)
    assert message.endswith(
        "image_info.json does not exist: give --image_info=FILE, a json with COCO's `images` and `categories`"
    )
    run("detections", "coco", **names, image_info=info)
    assert load_coco(tmp_path / "x.json").boxes_ltwh_px.tolist() == BOXES[::2]


CHANGES = {
    "unknown image": ("detections.json", {"image_id": 9}, "unknown image: detection 3 (image 9)"),
    "unknown category": ("detections.json", {"category_id": 9}, "detection 3 (image 1) is of category 9"),
    "another size": ("image_info.json", {"width": 41}, "is 40 x 20 pixels, the annotations have 41 x 20"),
    "a missing image": ("image_info.json", {"file_name": "c.png"}, "c.png"),
    "a repeated image": ("image_info.json", {"id": 1}, "image 1 is given 2 times: images[0], images[1]"),
    "a repeated file": ("image_info.json", {"file_name": "a.png"}, "file 'a.png' is given 2 times"),
}


@pytest.mark.parametrize(("file", "values", "words"), CHANGES.values(), ids=CHANGES)
def test_detections_that_do_not_fit_their_images_are_refused(detections, tmp_path, file, values, words):
    change(detections.with_name(file), **values)
    names = {"input": detections, "images": detections.parent, "output": tmp_path / "x.json"}
    assert words in refused(**names, error=DataError)
    assert not (tmp_path / "x.json").exists()


def test_files_that_are_not_detections_or_image_info_are_refused_with_their_name(detections, tmp_path):
    names = {"images": detections.parent, "output": tmp_path / "x.json"}
    change(detections, score=None)
    assert refused(input=detections, **names).endswith("Expected `float`, got `null` - at `$[2].score`")
    change(detections, score=0.5)
    detections.with_name("image_info.json").write_text("[]")
    assert "image_info.json is not a json with COCO's `images`: " in refused(input=detections, **names)
    assert refused(input=detections, output=tmp_path / "x.json").startswith(
        "--from=detections needs --images"
    )


def test_image_of_detections_in_a_sub_folder_keeps_its_id(detections, tmp_path):
    (detections.parent / "cam").mkdir()
    PIL.Image.new("RGB", (40, 20)).save(detections.parent / "cam" / "c.png")
    change(detections.with_name("image_info.json"), file_name="cam/c.png", id=5_000_000_000)
    document = json.loads(detections.read_text())
    document[1]["image_id"] = 5_000_000_000
    detections.write_text(json.dumps(document))
    names = {"input": detections, "images": detections.parent, "output": tmp_path / "x.json"}
    parts, _ = run("detections", "coco", **names)
    assert next(iter(parts.values())).image_ids.tolist() == [1, 5_000_000_000]
