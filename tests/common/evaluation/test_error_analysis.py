import collections
import json

import numpy as np
import PIL.Image
import pytest

from common.data.annotations import read_coco
from common.data.open import open_coco, open_tfrecords
from common.data.sources import CocoSource
from common.evaluation import coco_metrics, error_analysis
from common.evaluation.error_analysis import (
    BACKGROUND,
    BOTH,
    CLASSIFICATION,
    CORRECT,
    DUPLICATE,
    KINDS,
    LOCALISATION,
)
from tests.common.evaluation.test_coco_metrics import IDS, hard_detections, hard_truth

MISSED = error_analysis.MISSED


def overlap(detection, box):
    (x, y, width, height), (left, top, *sides) = detection["bbox"], box["bbox"]
    common = max(min(x + width, left + sides[0]) - max(x, left), 0)
    common *= max(min(y + height, top + sides[1]) - max(y, top), 0)
    # The areas are added in the order of pycocotools.
    union = width * height + sides[0] * sides[1] - common
    return common / (width * height if box["iscrowd"] else union)


def by_loops(truth, detections):
    """Returns the matches, highest score first, and {index of a ground-truth box: kind of error}.

    A match is (detection, kind of error, index of the matched ground-truth box).
    """
    found, ranks = [], collections.Counter()
    kinds = {k: MISSED for k, box in enumerate(truth["annotations"]) if not box["iscrowd"]}
    for detection in sorted(detections, key=lambda d: (-d["score"], d["bbox"])):
        image_id, category_id = detection["image_id"], detection["category_id"]
        ranks[image_id, category_id] += 1
        boxes = {k: box for k, box in enumerate(truth["annotations"]) if box["image_id"] == image_id}
        near = {k: overlap(detection, box) for k, box in boxes.items()}
        own = {k: iou for k, iou in near.items() if boxes[k]["category_id"] == category_id}
        crowds = [own.pop(k) for k in list(own) if k not in kinds]
        others = {k: iou for k, iou in near.items() if k in kinds and k not in own}
        closest, wrong = (max(of, key=of.get, default=None) for of in (own, others))
        best, best_wrong = own.get(closest, 0), others.get(wrong, 0)
        free = [(iou, k) for k, iou in own.items() if iou >= 0.5 and kinds[k] != CORRECT]
        if ranks[image_id, category_id] > 100 or (not free and max(crowds, default=0) >= 0.5):
            continue
        if free:
            kinds[max(free)[1]] = CORRECT
            found.append((detection, CORRECT, max(free)[1]))
        elif 0.1 <= best < 0.5:
            found.append((detection, LOCALISATION, closest))
        elif best_wrong >= 0.5:
            found.append((detection, CLASSIFICATION, wrong))
        else:
            kind = DUPLICATE if best >= 0.5 else BACKGROUND if max(best, best_wrong) < 0.1 else BOTH
            found.append((detection, kind, None))
    for _, kind, k in found:
        if kind in (CLASSIFICATION, LOCALISATION) and kinds[k] == MISSED:
            kinds[k] = kind
    return found, kinds


@pytest.fixture(params=[0, 1])
def scene(request, tmp_path):
    truth = hard_truth(request.param, num_images=95)
    truth["images"] = [image | {"file_name": "x.jpg"} for image in truth["images"]]
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    detections = [d for d in hard_detections(truth, request.param) if min(d["bbox"][2:]) > 0]
    return truth, read_coco(tmp_path / "truth.json"), detections


@pytest.mark.parametrize("least", [0, 0.5])
def test_plain_loops_find_the_same_kinds_and_confusions(scene, least):
    truth, annotations, detections = scene
    expected, kinds = by_loops(truth, [d for d in detections if d["score"] >= least])
    found, boxes = error_analysis.match(annotations, detections)
    found = found[found["score"] >= least]
    boxes["kind"] = error_analysis.kinds_of_boxes(found, boxes)[0]

    def rows(table):
        table = table[table["kind"] != error_analysis.IGNORED]
        columns = annotations.image_ids[table["image"]], np.array(IDS)[table["class"]], table["kind"]
        return sorted(zip(*(column.tolist() for column in (*columns, table["box"])), strict=True))

    def plain(row, kind):
        return row["image_id"], row["category_id"], kind, row["bbox"]

    assert rows(found) == sorted(plain(detection, kind) for detection, kind, _ in expected)
    assert rows(boxes) == sorted(plain(truth["annotations"][k], kind) for k, kind in kinds.items())
    assert len(kinds) > 400 and len(set(found["kind"])) == 6

    matrix = np.zeros((8, 8), int)
    classes = {k: IDS.index(truth["annotations"][k]["category_id"]) for k in kinds}
    hits = {k for _, kind, k in expected if kind in (CORRECT, CLASSIFICATION)}
    for detection, kind, k in expected:
        row = classes[k] if kind in (CORRECT, CLASSIFICATION) else 7
        matrix[row, IDS.index(detection["category_id"])] += 1
    for k in kinds.keys() - hits:
        matrix[classes[k], 7] += 1
    np.testing.assert_array_equal(error_analysis.confusion_matrix(found, boxes, 7), matrix)


