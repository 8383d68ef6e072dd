"""Compares the .cfg files that we write with Darknet's yolov4.cfg and yolov4-tiny.cfg."""

import dataclasses

import pytest

from yolov4.config import get_config
from yolov4.import_weights.darknet_cfg import cfg_text

YOLO = {"classes": "80", "beta_nms": "0.6"}
V4 = {"num": "9", "anchors": "12,16,19,36,40,28,36,75,76,55,72,146,142,110,192,243,459,401"}
TINY = {"num": "6", "scale_x_y": "1.05", "anchors": "10,14,23,27,37,58,81,82,135,169,344,319"}
SCALES = {"0,1,2": "1.2", "3,4,5": "1.1", "6,7,8": "1.05"}
PUBLIC = {  # model: (image side in [net], the [yolo] sections in order)
    "yolov4": ("608", [YOLO | V4 | {"mask": mask, "scale_x_y": scale} for mask, scale in SCALES.items()]),
    "yolov4-tiny": ("416", [YOLO | TINY | {"mask": mask} for mask in ("3,4,5", "1,2,3")]),
}


def sections(text, name):
    blocks = [block.splitlines() for block in text.split("[")[1:]]
    return [dict(line.split("=") for line in block[1:] if line) for block in blocks if block[0] == f"{name}]"]


@pytest.mark.parametrize("name", list(PUBLIC))
def test_written_darknet_cfg_has_the_values_of_the_net_and_yolo_sections_of_the_public_cfg(name):
    text = cfg_text(get_config(name), 80)
    (net,), yolo = sections(text, "net"), sections(text, "yolo")
    side, public_yolo = PUBLIC[name]
    assert {"width": side, "height": side, "channels": "3"}.items() <= net.items()
    assert len(yolo) == len(public_yolo)
    for ours, theirs in zip(yolo, public_yolo, strict=True):
        assert theirs.items() <= ours.items()
        assert ours["nms_kind"] == "default"  # Darknet's greedynms is another method than our "greedy"


def test_written_darknet_cfg_has_the_image_size_and_number_of_classes_of_the_model():
    config = dataclasses.replace(get_config("yolov4"), image_size=(320, 608))
    text = cfg_text(config, 3)
    (net,) = sections(text, "net")
    assert (net["height"], net["width"]) == ("320", "608")
    assert {section["classes"] for section in sections(text, "yolo")} == {"3"}
    linear = [s for s in sections(text, "convolutional") if s["activation"] == "linear"]
    assert [s["filters"] for s in linear] == ["24", "24", "24"]
    assert all("batch_normalize" not in s for s in linear)


def test_written_darknet_cfg_has_the_letterbox_and_diou_nms_of_the_config():
    text = cfg_text(dataclasses.replace(get_config("yolov4"), letterbox=True, nms_method="diou"), 80)
    assert sections(text, "net")[0]["letter_box"] == "1"
    assert sections(text, "yolo")[0]["nms_kind"] == "diounms"
