"""Who counts finds the same: faster-coco-eval against pycocotools as its demo calls it, on hard inputs."""

import contextlib
import copy
import importlib.metadata
import io
import math
import pathlib
import tomllib
import types

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.errors import UserError
from common.evaluation import coco_metrics

CATEGORIES = [{"id": i, "name": f"class {i}"} for i in (0, 2, 3, 17, 90, 2**31 + 5, 2**53 + 1)]
IDS = [category["id"] for category in CATEGORIES]
# Sides whose products are the borders of COCO's areas, 32**2 and 96**2, one below and one above; and nothing.
SIDES = [
    (32, 32),
    (16, 64),
    (96, 96),
    (48, 192),
    (31, 33),
    (95, 97),
    (33, 33),
    (97, 97),
    (1, 1),
    (0, 40),
    (0, 0),
]


def hard_truth(rng, num_images=60):
    """Crowds, gaps in all ids, images and classes without truth, areas on the borders, equal boxes."""
    ids = np.sort(rng.choice(1000, num_images, replace=False))
    images = [{"id": int(i) if i % 3 else 2**53 + 1 + int(i), "width": 640, "height": 480} for i in ids]
    annotations = []
    for image in images[: num_images - 9]:
        for _ in range(rng.integers(0, 12)):
            width, height = SIDES[rng.integers(len(SIDES))] if rng.random() < 0.5 else rng.uniform(4, 250, 2)
            box = [
                *np.round(rng.uniform(0, 300, 2), rng.integers(0, 3)).tolist(),
                float(width),
                float(height),
            ]
            annotation = {
                "id": 5 + 3 * len(annotations),
                "image_id": image["id"],
                "category_id": int(rng.choice(IDS[:5])),
                "bbox": box,
                "area": box[2] * box[3] * float(rng.choice([1.0, 0.5, 0.25])),
                "iscrowd": int(rng.random() < 0.15),
            }
            annotations += (
                [annotation]
                if rng.random() < 0.9
                else [annotation, annotation | {"id": 1 + annotation["id"]}]
            )
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}


def hard_detections(truth, rng):
    """Exact hits, halves (an IoU of exactly 0.5), shifted boxes, repeats, noise; many equal scores."""
    detections = []

    def add(image_id, category_id, box):
        score = float(rng.choice([0.1, 0.5, 0.9])) if rng.random() < 0.5 else rng.random()
        row = {
            "image_id": image_id,
            "category_id": category_id,
            "bbox": [float(x) for x in box],
            "score": score,
        }
        detections.append(row)

    for annotation in truth["annotations"]:
        left, top, width, height = annotation["bbox"]
        for kind in rng.integers(0, 5, rng.integers(0, 4)):
            shift = rng.normal(0, 0.1, 2) * [width, height]
            boxes = {
                0: [left, top, width, height],
                1: [left, top, width / 2, height],
                2: [left + shift[0], top + shift[1], width * math.exp(rng.normal(0, 0.1)), height],
                3: [left, top, 0.75 * width, height],
                4: [
                    left + width / 4,
                    top + height / 4,
                    width / 2,
                    height / 2,
                ],  # within: all that a crowd asks for
            }
            category_id = annotation["category_id"] if rng.random() < 0.9 else int(rng.choice(IDS))
            add(annotation["image_id"], category_id, boxes[int(kind)])
    for image in truth["images"][::2]:
        for _ in range(rng.integers(0, 8)):
            sides = SIDES[rng.integers(len(SIDES))]
            add(image["id"], int(rng.choice(IDS)), [*rng.uniform(0, 300, 2), *sides])
    # More than the 100 that count, of one class in one image: where the class is, and where it is not.
    crowded = truth["annotations"][0]
    empty = [image["id"] for image in truth["images"][-9:]]  # they follow each other, without any truth
    for image_id in (crowded["image_id"], *empty[2:4]):
        for _ in range(rng.integers(90, 150)):
            box = [*rng.uniform(0, 300, 2), *rng.uniform(5, 200, 2)]
            add(image_id, crowded["category_id"], box)
    return detections


