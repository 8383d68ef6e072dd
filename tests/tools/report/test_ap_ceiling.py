"""The score of perfect detections is what pycocotools says of all classes together, and the reasons count."""

import numpy as np
import pytest

from common.datacheck.coco import load_coco
from common.evaluation import coco_metrics
from tests.common.made_annotations import annotations, random_annotations
from tools.report import ap_ceiling, shown_boxes


def detections_of(truth, kept, moved=0.0):
    """Some of the true boxes as detections, shifted by a share of their width."""
    targets = truth.target_boxes
    image = np.repeat(np.arange(truth.num_images), np.diff(targets.row_splits))[kept]
    boxes = targets.boxes[kept].copy()
    boxes[:, [0, 2]] += moved * (boxes[:, 2:3] - boxes[:, :1])
    return image, boxes, targets.classes[kept]


def results_of(truth, image, boxes, classes):
    """COCO results in a plain loop."""
    results = []
    for i, (left, top, right, bottom), index in zip(image, boxes.tolist(), classes, strict=True):
        height, width = truth.image_sizes[i].tolist()
        left, right = (min(max(x, 0), 1) * width for x in (left, right))
        top, bottom = (min(max(y, 0), 1) * height for y in (top, bottom))
        results.append(
            {
                "image_id": int(truth.image_ids[i]),
                "category_id": truth.label_map.category_of(int(index)),
                "bbox": [round(x, 2) for x in (left, top, right - left, bottom - top)],
                "score": 1.0,
            }
        )
    return results


@pytest.mark.parametrize(("share", "moved"), [(1.0, 0.0), (0.6, 0.0), (0.9, 0.2), (0.0, 0.0)])
def test_class_by_class_is_what_pycocotools_says_of_all(share, moved):
    """With crowds, with classes without boxes, without detections, and of one size only."""
    rng = np.random.default_rng(0)
    made = random_annotations(rng, 25, 12, num_classes=7)
    rows = [
        (i, int(c) // 10 - 1, *b)
        for i, c, b in zip(made.box_image, made.category_ids, made.boxes_ltwh_px, strict=True)
    ]
    rows += [(3, 7, 2, 2, 10, 10), (4, 8, 1, 1, 60, 60)]
    truth = annotations(made.image_sizes, rows, [f"c{i}" for i in range(10)], crowds=[0, 5, 9, len(rows) - 1])
    kept = np.flatnonzero(rng.random(len(truth.target_boxes.boxes)) < share)
    detections = detections_of(truth, kept, moved)
    expected = coco_metrics.evaluate(truth.ground_truth(), results_of(truth, *detections))
    found = ap_ceiling.score(truth, *detections)
    assert found == pytest.approx({name: expected[name] for name in ap_ceiling.NAMES})
    assert list(found) == ["AP", "AP50", "APs", "APm", "APl"]


def test_on_coco128_too(coco128):
    truth = load_coco(coco128 / "instances.json", None)
    kept = np.arange(0, 929, 3)
    detections = detections_of(truth, kept, 0.1)
    expected = coco_metrics.evaluate(truth.ground_truth(), results_of(truth, *detections))
    assert ap_ceiling.score(truth, *detections) == pytest.approx({n: expected[n] for n in ap_ceiling.NAMES})


def test_sizes_without_truth_have_no_number():
    truth = annotations([(100, 100)], [(0, 0, 10, 10, 20, 20)])
    found = ap_ceiling.score(truth, *detections_of(truth, [0]))
    assert found == pytest.approx({"AP": 1, "AP50": 1, "APs": 1, "APm": -1, "APl": -1})


def reasons_of(truth, without_target=None, **options):
    shown = shown_boxes.show(
        truth,
        (128, 128),
        **({"keep_aspect": True, "centered": False, "max_instances": 100, "min_box_size": 1.0} | options),
    )
    return ap_ceiling.reasons(shown, without_target or {})


def test_each_reason_is_counted():
    boxes = [(0, 0, 10, 10, 40, 40), (0, 1, 5, 5, 30, 50)]
    assert reasons_of(annotations([(128, 128)], boxes)) == ()
    assert reasons_of(annotations([(128, 128)], boxes), {"lost": 1234, "other": 0}) == ("1,234 lost",)
    assert reasons_of(annotations([(128, 128)], boxes), max_instances=1) == ("1 beyond max_instances",)
    small = annotations([(1280, 1280)], [*boxes, (0, 0, 3, 3, 9, 400), (0, 0, 3, 3, 400, 11)])
    assert reasons_of(small) == ("1 smaller than min_box_size in the network",)
    flat = annotations([(128, 128)], [*boxes, (0, 0, 3, 3, 0, 40), (0, 0, 200, 3, 9, 9)])
    assert reasons_of(flat) == ("2 without area in their image",)
    outside = annotations([(128, 128)], [*boxes, (0, 0, -10, 3, 50, 9), (0, 0, -1, 3, 50, 9)])
    assert reasons_of(outside) == ("1 reaching far outside their image",)
    crowd = annotations([(128, 128)], [*boxes, (0, 0, -10, 3, 50, 9)], crowds=[2])
    assert reasons_of(crowd) == ()
    many = annotations([(128, 128)] * 2, [(0, 0, i, 1, 5, 5) for i in range(103)] + [(1, 0, 1, 1, 5, 5)] * 3)
    assert reasons_of(many, max_instances=200) == (
        "3 beyond the 100 of a class in an image that pycocotools looks at",
    )
