import dataclasses
import json
import os

import numpy as np
import pytest

from common.data.coco import load_coco
from tests.common.image_variants import pillow
from tests.common.made_annotations import annotations
from tests.common.record_writing import PNG
from tests.refusal import refusal
from tools.conversion.coco_writer import file_names, round_boxes, write_coco, write_images

JPEG = pillow("JPEG")


def named(*names):
    return dataclasses.replace(annotations([(20, 30)] * len(names), []), file_names=list(names))


def test_written_coco_json_is_read_back_as_equal_annotations(drawn, tmp_path):
    truth = load_coco(drawn / "instances.json")
    write_coco(truth, tmp_path / "sub" / "out.json")
    assert load_coco(tmp_path / "sub" / "out.json").fingerprint() == truth.fingerprint()
    document = json.loads((tmp_path / "sub" / "out.json").read_text())
    keys = {"id", "image_id", "category_id", "bbox", "area", "iscrowd"}
    assert all(set(row) == keys for row in document["annotations"])
    assert [row["id"] for row in document["annotations"]] == list(range(1, truth.num_boxes + 1))
    assert [c["id"] for c in document["categories"]] == [3, 17, 90]
    assert os.listdir(tmp_path / "sub") == ["out.json"]


UNUSABLE = ["../up.jpg", "sub/../../up.jpg", "/etc/passwd", "", ".", "..", "nul\0.jpg", "line\nfeed.jpg"]
REPEATED = "sub//b.jpg"


@pytest.mark.parametrize("name", [*UNUSABLE, REPEATED])
def test_converted_images_are_all_named_by_id_if_one_file_name_is_unusable_or_repeated(name):
    names, encoded = ["a.jpg", "sub/./b.jpg", "grün 1.jpg"], [JPEG, JPEG, PNG, JPEG].__getitem__
    assert file_names(named(*names), encoded) == ["a.jpg", "sub/b.jpg", "grün 1.jpg"]
    assert file_names(named(*names, name), encoded) == ["101.jpg", "102.jpg", "103.png", "104.jpg"]


def test_existing_output_image_is_refused_without_overwrite_and_replaced_with_it(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.txt").write_text("mine")
    (tmp_path / "elsewhere.jpg").write_text("not to be touched")
    (tmp_path / "images" / "b.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    arguments = f"{tmp_path}/images", ["a.jpg", "b.jpg"], [JPEG, PNG].__getitem__
    assert "images/b.jpg exists already" in refusal(write_images, *arguments)
    assert sorted(os.listdir(tmp_path / "images")) == ["b.jpg", "mine.txt"]
    write_images(*arguments, overwrite=True)
    assert sorted(os.listdir(tmp_path / "images")) == ["a.jpg", "b.jpg", "mine.txt"]
    assert (tmp_path / "images" / "b.jpg").read_bytes() == PNG
    assert (tmp_path / "elsewhere.jpg").read_text() == "not to be touched"


def test_error_while_writing_converted_images_leaves_none_of_them(tmp_path):
    with pytest.raises(IndexError):
        write_images(f"{tmp_path}/images", ["a.jpg", "sub/b.jpg"], [JPEG].__getitem__)
    assert not os.listdir(tmp_path / "images")


def test_rounding_restores_the_pixel_boxes_that_were_stored_as_float32_fractions():
    random = np.random.default_rng(5)
    left_top = np.round(random.uniform(0, 300, (500, 2)), 2)
    boxes = np.concatenate([left_top, np.round(random.uniform(1, 150, (500, 2)), 2)], axis=1)
    boxes[:100] = np.round(boxes[:100])
    limits = np.array([640, 480, 640, 480])
    edges = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    stored = (edges / limits).astype(np.float32).astype(np.float64) * limits
    read = np.concatenate([stored[:, :2], stored[:, 2:] - stored[:, :2]], axis=1)
    assert np.abs(read - boxes).max() > 1e-6
    areas = np.round(boxes[:, 2] * boxes[:, 3] * 0.7, 4)
    rows = [(0, 0, *box) for box in read.tolist()]
    rounded = round_boxes(annotations([(480, 640)], rows, areas=areas.astype(np.float32)))
    np.testing.assert_array_equal(rounded.boxes_ltwh_px, boxes)
    np.testing.assert_array_equal(rounded.areas.astype(np.float32), areas.astype(np.float32))
    assert np.mean(rounded.areas == areas) > 0.5
    box_areas = round_boxes(annotations([(480, 640)], rows)).areas
    np.testing.assert_array_equal(box_areas, boxes[:, 2] * boxes[:, 3])
