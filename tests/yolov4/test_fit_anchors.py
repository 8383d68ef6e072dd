import json
import re

import numpy as np
import pytest

from common.data.check.coco import load_coco
from common.hparams import override
from tests.common.made_annotations import annotations
from tests.refusal import refusal
from yolov4.anchor_fit import fit_anchors, shape_iou
from yolov4.config import get_config
from yolov4.fit_anchors import box_sizes, suggest, trained_iou


def write(path, sizes, image_size=(480, 640)):
    """One image has a box for each (width, height) in `sizes`."""
    document = annotations([image_size], [(0, 0, 0, 0, *size) for size in sizes]).ground_truth()
    path.write_text(json.dumps(document))
    return str(path)


def shape_fit(sizes, anchors):
    return shape_iou(sizes, anchors).max(1).mean()


def test_no_start_of_plain_k_means_is_better():
    random = np.random.default_rng(1)
    sizes = np.exp(random.normal(3.5, 0.8, (800, 2)))
    fitted = shape_fit(sizes, fit_anchors(sizes, 9))
    assert fitted > shape_fit(sizes, np.array(get_config("yolov4").anchor_sizes)) + 0.02
    assert fitted > 0.99 * max(shape_fit(sizes, fit_anchors(sizes, 9, seed)) for seed in (1, 2))


@pytest.mark.parametrize(("keep_aspect", "expected"), [(False, (50, 50)), (True, (50, 40))])
def test_sizes_are_those_in_the_network_input(tmp_path, keep_aspect, expected):
    path = write(tmp_path / "a.json", [(100, 80), (0, 9)], (512, 640))
    sizes = box_sizes(load_coco(path, None), (320, 320), keep_aspect)
    np.testing.assert_allclose(sizes, [expected], rtol=1e-6)


def test_the_command_prints_what_to_type(tmp_path, capsys):
    random = np.random.default_rng(2)
    path = write(tmp_path / "a.json", random.uniform(8, 300, (60, 2)).tolist())
    text = suggest(annotations=path, model_name="yolov4-tiny", image_size="320x416")
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"--hparams={text}"
    assert "60 boxes at 320x416" in out
    own, new = (float(line.split("mean best IoU ")[1][:5]) for line in out.splitlines() if "IoU" in line)
    assert new > own + 0.05
    assert "iou_thresh=0.213" in out  # no head has yolov4-tiny's first anchor
    numbers = [int(number) for number in text.removeprefix("anchors=").split(",")]
    areas = np.prod(np.reshape(numbers, (6, 2)), axis=1)
    assert (np.diff(areas) >= 0).all()


BAD_INPUT = [
    ({}, "--annotations is missing"),
    ({"sizes": [(10, 10)] * 20}, "fewer than 9 different sizes"),
    ({"sizes": [(10, 10)], "image_size": "100"}, "multiples of 32"),
]


@pytest.mark.parametrize(("options", "message"), BAD_INPUT)
def test_bad_input_is_one_line(tmp_path, options, message):
    sizes = options.pop("sizes", None)
    if sizes:
        options["annotations"] = write(tmp_path / "a.json", sizes)
    assert re.search(message, refusal(suggest, **options))


def test_anchors_that_fit_are_left_alone(tmp_path, capsys):
    random = np.random.default_rng(3)
    own = np.array(get_config("yolov4").anchor_sizes)
    sizes = np.concatenate([own * random.uniform(0.9, 1.1, own.shape) for _ in range(20)])
    path = write(tmp_path / "a.json", sizes.tolist(), image_size=(608, 608))
    assert suggest(annotations=path) == ""
    out = capsys.readouterr().out
    assert "the anchors of yolov4 fit" in out and "--hparams" not in out


def test_no_box_is_lost_to_an_anchor_that_no_head_has(tmp_path, capsys):
    path = write(tmp_path / "a.json", [(12 + x, 15 + 2 * x) for x in np.linspace(0, 1, 60)], (416, 416))
    text = suggest(annotations=path, model_name="yolov4-tiny")
    lines = capsys.readouterr().out.splitlines()
    assert "mean best IoU 0.000" in lines[1]
    assert re.match(r"anchors=1,1,1[23],1[5-7],", text)
    tiny = override(get_config("yolov4-tiny"), text)
    assert (trained_iou(box_sizes(load_coco(path, None), (416, 416), False), tiny) > 0).all()


def test_trained_iou_by_hand():
    tiny = get_config("yolov4-tiny")
    sizes = np.array([[10.0, 14.0], [23.0, 27.0], [344.0, 638.0]])
    np.testing.assert_allclose(trained_iou(sizes, tiny), [0, 1, 0.5])
    loose = override(tiny, "iou_thresh=0.213")
    np.testing.assert_allclose(trained_iou(sizes, loose), [140 / 621, 1, 0.5])