def mean_ap50(truth, detections):
    """A class without boxes, -1 in pycocotools, counts as 1."""
    rows = coco_metrics.score(truth, detections).metrics["per_class"]
    return np.mean([abs(rows[f"class {category_id}"]["AP50"]) for category_id in IDS[:5]])


def test_ap50_with_and_without_errors_is_that_of_pycocotools(scene):
    truth, annotations, detections = scene
    found, boxes = error_analysis.match(annotations, detections)
    assert error_analysis.ap50(found, boxes) == pytest.approx(mean_ap50(truth, detections), abs=1e-12)
    # All scores are different.
    scores = np.random.default_rng(0).permutation(len(detections)).tolist()
    some = [d | {"score": 0.001 * score} for d, score in zip(detections, scores, strict=True)][::2]
    expected, kinds = by_loops(truth, some)
    found, boxes = error_analysis.match(annotations, some)
    for without in range(CLASSIFICATION, MISSED + 1):
        fixed = dict.fromkeys(k for k, kind in kinds.items() if kind == without)
        left = [box for k, box in enumerate(truth["annotations"]) if without != MISSED or k not in fixed]
        corrected = [detection for detection, kind, _ in expected if kind != without]
        for detection, kind, k in expected:
            if kind == without and fixed.pop(k, 0) is None:
                box = truth["annotations"][k]
                corrected.append({**box, "score": detection["score"]})
        wanted = mean_ap50(truth | {"annotations": left}, corrected)
        assert error_analysis.ap50(found, boxes, without) == pytest.approx(wanted, abs=1e-12), without


def test_the_least_score_is_that_with_the_best_f1(scene):
    found, boxes = error_analysis.match(*scene[1:])
    count = np.count_nonzero(boxes["kind"] == MISSED)

    def f1(least):
        kinds = found["kind"][found["score"] >= least]
        return 2 * np.count_nonzero(kinds == CORRECT) / (len(kinds) + count)

    assert f1(error_analysis.best_score(found, boxes)) == max(map(f1, found["score"]))


@pytest.mark.parametrize("kind", ["coco", "tfrecord"])
def test_the_report_of_drawn_images(drawn, drawn_records, tmp_path, kind):
    source = open_coco(drawn / "images", drawn / "instances.json")
    if kind == "tfrecord":
        source = open_tfrecords(f"{drawn_records}*.tfrecord")
    boxes = [box for box in source.annotations.ground_truth()["annotations"] if not box["iscrowd"]]
    boxes = [box for box in boxes if min(box["bbox"]) >= 0 and min(box["bbox"][2:]) > 0]
    other = boxes[1] | {"category_id": 3 if boxes[1]["category_id"] != 3 else 17, "score": 0.9}
    results = [boxes[0] | {"score": 0.8}, boxes[0] | {"score": 0.7}, other, boxes[2] | {"score": 0.4}]
    text = error_analysis.report(source, results, tmp_path, min_score=0.5)
    found = json.loads((tmp_path / "errors.json").read_text())
    number = int(np.count_nonzero(~source.annotations.is_crowd))
    counts = dict.fromkeys(KINDS, 0) | {"correct": 1, "classification": 1, "duplicate": 1}
    assert found["counts"] == counts | {"missed": number - 2} and found["num_boxes"] == number
    assert found["least_score"] == 0.5 and found["dAP50"].keys() == counts.keys() - {"correct"}
    names, matrix = found["confusion_matrix"]["classes"], np.array(found["confusion_matrix"]["counts"])
    assert names == [*source.label_map.names, "background"] and matrix.shape == (4, 4)
    assert matrix.sum() == 3 + number - 2
    assert f"3 detections with a score of at least 0.5 (given), 1 correct; {number} boxes, 1 found" in text
    assert len(text.splitlines()) == 8
    with PIL.Image.open(tmp_path / "errors.png") as sheet:
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(2**24)}
    assert (0xCC, 0x33, 0x11) in colours and (0x66, 0xCC, 0xEE) in colours


def test_without_detections_or_boxes_and_with_many_classes(drawn, tmp_path):
    source = open_coco(drawn / "images", drawn / "instances.json")
    assert "0 detections" in error_analysis.report(source, [], tmp_path)
    found = json.loads((tmp_path / "errors.json").read_text())
    assert (found["AP50"], found["dAP50"]["missed"], found["dAP50"]["background"]) == (0, 1, 0)
    nothing = source.annotations.select(np.diff(source.annotations.row_splits) == 0)
    detection = {"image_id": int(nothing.image_ids[0]), "category_id": 3, "bbox": [1, 1, 9, 9], "score": 0.5}
    (tmp_path / "empty").mkdir()
    empty = CocoSource(str(drawn / "images"), nothing)
    assert "0 boxes, 0 found" in error_analysis.report(empty, [detection], tmp_path / "empty")
    assert json.loads((tmp_path / "empty" / "errors.json").read_text())["counts"]["background"] == 1
    error_analysis.draw_matrix(np.eye(100, dtype=int), [f"${k}$" for k in range(100)], tmp_path / "many.png")
    assert max(PIL.Image.open(tmp_path / "many.png").size) < 4000
