import time

import numpy as np
import pytest
from pycocotools.coco import COCO

from common.data.check.coco import load_coco
from tests.common.made_annotations import annotations
from tools.report.statistics import describe


def test_areas_and_classes_are_those_of_pycocotools_on_coco128(coco128):
    found = describe(load_coco(coco128 / "instances.json", None))
    coco = COCO(str(coco128 / "instances.json"))
    ranges = {"small": (-0.5, 32**2), "medium": (32**2 - 1e-9, 96**2), "large": (96**2 - 1e-9, 1e10)}
    for size, area_range in ranges.items():
        assert found.by_area[size] == len(coco.getAnnIds(areaRng=area_range, iscrowd=False)), size
    for of in found.classes:
        ids = coco.getAnnIds(catIds=[of.category_id], iscrowd=False)
        images = {coco.anns[i]["image_id"] for i in ids}
        assert (of.name, of.boxes, of.images) == (coco.cats[of.category_id]["name"], len(ids), len(images))
    assert (found.images, found.boxes, found.targets.num_crowds) == (128, 929, 10)
    assert (found.crowding["0"], len(found.frequent_sizes)) == (2, 58)
    assert sum(not of.boxes for of in found.classes) == 9


def test_shapes_by_hand():
    rows = [(0, 0, 10, 10, 40, 10), (0, 1, 0, 0, 200, 100), (2, 1, 20, 30, 30, 120), (2, 1, -30, 20, 50, 20)]
    rows += [(2, 0, 5, 5, 9, 9), (1, 0, 5, 5, 0, 9), (1, 1, 201, 5, 9, 9)]
    found = describe(annotations([(100, 200), (100, 200), (300, 150)], rows, crowds=[4]))
    assert found.image_sizes.tolist() == [[100, 200], [100, 200], [300, 150]]
    np.testing.assert_allclose(found.box_aspects, [4, 2, 0.25, 1], rtol=1e-6)
    np.testing.assert_allclose(found.box_sides_px, np.sqrt([400, 20_000, 3600, 400]), rtol=1e-6)
    assert found.by_area == {"small": 2, "medium": 1, "large": 1}
    assert found.boxes_per_image.tolist() == [2, 0, 2]
    targets = found.targets
    assert (found.boxes, targets.num_clipped, targets.num_dropped, targets.num_crowds) == (4, 1, 2, 1)


def test_limits_of_cocos_areas():
    areas = [1023.9, 1024, 9215.9, 9216, 1, 90_000]
    found = describe(annotations([(400, 400)], [(0, 0, 5, 5, 300, 300)] * 6, areas=areas))
    assert found.by_area == {"small": 2, "medium": 2, "large": 2}


def test_boxes_per_image_by_hand():
    counts = [0, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 40]
    rows = [(i, 0, 1, 1, 5, 5) for i, count in enumerate(counts) for _ in range(count)]
    found = describe(annotations([(50, 50)] * len(counts), rows))
    names = ["0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-40"]
    assert list(found.crowding.items()) == list(zip(names, [2, 1, 1, 2, 2, 2, 1, 1], strict=True))
    assert found.boxes_per_image.tolist() == counts


def test_the_most_frequent_sizes_come_first_and_the_smallest_of_equals():
    sizes = [(5, 7)] * 2 + [(4, 9)] * 3 + [(4, 2)] * 2 + [(70000, 80000)]
    found = describe(annotations(sizes, []))
    assert found.frequent_sizes == [(4, 9, 3), (4, 2, 2), (5, 7, 2), (70000, 80000, 1)]


EMPTY = [(2, [], {"0": 2}), (1, [(0, 1, 1, 1, 20, 20)], {"0": 1}), (0, [], {"0": 0})]


@pytest.mark.parametrize(("images", "rows", "crowding"), EMPTY)
def test_without_boxes_without_images_and_with_crowds_alone(images, rows, crowding):
    found = describe(annotations([(50, 60)] * images, rows, crowds=[0]))
    assert (found.images, found.boxes, len(found.box_sides_px)) == (images, 0, 0)
    assert (found.targets.num_crowds, found.crowding) == (len(rows), crowding)
    assert [of.boxes for of in found.classes] == [0, 0, 0]
    assert sum(found.by_area.values()) == 0


def test_classes_are_ordered_by_frequency_then_by_id():
    rows = [(0, c, 1, 1, 20, 20) for c in (1, 2, 2, 0)]
    found = describe(annotations([(50, 60)], rows), {"JPEG": 1})
    counts = [(of.name, of.boxes, of.images) for of in found.classes]
    assert counts == [("cow", 2, 1), ("cat", 1, 1), ("dog", 1, 1)]
    assert found.formats == {"JPEG": 1}


def test_as_large_as_coco_in_seconds():
    rng = np.random.default_rng(0)
    image = np.repeat(np.arange(117_000), rng.poisson(7.35, 117_000))
    columns = [image, rng.integers(0, 80, len(image)), *rng.uniform(1, 300, (4, len(image)))]
    sizes = rng.integers(300, 640, (117_000, 2))
    large = annotations(sizes, np.column_stack(columns), list(map(str, range(80))))
    start = time.process_time()
    assert describe(large).boxes == len(large.target_boxes.boxes) > 800_000
    assert time.process_time() - start < 10
