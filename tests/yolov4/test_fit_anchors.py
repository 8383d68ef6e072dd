"""Tests the command fit_anchors.py. test_anchor_fit.py tests the fit."""

import json
import re

import numpy as np
import pytest

from common.data.coco import load_coco
from common.hparams import override
from tests.common.made_annotations import annotations
from tests.refusal import refusal
from yolov4.config import get_config
from yolov4.fit_anchors import box_sizes, suggest, trained_iou


def write_boxes(path, sizes, image_size=(480, 640)):
    """One image has a box for each (width, height) in `sizes`."""
    document = annotations([image_size], [(0, 0, 0, 0, *size) for size in sizes]).ground_truth()
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    ("keep_aspect", "expected"),
    [(False, (50, 50)), (True, (50, 40))],
    ids=["stretched", "letterboxed"],
)
def test_box_sizes_for_the_anchor_fit_are_in_pixels_of_the_network_input(tmp_path, keep_aspect, expected):
    path = write_boxes(tmp_path / "a.json", [(100, 80), (0, 9)], (512, 640))
    sizes = box_sizes(load_coco(path, None), (320, 320), keep_aspect)
    np.testing.assert_allclose(sizes, [expected], rtol=1e-6)


def test_fit_anchors_command_prints_hparams_with_better_anchors(tmp_path, capsys):
    random = np.random.default_rng(2)
    path = write_boxes(tmp_path / "a.json", random.uniform(8, 300, (60, 2)).tolist())
    text = suggest(annotations=path, model_name="yolov4-tiny", image_size="320x416")
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"--hparams={text}"
    assert "60 boxes at 320x416" in out
    old, new = (float(line.split("mean best IoU ")[1][:5]) for line in out.splitlines() if "IoU" in line)
    assert new > old + 0.05
    assert "iou_thresh=0.213" in out  # no head has yolov4-tiny's first anchor
    numbers = [int(number) for number in text.removeprefix("anchors=").split(",")]
    areas = np.prod(np.reshape(numbers, (6, 2)), axis=1)
    assert (np.diff(areas) >= 0).all()


def test_fit_anchors_command_logs_the_issues_of_the_annotations(tmp_path, capsys):
    random = np.random.default_rng(2)
    sizes = [(9999, 20), *random.uniform(8, 300, (60, 2)).tolist()]
    path = write_boxes(tmp_path / "a.json", sizes)
    suggest(annotations=path, model_name="yolov4-tiny")
    assert f"{path}: box that reaches outside its image: annotation 1 " in capsys.readouterr().err


BAD_INPUT = [
    ({}, "--annotations is missing"),
    ({"sizes": [(10, 10)] * 20}, "fewer than 9 different sizes"),
    ({"sizes": [(10, 10)], "image_size": "100"}, "multiples of 32"),
]


@pytest.mark.parametrize(("options", "message"), BAD_INPUT, ids=["no file", "few sizes", "image size"])
def test_fit_anchors_command_refuses_missing_annotations_too_few_box_sizes_or_a_bad_image_size(
    tmp_path, options, message
):
    sizes = options.pop("sizes", None)
    if sizes:
        options["annotations"] = write_boxes(tmp_path / "a.json", sizes)
    assert re.search(message, refusal(suggest, **options))


def test_fit_anchors_command_prints_no_hparams_if_the_model_anchors_fit(tmp_path, capsys):
    random = np.random.default_rng(3)
    anchors = np.array(get_config("yolov4").anchor_sizes)
    sizes = np.concatenate([anchors * random.uniform(0.9, 1.1, anchors.shape) for _ in range(20)])
    path = write_boxes(tmp_path / "a.json", sizes.tolist(), image_size=(608, 608))
    assert suggest(annotations=path) == ""
    out = capsys.readouterr().out
    assert "the anchors of yolov4 fit" in out and "--hparams" not in out


def test_anchor_that_no_head_uses_becomes_1x1_so_that_every_box_trains_a_prediction(tmp_path, capsys):
    path = write_boxes(tmp_path / "a.json", [(12 + x, 15 + 2 * x) for x in np.linspace(0, 1, 60)], (416, 416))
    text = suggest(annotations=path, model_name="yolov4-tiny")
    lines = capsys.readouterr().out.splitlines()
    assert "mean best IoU 0.000" in lines[1]
    assert re.match(r"anchors=1,1,1[23],1[5-7],", text)
    tiny = override(get_config("yolov4-tiny"), text)
    assert (trained_iou(box_sizes(load_coco(path, None), (416, 416), False), tiny) > 0).all()


def test_trained_iou_of_a_box_whose_best_anchor_no_head_uses_is_zero():
    tiny = get_config("yolov4-tiny")
    sizes = np.array([[10.0, 14.0], [23.0, 27.0], [344.0, 638.0]])
    np.testing.assert_allclose(trained_iou(sizes, tiny), [0, 1, 0.5])
    loose = override(tiny, "iou_thresh=0.213")
    np.testing.assert_allclose(trained_iou(sizes, loose), [140 / 621, 1, 0.5])
