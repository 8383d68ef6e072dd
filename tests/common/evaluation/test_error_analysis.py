"""Tests the analysis of errors against plain loops over detections and boxes, and against pycocotools."""

import collections
import dataclasses
import json

import numpy as np
import PIL.Image
import pytest
from matplotlib.text import Text

from common.data.coco import CocoSource, load_coco
from common.data.open import open_coco
from common.evaluation import coco_metrics, error_analysis
from common.evaluation.error_analysis import (
    BACKGROUND,
    BOTH,
    CLASSIFICATION,
    CORRECT,
    DUPLICATE,
    KINDS,
    LOCALISATION,
    MISSED,
)
from tests.common.evaluation.test_coco_metrics import IDS, random_detections, random_ground_truth


def overlap(detection, box):
    """Returns the IoU. For a crowd, returns the share of the detection that lies in the crowd."""
    (x, y, width, height), (left, top, *sides) = detection["bbox"], box["bbox"]
    common = max(min(x + width, left + sides[0]) - max(x, left), 0)
    common *= max(min(y + height, top + sides[1]) - max(y, top), 0)
    # The areas are added in the order of pycocotools.
    union = width * height + sides[0] * sides[1] - common
    return common / (width * height if box["iscrowd"] else union)


def match_by_loops(truth, detections):
    """Returns the matches, highest score first, and {index of a ground-truth box: kind of error}.

    A match is (detection, kind of error, index of the matched ground-truth box).
    """
    matches, ranks = [], collections.Counter()
    kinds = {k: MISSED for k, box in enumerate(truth["annotations"]) if not box["iscrowd"]}
    for detection in sorted(detections, key=lambda d: (-d["score"], d["bbox"])):
        image_id, category_id = detection["image_id"], detection["category_id"]
        ranks[image_id, category_id] += 1
        boxes = {k: box for k, box in enumerate(truth["annotations"]) if box["image_id"] == image_id}
        ious = {k: overlap(detection, box) for k, box in boxes.items()}
        same_class = {k: iou for k, iou in ious.items() if boxes[k]["category_id"] == category_id}
        crowds = [same_class.pop(k) for k in list(same_class) if k not in kinds]
        other_class = {k: iou for k, iou in ious.items() if k in kinds and k not in same_class}
        closest, wrong = (max(group, key=group.get, default=None) for group in (same_class, other_class))
        best, best_wrong = same_class.get(closest, 0), other_class.get(wrong, 0)
        free = [(iou, k) for k, iou in same_class.items() if iou >= 0.5 and kinds[k] != CORRECT]
        if ranks[image_id, category_id] > 100 or (not free and max(crowds, default=0) >= 0.5):
            continue
        if free:
            kinds[max(free)[1]] = CORRECT
            matches.append((detection, CORRECT, max(free)[1]))
        elif 0.1 <= best < 0.5:
            matches.append((detection, LOCALISATION, closest))
        elif best_wrong >= 0.5:
            matches.append((detection, CLASSIFICATION, wrong))
        else:
            kind = DUPLICATE if best >= 0.5 else BACKGROUND if max(best, best_wrong) < 0.1 else BOTH
            matches.append((detection, kind, None))
    for _, kind, k in matches:
        if kind in (CLASSIFICATION, LOCALISATION) and kinds[k] == MISSED:
            kinds[k] = kind
    return matches, kinds


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A COCO dict, the same as Annotations, and detections."""
    truth = random_ground_truth(num_images=95)
    truth["images"] = [image | {"file_name": "x.jpg"} for image in truth["images"]]
    # Different areas, because load_coco drops boxes that repeat another one.
    truth["annotations"] = [box | {"area": number} for number, box in enumerate(truth["annotations"])]
    path = tmp_path_factory.mktemp("scene") / "truth.json"
    path.write_text(json.dumps(truth))
    detections = [d for d in random_detections(truth) if min(d["bbox"][2:]) > 0]
    return truth, load_coco(path), detections


@pytest.mark.parametrize("min_score", [0, 0.5])
def test_types_of_detection_errors_and_confusion_matrix_equal_plain_loops(scene, min_score):
    truth, annotations, detections = scene
    expected, kinds = match_by_loops(truth, [d for d in detections if d["score"] >= min_score])
    matches, boxes = error_analysis.match(annotations, detections)
    matches = matches[matches["score"] >= min_score]
    boxes["kind"] = error_analysis.kinds_of_boxes(matches, boxes)[0]

    def rows(table):
        table = table[table["kind"] != error_analysis.IGNORED]
        columns = annotations.image_ids[table["image"]], np.array(IDS)[table["class"]], table["kind"]
        return sorted(zip(*(column.tolist() for column in (*columns, table["box"])), strict=True))

    def row_of(box, kind):
        return box["image_id"], box["category_id"], kind, box["bbox"]

    assert rows(matches) == sorted(row_of(detection, kind) for detection, kind, _ in expected)
    assert rows(boxes) == sorted(row_of(truth["annotations"][k], kind) for k, kind in kinds.items())
    assert len(kinds) > 400 and len(set(matches["kind"])) == 6

    matrix = np.zeros((8, 8), int)
    classes = {k: IDS.index(truth["annotations"][k]["category_id"]) for k in kinds}
    hits = {k for _, kind, k in expected if kind in (CORRECT, CLASSIFICATION)}
    for detection, kind, k in expected:
        row = classes[k] if kind in (CORRECT, CLASSIFICATION) else 7
        matrix[row, IDS.index(detection["category_id"])] += 1
    for k in kinds.keys() - hits:
        matrix[classes[k], 7] += 1
    np.testing.assert_array_equal(error_analysis.confusion_matrix(matches, boxes, 7), matrix)


def mean_ap50(truth, detections):
    """A class without boxes, -1 in pycocotools, counts as 1."""
    rows = coco_metrics.score(truth, detections).metrics["per_class"]
    return np.mean([abs(rows[f"class {category_id}"]["AP50"]) for category_id in IDS[:5]])


def test_ap50_equals_pycocotools_before_and_after_all_errors_of_one_type_are_corrected(scene):
    truth, annotations, detections = scene
    matches, boxes = error_analysis.match(annotations, detections)
    assert error_analysis.ap50(matches, boxes) == pytest.approx(mean_ap50(truth, detections), abs=1e-12)
    # All scores are different.
    scores = np.random.default_rng(0).permutation(len(detections)).tolist()
    some = [d | {"score": 0.001 * score} for d, score in zip(detections, scores, strict=True)][::2]
    expected, kinds = match_by_loops(truth, some)
    matches, boxes = error_analysis.match(annotations, some)
    for without in range(CLASSIFICATION, MISSED + 1):
        fixed = dict.fromkeys(k for k, kind in kinds.items() if kind == without)
        annotations = [
            box for k, box in enumerate(truth["annotations"]) if without != MISSED or k not in fixed
        ]
        corrected = [detection for detection, kind, _ in expected if kind != without]
        for detection, kind, k in expected:
            if kind == without and fixed.pop(k, 0) is None:
                corrected.append({**truth["annotations"][k], "score": detection["score"]})
        ap50 = mean_ap50(truth | {"annotations": annotations}, corrected)
        assert error_analysis.ap50(matches, boxes, without) == pytest.approx(ap50, abs=1e-12), without


def test_best_score_threshold_has_the_highest_f1_of_all_detection_scores(scene):
    matches, boxes = error_analysis.match(*scene[1:])
    count = np.count_nonzero(boxes["kind"] == MISSED)

    def f1(min_score):
        kinds = matches["kind"][matches["score"] >= min_score]
        return 2 * np.count_nonzero(kinds == CORRECT) / (len(kinds) + count)

    assert f1(error_analysis.best_score(matches, boxes)) == max(map(f1, matches["score"]))


@pytest.fixture
def drawn_source(drawn):
    return open_coco(drawn / "images", drawn / "instances.json")


def read_errors(directory):
    return json.loads((directory / "errors.json").read_text())


def test_error_report_of_known_detections_has_their_counts_by_error_type_and_a_picture(
    drawn_source, tmp_path
):
    annotations = drawn_source.annotations
    boxes = [box for box in annotations.ground_truth()["annotations"] if not box["iscrowd"]]
    boxes = [box for box in boxes if min(box["bbox"]) >= 0 and min(box["bbox"][2:]) > 0]
    wrong_class = boxes[1] | {"category_id": 3 if boxes[1]["category_id"] != 3 else 17, "score": 0.9}
    results = [boxes[0] | {"score": 0.8}, boxes[0] | {"score": 0.7}, wrong_class, boxes[2] | {"score": 0.4}]
    text, files = error_analysis.report(drawn_source, results, tmp_path, min_score=0.5)
    assert sorted(files) == sorted(path.name for path in tmp_path.iterdir())
    document = read_errors(tmp_path)
    number = int(np.count_nonzero(~annotations.is_crowd))
    counts = dict.fromkeys(KINDS, 0) | {"correct": 1, "classification": 1, "duplicate": 1}
    assert document["counts"] == counts | {"missed": number - 2} and document["num_boxes"] == number
    assert document["least_score"] == 0.5 and document["dAP50"].keys() == counts.keys() - {"correct"}
    names, matrix = document["confusion_matrix"]["classes"], np.array(document["confusion_matrix"]["counts"])
    assert names == [*drawn_source.label_map.names, "background"] and matrix.shape == (4, 4)
    assert matrix.sum() == 3 + number - 2
    assert "3 detections with a score of at least 0.5 (given), 1 correct\n" in text
    boxes = f"{number} boxes, 1 found, 1 only with a wrong class, 0 only with a poor box, {number - 2} missed"
    assert f"\n{boxes}\n" in text
    assert len(text.splitlines()) == 9
    with PIL.Image.open(tmp_path / "errors.png") as sheet:
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(2**24)}
    assert (0xCC, 0x33, 0x11) in colours and (0x66, 0xCC, 0xEE) in colours


def test_error_report_without_detections_counts_all_boxes_as_missed(drawn_source, tmp_path):
    assert "0 detections" in error_analysis.report(drawn_source, [], tmp_path)[0]
    document = read_errors(tmp_path)
    assert (document["AP50"], document["dAP50"]["missed"], document["dAP50"]["background"]) == (0, 1, 0)


def test_error_report_without_ground_truth_boxes_counts_a_detection_as_background(
    drawn, drawn_source, tmp_path
):
    annotations = drawn_source.annotations
    empty = annotations.select(np.diff(annotations.row_splits) == 0)
    detection = {"image_id": int(empty.image_ids[0]), "category_id": 3, "bbox": [1, 1, 9, 9], "score": 0.5}
    text, _ = error_analysis.report(CocoSource(str(drawn / "images"), empty), [detection], tmp_path)
    assert "0 boxes, 0 found" in text
    document = read_errors(tmp_path)
    assert (document["AP50"], document["counts"]["background"]) == (0, 1)


def test_plot_of_a_confusion_matrix_of_100_classes_is_below_4000_pixels(tmp_path):
    names = [f"${k}$" for k in range(100)]
    error_analysis.draw_matrix(np.eye(101, dtype=int), [*names, "background"], tmp_path / "many.png")
    assert max(PIL.Image.open(tmp_path / "many.png").size) < 4000


def test_plot_of_a_confusion_matrix_has_counts_and_shares_of_rows_of_the_classes_that_occur(
    figures, tmp_path
):
    matrix = np.array([[6, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 3, 0]])
    error_analysis.draw_matrix(matrix, ["cat", "dog", "cow", "background"], tmp_path / "matrix.png")
    axes = figures[0].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "cow", "background"]
    shares = [[6 / 8, 1 / 8, 1 / 8], [0, 0, 0], [0, 1, 0]]
    np.testing.assert_allclose(axes.images[0].get_array(), shares)
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "6\n75%", (1, 0): "1\n12%", (2, 0): "1\n12%", (1, 2): "3\n100%"}


def undrawable(*args):
    raise ValueError("no picture")


def test_report_is_written_even_if_its_pictures_cannot_be_drawn(drawn_source, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(error_analysis, "draw_matrix", undrawable)
    monkeypatch.setattr(error_analysis, "worst_sheet", undrawable)
    text, files = error_analysis.report(drawn_source, [], tmp_path)
    assert "0 detections" in text and files == ["errors.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["errors.json"]
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [
        str(tmp_path / name) for name in ("confusion_matrix.png", "errors.png")
    ]


def test_names_in_the_pictures_of_errors_are_literal(drawn_source, tmp_path, monkeypatch, figures):
    names = ("$5_$10", "_background_", "a_$x^$")
    label_map = dataclasses.replace(drawn_source.label_map, names=names)
    annotations = dataclasses.replace(drawn_source.annotations, label_map=label_map)
    source = CocoSource(drawn_source.images_dir, annotations)
    captions, caption = [], error_analysis.drawing.caption
    monkeypatch.setattr(
        error_analysis.drawing, "caption", lambda text, *args: captions.append(text) or caption(text, *args)
    )
    error_analysis.report(source, [], tmp_path)
    assert set(names) <= set(captions)
    texts = {text.get_text(): text for text in figures[0].findobj(Text)}
    assert set(names) <= texts.keys()
    assert not any(texts[name].get_parse_math() for name in names)
