"""Generated .cfg files against the values of the public ones; test_darknet_weights has OpenCV read them."""

import dataclasses

import pytest

from yolov4.config import get_config
from yolov4.import_weights.darknet_cfg import cfg_text

NET = {"channels": "3", "decay": "0.0005", "saturation": "1.5", "exposure": "1.5", "hue": "0.1"}
NET |= {"burn_in": "1000", "power": "4", "policy": "steps", "scales": "0.1,0.1", "batch": "64"}
YOLO = {"classes": "80", "jitter": "0.3", "ignore_thresh": "0.7", "truth_thresh": "1", "iou_loss": "ciou"}
YOLO |= {"cls_normalizer": "1", "iou_normalizer": "0.07", "beta_nms": "0.6"}
V4 = {"num": "9", "iou_thresh": "0.213", "max_delta": "5"}
V4 |= {"anchors": "12,16,19,36,40,28,36,75,76,55,72,146,142,110,192,243,459,401"}
TINY = {"num": "6", "scale_x_y": "1.05", "anchors": "10,14,23,27,37,58,81,82,135,169,344,319"}
PUBLIC = {  # model: [net] and every [yolo], in the file's order
    "yolov4": (
        NET
        | {"width": "608", "height": "608", "momentum": "0.949", "learning_rate": "0.0013", "mosaic": "1"},
        [
            YOLO | V4 | {"mask": "0,1,2", "scale_x_y": "1.2"},
            YOLO | V4 | {"mask": "3,4,5", "scale_x_y": "1.1"},
            YOLO | V4 | {"mask": "6,7,8", "scale_x_y": "1.05"},
        ],
    ),
    "yolov4-tiny": (
        NET | {"width": "416", "height": "416", "momentum": "0.9", "learning_rate": "0.00261", "mosaic": "0"},
        [YOLO | TINY | {"mask": "3,4,5", "random": "0"}, YOLO | TINY | {"mask": "1,2,3", "random": "0"}],
    ),
}
BATCHES = {"yolov4": (500_500, [400_000, 450_000]), "yolov4-tiny": (2_000_200, [1_600_000, 1_800_000])}


def sections(text, name):
    """Each section `name` as a dict."""
    blocks = [block.splitlines() for block in text.split("[")[1:]]
    return [dict(line.split("=") for line in block[1:] if line) for block in blocks if block[0] == f"{name}]"]


@pytest.mark.parametrize("name", list(PUBLIC))
def test_values_are_those_of_the_public_cfg(name):
    text = cfg_text(get_config(name), 80)
    (net,), yolo = sections(text, "net"), sections(text, "yolo")
    public_net, public_yolo = PUBLIC[name]
    assert public_net.items() <= net.items()
    assert len(yolo) == len(public_yolo)
    for ours, theirs in zip(yolo, public_yolo, strict=True):
        assert theirs.items() <= ours.items()
        assert ours["nms_kind"] == "default"  # theirs is greedynms, which is not our greedy: common/nms.py
    max_batches, steps = BATCHES[name]
    assert int(net["max_batches"]) == pytest.approx(max_batches, rel=2e-3)  # whole epochs of train2017
    assert [int(step) for step in net["steps"].split(",")] == pytest.approx(steps, rel=2e-3)
    assert ("iou_thresh" in yolo[0]) == ("max_delta" in yolo[0]) == (name == "yolov4")


def test_the_size_and_the_classes_are_those_asked_for():
    config = dataclasses.replace(get_config("yolov4"), image_size=(320, 608))
    text = cfg_text(config, 3)
    (net,) = sections(text, "net")
    assert (net["height"], net["width"]) == ("320", "608")
    assert {section["classes"] for section in sections(text, "yolo")} == {"3"}
    linear = [s for s in sections(text, "convolutional") if s["activation"] == "linear"]
    assert [s["filters"] for s in linear] == ["24", "24", "24"]
    assert all("batch_normalize" not in s for s in linear)


def test_other_recipes():
    config = dataclasses.replace(
        get_config("yolov4"),
        optimizer="adam",
        momentum=0.8,
        lr_schedule="cosine",
        letterbox=True,
        mixup_prob=0.5,
        ema_decay=0.999,
        reference_batch=20,
        nms_method="diou",
        label_smoothing=0.1,
        flip_prob=0.0,
        hue=0.0,
    )
    text = cfg_text(config, 80)
    (net,) = sections(text, "net")
    expected = {"adam": "1", "B1": "0.8", "policy": "sgdr", "sgdr_cycle": net["max_batches"], "mosaic": "0"}
    expected |= {"letter_box": "1", "mixup": "1", "ema_alpha": "0.999", "subdivisions": "4", "flip": "0"}
    assert (expected | {"hue": "0"}).items() <= net.items()
    assert "steps" not in net
    assert {"nms_kind": "diounms", "label_smooth_eps": "0.1"}.items() <= sections(text, "yolo")[0].items()
