"""Tests COCO metrics against pycocotools, and the conversion of detections to COCO results."""

import copy
import importlib.metadata
import json
import math
import pathlib
import tomllib
import types

import numpy as np
import pytest

from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import coco_metrics
from common.progress import log_once
from tests.common.evaluation.reference import by_pycocotools

CATEGORIES = [{"id": i, "name": f"class {i}"} for i in (0, 2, 3, 17, 90, 2**31 + 5, 2**53 + 1)]
IDS = [category["id"] for category in CATEGORIES]
# Some of the boxes have areas at, below and above COCO's limits 32**2 and 96**2. Two boxes have no area.
SIDES = [
    *((32, 32), (16, 64), (96, 96), (48, 192), (31, 33), (95, 97), (33, 33), (97, 97)),
    *((1, 1), (0, 40), (0, 0)),
]
BACKENDS = pytest.mark.parametrize("backend", ["pycocotools", "faster"])


@pytest.fixture(autouse=True)
def faster():
    pytest.importorskip("faster_coco_eval", reason="the extra faster-coco is not installed")


def random_ground_truth(num_images=60):
    """Returns a ground truth with crowds, equal boxes, and gaps in all ids."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(1000, num_images, replace=False))
    images = [{"id": int(i) if i % 3 else 2**53 + 1 + int(i), "width": 640, "height": 480} for i in ids]
    annotations = []
    for image in images[: num_images - 9]:
        for _ in range(rng.integers(0, 12)):
            width, height = SIDES[rng.integers(len(SIDES))] if rng.random() < 0.5 else rng.uniform(4, 250, 2)
            left, top = np.round(rng.uniform(0, 300, 2), rng.integers(0, 3)).tolist()
            annotation = {
                "id": 3 * len(annotations),  # includes id 0, which means "no match" in pycocotools
                "image_id": image["id"],
                "category_id": int(rng.choice(IDS[:5])),
                "bbox": [left, top, float(width), float(height)],
                "area": float(width * height * rng.choice([1.0, 0.5, 0.25])),
                "iscrowd": int(rng.random() < 0.15),
            }
            twice = [annotation, annotation | {"id": 1 + annotation["id"]}]
            annotations += twice[: 1 if rng.random() < 0.9 else 2]
    return {"images": images, "annotations": annotations, "categories": CATEGORIES[::-1]}


def random_detections(truth):
    """Returns correct, shrunk, shifted and random detections. Many scores are equal."""
    rng = np.random.default_rng(100)
    detections = []

    def add(image_id, category_id, box):
        score = float(rng.choice([0.1, 0.5, 0.9])) if rng.random() < 0.5 else rng.random()
        place = {"image_id": image_id, "category_id": category_id, "bbox": [float(x) for x in box]}
        detections.append(place | {"score": score})

    for annotation in truth["annotations"]:
        left, top, width, height = annotation["bbox"]
        for kind in rng.integers(0, 5, rng.integers(0, 4)).tolist():
            shift = rng.normal(0, 0.1, 2) * [width, height]
            box = [
                [left, top, width, height],
                [left, top, width / 2, height],
                [left + shift[0], top + shift[1], width * math.exp(rng.normal(0, 0.1)), height],
                [left, top, 0.75 * width, height],
                # This box lies inside the true box, so it matches if the true box is a crowd.
                [left + width / 4, top + height / 4, width / 2, height / 2],
            ][kind]
            category_id = annotation["category_id"] if rng.random() < 0.9 else int(rng.choice(IDS))
            add(annotation["image_id"], category_id, box)
    for image in truth["images"][::2]:
        for _ in range(rng.integers(0, 8)):
            sides = SIDES[rng.integers(len(SIDES))]
            add(image["id"], int(rng.choice(IDS)), [*rng.uniform(0, 300, 2), *sides])
    # COCO counts at most 100 detections of one class in an image. These three images can have more.
    crowded = truth["annotations"][0]
    empty = [image["id"] for image in truth["images"][-9:]]
    for image_id in (crowded["image_id"], *empty[2:4]):
        for _ in range(rng.integers(90, 150)):
            box = [*rng.uniform(0, 300, 2), *rng.uniform(5, 200, 2)]
            add(image_id, crowded["category_id"], box)
    return detections


def sorted_detections(detections):
    return sorted(detections, key=lambda d: (d["image_id"], d["category_id"], -d["score"], d["bbox"]))


def numbers(metrics):
    return [metrics[name] for name in coco_metrics.NAMES]


# --- metrics ---


@BACKENDS
def test_metrics_and_curves_of_each_backend_equal_pycocotools(backend, capfd):
    truth = random_ground_truth()
    detections = random_detections(truth)
    stats, precision = by_pycocotools(truth, sorted_detections(detections))
    assert min(stats) > 0.02
    arguments = copy.deepcopy((truth, detections))
    metrics, results, curves = coco_metrics.score(truth, detections, backend)
    assert (truth, detections) == arguments and results is detections
    output, log_lines = capfd.readouterr()
    assert output == "" and all(line.startswith("COCO's metrics count") for line in log_lines.splitlines())
    error = {"abs": 1e-12 if backend == "faster" else 0, "rel": 0}
    assert numbers(metrics) == pytest.approx(stats.tolist(), **error)
    for k, category in enumerate(CATEGORIES):
        name, row = category["name"], metrics["per_class"][category["name"]]
        assert row["AP"] == pytest.approx(precision[:, :, k, 0, 2].mean(), abs=1e-12, rel=0)
        assert row["AP50"] == pytest.approx(precision[0, :, k, 0, 2].mean(), abs=1e-12, rel=0)
        boxes = [a for a in truth["annotations"] if a["category_id"] == category["id"] and not a["iscrowd"]]
        assert row["num_boxes"] == len(boxes)
        if boxes:
            assert curves[name] == pytest.approx(precision[0, :, k, 0, 2], abs=1e-12, rel=0)
        else:
            assert row == {"AP": coco_metrics.NO_TRUTH, "AP50": coco_metrics.NO_TRUTH, "num_boxes": 0}
    assert len(curves) == 5


@BACKENDS
def test_metrics_are_zero_without_detections_of_classes_that_have_boxes(backend):
    truth = random_ground_truth()
    unknown = {"image_id": truth["images"][0]["id"], "category_id": 1, "bbox": [0, 0, 9, 9], "score": 0.5}
    for detections in ([], [unknown], [unknown | {"category_id": IDS[-1]}]):
        metrics = coco_metrics.score(truth, detections, backend).metrics
        assert numbers(metrics) == [0.0] * 12
        assert metrics["per_class"]["class 2"]["AP"] == metrics["per_class"]["class 2"]["AP50"] == 0.0


def test_ground_truth_without_boxes_or_with_crowds_only_is_refused():
    truth = random_ground_truth()
    crowds = [annotation | {"iscrowd": 1} for annotation in truth["annotations"]]
    for annotations in ([], crowds):
        with pytest.raises(UserError, match="evaluation data have no boxes"):
            coco_metrics.score(truth | {"annotations": annotations}, random_detections(truth))


def test_detection_of_an_image_missing_from_the_ground_truth_is_refused_with_its_id():
    detection = {"image_id": 1001, "category_id": 2, "bbox": [0, 0, 1, 1], "score": 1.0}
    with pytest.raises(KeyError, match="1001"):
        coco_metrics.score(random_ground_truth(), [detection])


@BACKENDS
def test_metrics_of_box_sizes_missing_from_the_ground_truth_are_minus_one(backend):
    truth = random_ground_truth()
    truth["annotations"] = [a for a in truth["annotations"] if a["area"] > 96**2 and not a["iscrowd"]]
    keys = ("image_id", "category_id", "bbox")
    perfect = [{key: a[key] for key in keys} | {"score": 0.5} for a in truth["annotations"]]
    metrics = coco_metrics.score(truth, perfect, backend).metrics
    assert metrics["APs"] == metrics["APm"] == metrics["ARs"] == metrics["ARm"] == coco_metrics.NO_TRUTH
    assert metrics["AP"] == pytest.approx(1.0, abs=1e-12)  # the mean of the classes with ground truth


def test_metrics_table_shows_percent_and_a_dash_for_metrics_without_ground_truth():
    metrics = dict.fromkeys(coco_metrics.NAMES, 1.0) | {"AP50": 0.2564, "APs": coco_metrics.NO_TRUTH}
    metrics["per_class"] = {
        "traffic light": {"AP": 1.0, "AP50": 0.5, "num_boxes": 12},
        "bus": dict.fromkeys(("AP", "AP50"), coco_metrics.NO_TRUTH) | {"num_boxes": 0},
    }
    table = [line.split() for line in coco_metrics.format_table(metrics).splitlines()]
    assert table[:5] == [["%"], ["AP", "100.0"], ["AP50", "25.6"], ["AP75", "100.0"], ["APs", "-"]]
    assert table[14] == ["class", "AP", "%", "AP50", "%", "boxes"]
    assert table[-2:] == [["traffic", "light", "100.0", "50.0", "12"], ["bus", "-", "-", "0"]]


def test_metrics_table_with_wide_and_combining_letters_has_aligned_columns():
    # A terminal shows 信号機 and ﾊﾞｽ in 6 and 3 columns, and e with a combining acute accent in one.
    names = {"信号機": 6, "ﾊﾞｽ": 3, "ve\N{COMBINING ACUTE ACCENT}lo": 4, "traffic light": 13}
    row = {"AP": 1.0, "AP50": 0.5, "num_boxes": 12}
    metrics = dict.fromkeys(coco_metrics.NAMES, 1.0) | {"per_class": dict.fromkeys(names, row)}
    lines = coco_metrics.format_table(metrics).splitlines()[-4:]
    for (name, columns), line in zip(names.items(), lines, strict=True):
        assert line.removeprefix(name) == " " * (13 - columns) + "  100.0   50.0      12"


def test_annotations_without_area_and_iscrowd_are_scored_with_area_width_times_height_and_iscrowd_0():
    complete = random_ground_truth()
    for annotation in complete["annotations"]:
        annotation |= {"iscrowd": 0, "area": annotation["bbox"][2] * annotation["bbox"][3]}
    bare = copy.deepcopy(complete)
    for annotation in bare["annotations"]:
        del annotation["area"], annotation["iscrowd"]
    detections = random_detections(complete)
    assert coco_metrics.score(bare, detections).metrics == coco_metrics.score(complete, detections).metrics


def test_coco_backend_faster_is_refused_if_its_package_is_missing_or_of_another_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    message = r"^--coco_backend=faster needs .*installed: none.*pip install faster-coco-eval==[\d.]+`.*$"
    with pytest.raises(UserError, match=message):
        coco_metrics.score(random_ground_truth(), [], "faster")
    coco_metrics.check_backend("pycocotools")
    installed = types.SimpleNamespace(version="1.6.5")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [installed])
    with pytest.raises(UserError, match=r"installed: 1\.6\.5"):
        coco_metrics.check_backend("faster")


def test_required_version_of_faster_coco_eval_is_pinned_in_pyproject():
    project = tomllib.loads((pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    pinned = f"faster-coco-eval=={coco_metrics.FASTER_VERSION}"
    assert project["optional-dependencies"]["faster-coco"] == [pinned]


# --- to_results: from a batch of detections to COCO results ---


def to_results(boxes, classes, scores=0.5, image_ids=(9,), seen=None, sizes=((100, 200),)):
    """Converts detections of three classes. `sizes` has one (height, width), or one for each image."""
    boxes = np.array(boxes, np.float32).reshape(len(image_ids), -1, 4)
    classes = np.array(classes, np.int32).reshape(boxes.shape[:2])
    scores = np.broadcast_to(scores, classes.shape)
    sizes = np.broadcast_to(sizes, (len(image_ids), 2))
    label_map = LabelMap.from_categories([CATEGORIES[row] for row in (0, 4, 6)])
    seen = set() if seen is None else seen
    return coco_metrics.to_results(boxes, scores, classes, np.array(image_ids), sizes, label_map, seen)


def test_detections_become_pixel_boxes_of_their_image_with_category_ids():
    padding, seen = [math.nan] * 4, {5}
    boxes = [[[0.1, 0.2, 0.5, 0.6], padding], [[0, 0, 1, 1], [0.25, 0.5, 0.75, 1]]]
    scores, sizes = [[0.5, math.nan], [0.25, 0.75]], [(100, 200), (480, 640)]
    results = to_results(boxes, [[1, -1], [2, 0]], scores, [9, 2**53 + 1], seen, sizes)
    assert results == [
        {"image_id": 9, "category_id": 90, "bbox": [20, 20, 80, 40], "score": 0.5},
        {"image_id": 2**53 + 1, "category_id": 2**53 + 1, "bbox": [0, 0, 640, 480], "score": 0.25},
        {"image_id": 2**53 + 1, "category_id": 0, "bbox": [160, 240, 320, 240], "score": 0.75},
    ]
    assert seen == {5, 9, 2**53 + 1}
    json.dumps(results)  # the numbers are Python's, not NumPy's


def test_detections_of_an_image_that_was_evaluated_twice_are_kept_once():
    seen, box = set(), [0, 0, 1, 1]
    assert [len(to_results(box, [0], image_ids=[i], seen=seen)) for i in (9, 9, 10)] == [1, 0, 1]
    assert len(to_results([box, box], [0, 0], image_ids=[4, 4])) == 1


def test_detections_are_clipped_and_rounded_and_those_without_area_or_category_are_dropped():
    image, outside, line = [0, 0, 1, 1], [1.2, 0.1, 1.4, 0.2], [0.3, 0.3, 0.3, 0.9]
    boxes = [[-0.5, 0.25, 0.5, 1.5], outside, line, image, [0.1234567, 0, 1, 1]]
    results = to_results(boxes, [2, 2, 2, 3, 1], [1, 1, 1, 1, 0.12345678])
    assert [(r["bbox"], r["category_id"], r["score"]) for r in results] == [
        ([0, 25, 100, 75], 2**53 + 1, 1),
        ([24.69, 0, 175.31, 100], 90, 0.123457),
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["box", "score"])
def test_detection_that_is_not_finite_is_refused_with_its_image_id(bad, place):
    box, score = ([0, 0, bad, 1], 0.5) if place == "box" else ([0, 0, 1, 1], bad)
    with pytest.raises(ValueError, match="image 9"):
        to_results([[0, 0, 1, 1], box], [0, 0], [[0.5], [score]], image_ids=[8, 9])


# --- the limit of 100 detections per image and category ---


def grid(count, image_id, score=False):
    """Returns `count` boxes of category 1 that do not overlap."""
    boxes = [[10 * (i % 20), 10 * (i // 20), 8, 8] for i in range(count)]
    rows = [{"image_id": image_id, "category_id": 1, "bbox": box} for box in boxes]
    return [row | {"score": 1 - i / 1000} for i, row in enumerate(rows)] if score else rows


def test_limit_of_100_detections_is_logged_once_with_the_image_of_most_objects(capfd):
    log_once.cache_clear()
    truth = {"images": [{"id": 3}, {"id": 4}], "categories": [{"id": 1, "name": "berry"}]}
    truth["annotations"] = grid(101, 3) + grid(300, 4)
    detections = grid(101, 3, True) + grid(300, 4, True)
    for _ in range(2):
        metrics = coco_metrics.score(truth, detections).metrics
    assert metrics["AR100"] == pytest.approx(200 / 401)
    lines = capfd.readouterr().err.splitlines()
    start = "COCO's metrics count the 100 best detections of an image and category: "
    assert lines == [
        f"{start}image 4 has 300 objects of 'berry', so its recall is at most 0.333 "
        "(image and category pairs with more objects: 2)",
        f"{start}detections.json has more of them, which do not change the AP",
    ]


def test_100_objects_and_detections_of_each_category_are_below_the_limit(capfd):
    log_once.cache_clear()
    categories = [{"id": 1, "name": "berry"}, {"id": 2, "name": "leaf"}]
    truth = {"images": [{"id": 3}], "categories": categories}
    truth["annotations"] = grid(100, 3) + [a | {"category_id": 2} for a in grid(100, 3)]
    truth["annotations"] += [a | {"iscrowd": 1} for a in grid(50, 3)]
    detections = grid(100, 3, True) + [a | {"category_id": 2} for a in grid(100, 3, True)]
    assert coco_metrics.score(truth, detections).metrics["AP"] == pytest.approx(1)
    assert capfd.readouterr().err == ""


# --- files of detections and metrics ---


def test_detections_file_and_metrics_file_do_not_depend_on_the_order_of_detections(tmp_path):
    truth = random_ground_truth()
    detections = random_detections(truth)
    shuffled = [detections[i] for i in np.random.default_rng(0).permutation(len(detections))]
    for name, rows in (("a", detections), ("b", shuffled)):
        coco_metrics.write_detections(rows, tmp_path / f"{name}.json")
        coco_metrics.write_metrics(coco_metrics.score(truth, rows).metrics, tmp_path / f"{name}.metrics")
    for suffix in ("json", "metrics"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert json.loads((tmp_path / "b.json").read_text()) == sorted_detections(detections)
    metrics = json.loads((tmp_path / "a.metrics").read_text())
    assert set(metrics) == {*coco_metrics.NAMES, "per_class"}
    assert metrics["AP"] == round(coco_metrics.score(truth, detections).metrics["AP"], 6)


def test_detections_file_has_one_detection_per_line_with_exact_numbers(tmp_path):
    last = {"image_id": 2**60 + 1, "category_id": 7, "bbox": [0.1, 2.25, 3.0, 1e-7], "score": 0.1}
    middle, first = last | {"score": 0.2, "file_name": 'a\nb\u2028"}'}, last | {"image_id": 3, "score": 1.0}
    coco_metrics.write_detections([last, middle, first], tmp_path / "detections.json")
    text = (tmp_path / "detections.json").read_text()
    assert json.loads(text) == [first, middle, last]
    assert text.count("\n") == 5
    assert json.loads(text.split("\n")[2].rstrip(",")) == middle
    assert json.loads(coco_metrics.encode_detections([])) == []


def test_metrics_that_are_nan_are_refused_and_no_file_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        coco_metrics.write_metrics({"AP": math.nan}, tmp_path / "metrics.json")
    assert not list(tmp_path.iterdir())
