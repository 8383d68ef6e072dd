"""Numbers of data sets, counted again by pycocotools, by NumPy and by hand."""

import contextlib
import io
import json
import time

import numpy as np
import pytest
from pycocotools.coco import COCO

from common.annotations import Annotations
from common.datacheck.coco import load_coco
from common.labels import LabelMap
from tests.common.made_annotations import annotations
from tools.report.statistics import ClassCount, describe


def coco_of(path):
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(path))


def test_counts_on_the_drawn_set_are_those_of_a_plain_loop(drawn):
    """It has a crowd, a box without area, one outside, and one that reaches outside."""
    found = describe(load_coco(drawn / "instances.json", None))
    document = json.loads((drawn / "instances.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in document["images"]}
    boxes = {}
    for annotation in document["annotations"]:
        height, width = sizes[annotation["image_id"]]
        x, y, w, h = annotation["bbox"]
        left, top, right, bottom = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
        if not annotation["iscrowd"] and right > left and bottom > top:
            boxes.setdefault(annotation["image_id"], []).append(annotation["category_id"])
    assert (found.images, found.boxes) == (12, sum(map(len, boxes.values())))
    assert (found.targets.num_crowds, found.targets.num_clipped, found.targets.num_dropped) == (1, 1, 2)
    assert found.crowding["0"] == 12 - len(boxes)
    expected = [
        ClassCount(i, name, sum(of.count(i) for of in boxes.values()), sum(i in of for of in boxes.values()))
        for i, name in ((3, "car"), (17, "cat"), (90, "toothbrush"))
    ]
    assert sorted(found.classes, key=lambda of: of.category_id) == expected
    assert sum(of.boxes for of in found.classes) == found.boxes
    assert found.boxes_per_image.max() == max(map(len, boxes.values()))


@pytest.mark.parametrize("name", ["instances_train", "instances_val"])
def test_areas_and_classes_are_those_of_pycocotools_on_bccd(bccd, name):
    path = bccd / f"{name}.json"
    check_against_pycocotools(path, describe(load_coco(path, None)))


def test_areas_and_classes_are_those_of_pycocotools_on_coco128(coco128):
    """Here the areas are of outlines, and there are crowds and classes without boxes."""
    path = coco128 / "instances.json"
    found = describe(load_coco(path, None))
    check_against_pycocotools(path, found)
    assert (found.images, found.boxes, found.targets.num_crowds) == (128, 929, 10)
    assert (found.crowding["0"], len(found.frequent_sizes)) == (2, 58)
    assert sum(not of.boxes for of in found.classes) == 9
    assert sum(count for *_, count in found.frequent_sizes) == 128


def check_against_pycocotools(path, found):
    coco = coco_of(path)
    for annotation in coco.dataset["annotations"]:
        if min(annotation["bbox"][2:]) <= 0:  # dropped
            annotation["area"], annotation["iscrowd"] = -1.0, 1
    ranges = {"small": (-0.5, 32**2), "medium": (32**2 - 1e-9, 96**2), "large": (96**2 - 1e-9, 1e10)}
    for size, area_range in ranges.items():  # getAnnIds leaves both limits out
        assert found.by_area[size] == len(coco.getAnnIds(areaRng=area_range, iscrowd=False)), size
    assert sum(found.by_area.values()) == found.boxes
    for of in found.classes:
        ids = coco.getAnnIds(catIds=[of.category_id], iscrowd=False)
        assert of.name == coco.cats[of.category_id]["name"]
        assert of.boxes == len(ids)
        assert of.images == len({coco.anns[i]["image_id"] for i in ids})


def test_shapes_by_hand():
    found = describe(
        annotations(
            [(100, 200), (100, 200), (300, 150)],
            [(0, 0, 10, 10, 40, 10), (0, 1, 0, 0, 200, 100), (2, 1, 20, 30, 30, 120)],
        )
    )
    assert found.image_sizes.tolist() == [[100, 200], [100, 200], [300, 150]]
    assert found.frequent_sizes == [(100, 200, 2), (300, 150, 1)]
    np.testing.assert_allclose(found.box_aspects, [4, 2, 0.25], rtol=1e-6)
    np.testing.assert_allclose(found.box_sides_px, np.sqrt([400, 20_000, 3600]), rtol=1e-6)


def test_a_clipped_box_counts_with_what_is_left_of_it():
    found = describe(annotations([(100, 100)], [(0, 0, -30, 20, 50, 20)]))
    assert (found.boxes, found.targets.num_clipped) == (1, 1)
    np.testing.assert_allclose(found.box_sides_px, [20], rtol=1e-6)
    np.testing.assert_allclose(found.box_aspects, [1], rtol=1e-6)


def test_limits_of_cocos_areas():
    areas = [1023.9, 1024, 9215.9, 9216, 1, 90_000]
    boxes = [(0, 0, 5, 5, 300, 300)] * 6
    found = describe(annotations([(400, 400)], boxes, areas=areas))
    assert found.by_area == {"small": 2, "medium": 2, "large": 2}


def test_boxes_per_image_by_hand():
    counts = [0, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 40]
    rows = [(i, 0, 1, 1, 5, 5) for i, count in enumerate(counts) for _ in range(count)]
    found = describe(annotations([(50, 50)] * len(counts), rows))
    assert found.crowding == {
        "0": 2, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9-16": 2, "17-32": 1, "33-40": 1
    }  # fmt: skip
    assert found.boxes_per_image.tolist() == counts


def test_the_most_frequent_sizes_come_first_and_the_smallest_of_equals():
    sizes = [(5, 7)] * 2 + [(4, 9)] * 3 + [(4, 2)] * 2 + [(70000, 80000)]
    found = describe(annotations(sizes, []))
    assert found.frequent_sizes == [(4, 9, 3), (4, 2, 2), (5, 7, 2), (70000, 80000, 1)]


def test_without_boxes_without_images_and_with_crowds_alone():
    empty = describe(annotations([(50, 60)] * 2, []))
    assert (empty.boxes, empty.crowding, len(empty.box_sides_px)) == (0, {"0": 2}, 0)
    assert [of.boxes for of in empty.classes] == [0, 0, 0]
    crowd = describe(annotations([(50, 60)], [(0, 1, 1, 1, 20, 20)], crowds=[0]))
    assert (crowd.boxes, crowd.targets.num_crowds, crowd.crowding) == (0, 1, {"0": 1})
    assert sum(crowd.by_area.values()) == 0
    nothing = describe(annotations([], []))
    assert (nothing.images, nothing.frequent_sizes, len(nothing.boxes_per_image)) == (0, [], 0)


def test_classes_are_ordered_by_frequency_then_by_id():
    rows = [(0, c, 1, 1, 20, 20) for c in (1, 2, 2, 0)]
    found = describe(annotations([(50, 60)], rows), {"JPEG": 1})
    assert [(of.name, of.boxes, of.images) for of in found.classes] == [
        ("cow", 2, 1), ("cat", 1, 1), ("dog", 1, 1)
    ]  # fmt: skip
    assert found.formats == {"JPEG": 1}


def test_as_large_as_coco_in_seconds():
    rng = np.random.default_rng(0)
    counts = rng.poisson(7.35, 117_000)
    total = int(counts.sum())
    corner, size = rng.uniform(0, 300, (total, 2)), rng.uniform(1, 300, (total, 2))
    large = Annotations(
        label_map=LabelMap.numbered(80),
        image_ids=np.arange(117_000),
        file_names=[""] * 117_000,
        image_sizes=rng.integers(300, 640, (117_000, 2), dtype=np.int32),
        box_image=np.repeat(np.arange(117_000), counts),
        boxes_ltwh_px=np.concatenate([corner, size], axis=1),
        category_ids=rng.integers(1, 81, total),
        is_crowd=rng.random(total) < 0.01,
        areas=size.prod(axis=1),
        origin="large",
    )
    start = time.process_time()
    found = describe(large)
    assert time.process_time() - start < 10  # about one second
    assert found.boxes == len(large.target_boxes.boxes) > 800_000