def by_pycocotools(truth, detections):
    """The 12 numbers and the precision (IoU, recall, category, area, detections) as its demo finds them."""
    # in the order that `score` promises, for equal scores
    order = sorted(detections, key=lambda d: (d["image_id"], d["category_id"], -d["score"], d["bbox"]))
    found = copy.deepcopy(order)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = copy.deepcopy(truth)
        coco.createIndex()
        judge = COCOeval(coco, coco.loadRes(found), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats, judge.eval["precision"]


def numbers(metrics):
    rows = metrics["per_class"].values()
    return [metrics[name] for name in coco_metrics.NAMES] + [x for row in rows for x in row.values()]


@pytest.fixture
def faster():
    pytest.importorskip("faster_coco_eval", reason="the extra faster-coco is not installed")


@pytest.mark.parametrize("seed", range(6))
def test_faster_finds_what_pycocotools_finds(faster, seed):
    rng = np.random.default_rng(seed)
    truth = hard_truth(rng)
    detections = hard_detections(truth, rng)
    stats, precision = by_pycocotools(truth, detections)
    metrics, _, curves = coco_metrics.score(truth, detections, "faster")
    assert [metrics[name] for name in coco_metrics.NAMES] == pytest.approx(stats.tolist(), abs=1e-12, rel=0)
    assert min(stats) > 0.02
    without_truth = 0
    for k, category in enumerate(CATEGORIES):
        row = metrics["per_class"][category["name"]]
        assert row["AP"] == pytest.approx(precision[:, :, k, 0, 2].mean(), abs=1e-12, rel=0)
        assert row["AP50"] == pytest.approx(precision[0, :, k, 0, 2].mean(), abs=1e-12, rel=0)
        if category["name"] in curves:
            np.testing.assert_allclose(curves[category["name"]], precision[0, :, k, 0, 2], atol=1e-12, rtol=0)
        else:
            without_truth += 1
            assert row == {"AP": -1.0, "AP50": -1.0, "num_boxes": 0}
    assert without_truth == 2


@pytest.mark.parametrize("backend", ["pycocotools", "faster"])
def test_no_detections_or_none_that_count(faster, backend):
    truth = hard_truth(np.random.default_rng(0))
    foreign = {"image_id": truth["images"][0]["id"], "category_id": 1, "bbox": [0, 0, 9, 9], "score": 0.5}
    absent = foreign | {"category_id": IDS[-1]}
    for detections in ([], [foreign], [absent]):
        metrics = coco_metrics.score(truth, detections, backend).metrics
        assert [metrics[name] for name in coco_metrics.NAMES] == [0.0] * 12


def test_both_refuse_data_without_boxes(faster):
    truth = hard_truth(np.random.default_rng(0))
    for backend in ("pycocotools", "faster"):
        with pytest.raises(UserError, match="hold no box"):
            coco_metrics.score(truth | {"annotations": []}, [], backend)


def test_sizes_without_truth_are_minus_one_with_both(faster):
    rng = np.random.default_rng(0)
    truth = hard_truth(rng)
    truth["annotations"] = [a for a in truth["annotations"] if a["area"] > 96**2]
    found = hard_detections(truth, rng)
    ours, theirs = (coco_metrics.score(truth, found, name).metrics for name in ("faster", "pycocotools"))
    assert numbers(ours) == pytest.approx(numbers(theirs), abs=1e-12, rel=0)
    assert ours["APs"] == ours["APm"] == ours["ARm"] == coco_metrics.NO_TRUTH


def test_a_perfect_detector_is_perfect_with_both(faster):
    truth = hard_truth(np.random.default_rng(1))
    truth["annotations"] = [a for a in truth["annotations"] if min(a["bbox"][2:]) > 0 and not a["iscrowd"]]
    keys = ("image_id", "category_id", "bbox")
    found = [{key: a[key] for key in keys} | {"score": 0.5} for a in truth["annotations"]]
    assert coco_metrics.score(truth, found, "faster").metrics["AP"] == pytest.approx(1.0, abs=1e-12)


def test_the_truth_is_not_touched_and_nothing_is_printed(faster, capfd):
    rng = np.random.default_rng(2)
    truth = hard_truth(rng)
    detections = hard_detections(truth, rng)
    before = copy.deepcopy((truth, detections))
    for backend in ("pycocotools", "faster"):
        coco_metrics.score(truth, detections, backend)
    assert (truth, detections) == before
    assert capfd.readouterr() == ("", "")


def test_a_backend_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    line = r"^--coco_backend=faster needs .*installed: none.*pip install faster-coco-eval==[\d.]+`.*$"
    with pytest.raises(UserError, match=line):
        coco_metrics.check_backend("faster")
    with pytest.raises(UserError, match=line):
        coco_metrics.score(hard_truth(np.random.default_rng(0)), [], "faster")
    coco_metrics.check_backend("pycocotools")
    other = types.SimpleNamespace(version="1.6.5")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [other])
    with pytest.raises(UserError, match=r"installed: 1\.6\.5"):
        coco_metrics.check_backend("faster")


def test_the_version_that_is_asked_for_is_the_pinned_one():
    project = tomllib.loads((pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    pinned = project["optional-dependencies"]["faster-coco"]
    assert pinned == [f"faster-coco-eval=={coco_metrics.FASTER_VERSION}"]
