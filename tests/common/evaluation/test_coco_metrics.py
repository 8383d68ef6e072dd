import contextlib
import copy
import io
import json
import math

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.errors import UserError
from common.evaluation import coco_metrics
from common.labels import LabelMap

CATEGORIES = [{"id": 2, "name": "disk"}, {"id": 5, "name": "ring"}, {"id": 40, "name": "star"}]


def make_truth(seed=0, num_images=30, crowds=True):
    """Random ground truth: gaps in the ids, images without objects, crowds, all three sizes."""
    rng = np.random.default_rng(seed)
    images = [{"id": 100 + 7 * i, "width": 640, "height": 480} for i in range(num_images)]
    annotations = []
    for image in images[: num_images - 4]:  # the last four stay empty
        for _ in range(rng.integers(1, 6)):
            width, height = np.exp(rng.uniform(math.log(8), math.log(200), 2)).round(2).tolist()
            annotations.append(
                {
                    "id": len(annotations),  # starts with 0, which pycocotools takes for "no match"
                    "image_id": image["id"],
                    "category_id": int(rng.choice([2, 5, 40])),
                    "bbox": [round(rng.uniform(0, 400), 2), round(rng.uniform(0, 280), 2), width, height],
                    "area": width * height,
                    "iscrowd": int(crowds and rng.random() < 0.1),
                }
            )
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}


def make_detections(truth, seed=1):
    """The truth, shifted a little or a lot, some classes wrong, some boxes of nothing; distinct scores."""
    rng = np.random.default_rng(seed)
    detections = []

    def add(image_id, category_id, box):
        detections.append(
            {"image_id": image_id, "category_id": category_id, "bbox": box, "score": rng.random()}
        )

    for annotation in truth["annotations"]:
        for _ in range(rng.integers(0, 4)):
            left, top, width, height = annotation["bbox"]
            shift = rng.normal(0, 0.15, 4)
            box = [
                left + shift[0] * width,
                top + shift[1] * height,
                width * math.exp(shift[2]),
                height * math.exp(shift[3]),
            ]
            category_id = annotation["category_id"] if rng.random() < 0.8 else int(rng.choice([2, 5, 40]))
            add(annotation["image_id"], category_id, box)
    for image in truth["images"]:
        add(image["id"], 5, [3.0, 4.0, 50.0, 60.0])
    return detections


def perfect(truth):
    return [
        {key: a[key] for key in ("image_id", "category_id", "bbox")} | {"score": 0.9 - 1e-4 * i}
        for i, a in enumerate(truth["annotations"])
        if not a.get("iscrowd", 0)
    ]


