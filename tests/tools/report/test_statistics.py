import time

import numpy as np
import pytest
from pycocotools.coco import COCO

from common.data.coco import load_coco
from tests.common.made_annotations import annotations
from tools.report.statistics import describe


def test_data_report_statistics_of_coco128_equal_the_counts_of_pycocotools(coco128):
    result = describe(load_coco(coco128 / "instances.json", None))
    coco = COCO(str(coco128 / "instances.json"))
    ranges = {"small": (-0.5, 32**2), "medium": (32**2 - 1e-9, 96**2), "large": (96**2 - 1e-9, 1e10)}
    for size, area_range in ranges.items():
        assert result.by_area[size] == len(coco.getAnnIds(areaRng=area_range, iscrowd=False)), size
    for row in result.classes:
        query = {"catIds": [row.category_id], "iscrowd": False}
        ids = coco.getAnnIds(**query)
        images = {coco.anns[i]["image_id"] for i in ids}
        expected = coco.cats[row.category_id]["name"], len(ids), len(images)
        assert (row.name, row.boxes, row.images) == expected
        for size, area_range in ranges.items():
            assert getattr(row, size) == len(coco.getAnnIds(**query, areaRng=area_range)), (row.name, size)
    assert (result.images, result.boxes, result.targets.num_crowds) == (128, 929, 10)
    assert sum(not row.boxes for row in result.classes) == 9


def test_data_report_statistics_of_three_images_equal_counts_by_hand():
    rows = [(0, 0, 10, 10, 40, 10), (0, 1, 0, 0, 200, 100), (2, 1, 20, 30, 30, 120), (2, 1, -30, 20, 50, 20)]
    rows += [(2, 0, 5, 5, 9, 9), (1, 0, 5, 5, 0, 9), (1, 1, 201, 5, 9, 9)]
    result = describe(annotations([(100, 200), (100, 200), (300, 150)], rows, crowds=[4]))
    assert result.image_sizes.tolist() == [[100, 200], [100, 200], [300, 150]]
    np.testing.assert_allclose(result.box_aspects, [4, 2, 0.25, 1], rtol=1e-6)
    np.testing.assert_allclose(result.box_sides_px, np.sqrt([400, 20_000, 3600, 400]), rtol=1e-6)
    assert result.by_area == {"small": 2, "medium": 1, "large": 1}
    sizes = {row.name: (row.small, row.medium, row.large) for row in result.classes}
    assert sizes == {"cat": (1, 0, 0), "dog": (1, 1, 1), "cow": (0, 0, 0)}
    assert result.boxes_per_image.tolist() == [2, 0, 2]
    targets = result.targets
    assert (result.boxes, targets.num_clipped, targets.num_dropped, targets.num_crowds) == (4, 1, 2, 1)


def test_box_area_at_a_size_limit_of_coco_belongs_to_the_larger_size():
    areas = [1023.9, 1024, 9215.9, 9216, 1, 90_000]
    result = describe(annotations([(400, 400)], [(0, 0, 5, 5, 300, 300)] * 6, areas=areas))
    assert result.by_area == {"small": 2, "medium": 2, "large": 2}


EMPTY = {"no box": (2, []), "only a crowd": (1, [(0, 1, 1, 1, 20, 20)]), "no image": (0, [])}


@pytest.mark.parametrize(("images", "rows"), EMPTY.values(), ids=EMPTY)
def test_data_report_statistics_of_data_without_boxes_are_zeros(images, rows):
    result = describe(annotations([(50, 60)] * images, rows, crowds=[0]))
    assert (result.images, result.boxes, len(result.box_sides_px)) == (images, 0, 0)
    assert (result.targets.num_crowds, result.boxes_per_image.tolist()) == (len(rows), [0] * images)
    assert [row.boxes for row in result.classes] == [0, 0, 0]
    assert sum(result.by_area.values()) == 0


def test_data_report_orders_classes_by_number_of_boxes_and_then_by_category_id():
    rows = [(0, c, 1, 1, 20, 20) for c in (1, 2, 2, 0)]
    result = describe(annotations([(50, 60)], rows), {"JPEG": 1})
    counts = [(row.name, row.boxes, row.images) for row in result.classes]
    assert counts == [("cow", 2, 1), ("cat", 1, 1), ("dog", 1, 1)]
    assert result.formats == {"JPEG": 1}


def test_data_report_statistics_of_200000_boxes_take_less_than_ten_seconds():
    """More than linear time would take minutes."""
    rng = np.random.default_rng(0)
    image = np.repeat(np.arange(30_000), rng.poisson(7.35, 30_000))
    columns = [image, rng.integers(0, 80, len(image)), *rng.uniform(1, 300, (4, len(image)))]
    sizes = rng.integers(300, 640, (30_000, 2))
    truth = annotations(sizes, np.column_stack(columns), list(map(str, range(80))))
    start = time.process_time()
    assert describe(truth).boxes == len(truth.target_boxes.boxes) > 200_000
    assert time.process_time() - start < 10