def by_pycocotools(truth, detections):
    """The 12 numbers and the precision table by pycocotools as its own demo calls it."""
    truth = copy.deepcopy(truth)
    for annotation in truth["annotations"]:
        annotation["id"] += 1
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(copy.deepcopy(detections)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats, evaluation.eval["precision"]


@pytest.mark.parametrize("seed", range(3))
def test_equals_pycocotools_run_directly(seed):
    truth = make_truth(seed)
    detections = make_detections(truth, seed)
    metrics = coco_metrics.score(truth, detections).metrics
    stats, precision = by_pycocotools(truth, detections)
    assert [metrics[name] for name in coco_metrics.NAMES] == stats.tolist()
    assert 0.05 < metrics["AP"] < 0.95
    for k, category in enumerate(CATEGORIES):
        row = metrics["per_class"][category["name"]]
        assert row["AP"] == pytest.approx(precision[:, :, k, 0, 2].mean(), abs=1e-12)
        assert row["AP50"] == pytest.approx(precision[0, :, k, 0, 2].mean(), abs=1e-12)
        counted = [a for a in truth["annotations"] if a["category_id"] == category["id"] and not a["iscrowd"]]
        assert row["num_boxes"] == len(counted)


def test_truth_fed_back_is_perfect():
    truth = make_truth()
    metrics = coco_metrics.score(truth, perfect(truth)).metrics
    assert [metrics[name] for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR100")] == [1.0] * 7
    assert all(row["AP"] == 1.0 for row in metrics["per_class"].values())


def test_truth_of_real_photographs_fed_back_is_perfect(coco128):
    truth = json.loads((coco128 / "instances.json").read_text())
    metrics = coco_metrics.score(truth, perfect(truth)).metrics
    assert metrics["AP"] == 1.0
    absent = [row for row in metrics["per_class"].values() if row["num_boxes"] == 0]
    assert absent
    assert all(row["AP"] == coco_metrics.NO_TRUTH for row in absent)


def test_to_results_gives_back_the_truth_in_pixels_and_category_ids():
    truth = make_truth(crowds=False)
    label_map = LabelMap.from_categories(CATEGORIES)
    by_image = {image["id"]: [] for image in truth["images"]}
    for annotation in truth["annotations"]:
        by_image[annotation["image_id"]].append(annotation)
    size = 8  # the detections of an image, padded
    boxes = np.full((len(by_image), size, 4), np.nan, np.float32)  # padding may hold anything
    classes = np.full((len(by_image), size), -1, np.int32)
    scores = np.full((len(by_image), size), np.nan, np.float32)
    for i, annotations in enumerate(by_image.values()):
        for j, annotation in enumerate(annotations):
            left, top, width, height = annotation["bbox"]
            boxes[i, j] = [left / 640, top / 480, (left + width) / 640, (top + height) / 480]
            (classes[i, j],) = label_map.classes_of([annotation["category_id"]])
            scores[i, j] = 0.5 + 0.01 * j
    ids = np.array(list(by_image), np.int64)
    sizes = np.tile(np.array([[480, 640]], np.int32), (len(ids), 1))
    seen = set()
    results = coco_metrics.to_results(boxes, scores, classes, ids, sizes, label_map, seen)
    assert coco_metrics.score(truth, results).metrics["AP"] == 1.0
    for result, annotation in zip(results, truth["annotations"], strict=True):
        assert result["category_id"] == annotation["category_id"]
        np.testing.assert_allclose(result["bbox"], annotation["bbox"], atol=0.011)
    assert seen == set(ids.tolist())
    json.dumps(results)  # plain numbers only


def one_image(boxes, classes, scores=None, image_id=9, seen=None):
    boxes = np.array([boxes], np.float32).reshape(1, -1, 4)
    classes = np.array([classes], np.int32)
    scores = np.full(classes.shape, 0.5, np.float32) if scores is None else np.array([scores], np.float32)
    return coco_metrics.to_results(
        boxes,
        scores,
        classes,
        np.array([image_id]),
        np.array([[100, 200]]),
        LabelMap.from_categories(CATEGORIES),
        set() if seen is None else seen,
    )


def test_repeated_images_are_reported_once():
    seen = set()
    first = one_image([0, 0, 1, 1], [0], seen=seen)
    assert len(first) == 1
    assert one_image([0, 0, 1, 1], [0], seen=seen) == []
    assert len(one_image([0, 0, 1, 1], [0], image_id=10, seen=seen)) == 1
    twice = np.zeros((2, 1), np.int32), np.array([4, 4]), np.array([[10, 10]] * 2)
    label_map = LabelMap.from_categories(CATEGORIES)
    box = np.array([[[0, 0, 1, 1]]] * 2, np.float32)
    assert len(coco_metrics.to_results(box, np.ones((2, 1), np.float32), *twice, label_map, set())) == 1


def test_boxes_are_clipped_to_the_image_and_those_outside_are_dropped():
    results = one_image([[-0.5, 0.25, 0.5, 1.5], [1.2, 0.1, 1.4, 0.2], [0.3, 0.3, 0.3, 0.9]], [2, 2, 2])
    assert [(r["bbox"], r["category_id"]) for r in results] == [([0, 25, 100, 75], 40)]


def test_classes_of_no_category_are_left_out():
    assert one_image([[0, 0, 1, 1], [0, 0, 1, 1]], [3, 0])[0]["category_id"] == 2
    assert len(one_image([[0, 0, 1, 1], [0, 0, 1, 1]], [3, 0])) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["box", "score"])
def test_detections_that_are_not_finite_are_refused_with_the_image(bad, place):
    box, score = ([0, 0, bad, 1], 0.5) if place == "box" else ([0, 0, 1, 1], bad)
    with pytest.raises(ValueError, match="image 9"):
        one_image(box, [0], [score])
    one_image(box, [-1], [score])  # padding may hold anything


def test_no_detections_are_zero_not_an_error():
    metrics = coco_metrics.score(make_truth(), []).metrics
    assert [metrics[name] for name in coco_metrics.NAMES] == [0.0] * 12
    assert all(row["AP"] == row["AP50"] == 0.0 for row in metrics["per_class"].values())


def test_no_ground_truth_is_said():
    truth = make_truth()
    for annotation in truth["annotations"]:
        annotation["iscrowd"] = 1
    for annotations in ([], truth["annotations"]):
        with pytest.raises(UserError, match="evaluation data hold no box"):
            coco_metrics.score(truth | {"annotations": annotations}, make_detections(make_truth()))


def test_an_image_that_is_not_in_the_ground_truth_is_named():
    with pytest.raises(KeyError, match="5"):
        coco_metrics.score(
            make_truth(), [{"image_id": 5, "category_id": 2, "bbox": [0, 0, 1, 1], "score": 1.0}]
        )


def test_sizes_without_truth_are_minus_one_and_shown_as_such():
    truth = make_truth()
    truth["annotations"] = [a for a in truth["annotations"] if a["area"] > 32**2 and a["category_id"] != 5]
    metrics = coco_metrics.score(truth, perfect(truth)).metrics
    assert metrics["APs"] == metrics["ARs"] == coco_metrics.NO_TRUTH
    assert metrics["AP"] == 1.0  # the class without truth does not count
    assert metrics["per_class"]["ring"] == {"AP": -1.0, "AP50": -1.0, "num_boxes": 0}
    table = coco_metrics.format_table(metrics).splitlines()
    assert next(line for line in table if line.startswith("APs ")).split() == ["APs", "-"]
    assert next(line for line in table if line.startswith("AP ")).split() == ["AP", "100.0"]
    assert next(line for line in table if line.startswith("ring")).split() == ["ring", "-", "-", "0"]


def test_missing_area_and_iscrowd_are_filled_in_and_the_truth_is_not_touched():
    truth = make_truth(crowds=False)
    bare = copy.deepcopy(truth)
    for annotation in bare["annotations"]:
        del annotation["area"], annotation["iscrowd"]
    before = copy.deepcopy(bare)
    detections = make_detections(truth)
    assert coco_metrics.score(bare, detections).metrics == coco_metrics.score(truth, detections).metrics
    assert bare == before


def test_the_order_of_detections_does_not_matter_even_with_equal_scores(tmp_path):
    truth = make_truth()
    detections = make_detections(truth)
    for detection in detections:
        detection["score"] = round(detection["score"], 1)
    shuffled = [detections[i] for i in np.random.default_rng(0).permutation(len(detections))]
    assert coco_metrics.score(truth, detections).metrics == coco_metrics.score(truth, shuffled).metrics
    coco_metrics.write_detections(shuffled, tmp_path / "x.json")
    expected = sorted(detections, key=lambda d: (d["image_id"], d["category_id"], -d["score"], d["bbox"]))
    assert json.loads((tmp_path / "x.json").read_text()) == expected


def test_files_have_the_same_bytes_every_time(tmp_path):
    truth = make_truth()
    detections = make_detections(truth)
    for run, order in enumerate((detections, detections[::-1])):
        coco_metrics.write_detections(order, tmp_path / f"detections{run}.json")
        coco_metrics.write_metrics(coco_metrics.score(truth, order).metrics, tmp_path / f"metrics{run}.json")
    assert (tmp_path / "detections0.json").read_bytes() == (tmp_path / "detections1.json").read_bytes()
    assert (tmp_path / "metrics0.json").read_bytes() == (tmp_path / "metrics1.json").read_bytes()
    written = json.loads((tmp_path / "detections0.json").read_text())
    assert len(written) == len(detections)
    metrics = json.loads((tmp_path / "metrics0.json").read_text())
    assert set(coco_metrics.NAMES) | {"per_class"} == set(metrics)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        coco.loadRes(str(tmp_path / "detections0.json"))  # pycocotools reads what we wrote


def test_detections_are_written_one_a_line_and_nothing_is_lost(tmp_path):
    """infer.py adds the file's name; a name may hold anything."""
    detection = {"image_id": 2**60 + 1, "category_id": 7, "bbox": [0.1, 2.25, 3.0, 1e-7], "score": 0.1}
    others = [
        detection | {"score": 0.2, "file_name": 'a\nb\u2028"}'},
        detection | {"image_id": 3, "score": 1.0},
    ]
    coco_metrics.write_detections([detection, *others], tmp_path / "detections.json")
    text = (tmp_path / "detections.json").read_text()
    assert json.loads(text) == [others[1], others[0], detection]
    assert text.count("\n") == 5
    assert json.loads(text.split("\n")[2].rstrip(",")) == others[0]


def test_an_empty_list_is_written_as_an_empty_list(tmp_path):
    coco_metrics.write_detections([], tmp_path / "detections.json")
    assert json.loads((tmp_path / "detections.json").read_text()) == []


def test_numbers_that_json_does_not_have_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        coco_metrics.write_metrics({"AP": math.nan}, tmp_path / "metrics.json")
    assert not list(tmp_path.iterdir())


def test_the_area_under_the_curves_is_ap50():
    truth = make_truth()
    detections = make_detections(truth)
    truth["categories"] = [*CATEGORIES, {"id": 50, "name": "absent"}]
    metrics, _, curves = coco_metrics.score(truth, detections)
    assert set(curves) == {"disk", "ring", "star"}
    for name, precision in curves.items():
        assert len(precision) == 101
        assert np.mean(precision) == pytest.approx(metrics["per_class"][name]["AP50"], abs=1e-12)
        assert (np.diff(precision) <= 0).all()


def test_nothing_is_printed(capfd):
    truth = make_truth()
    coco_metrics.score(truth, make_detections(truth))
    coco_metrics.score(truth, [])
    assert capfd.readouterr() == ("", "")
