"""Tests chain.py and arguments.py."""

import pytest
from nvidia.dali import types

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from tests.refusal import refusal
from tools.preprocessing import chain
from tools.preprocessing.arguments import Range


def test_a_chain():
    found = chain.parse(
        "resize:short=256 | crop:224x112 |color_twist:brightness=0.8..1.2,hue=-5| "
        "rotate:angle=-10..10,fill=114| flip:p=0.5 | crop_mirror_normalize:mean=imagenet"
    )
    assert [(step.operator.name, step.arguments) for step in found.steps] == [
        ("resize", {"resize_shorter": 256}),
        ("crop", {"crop": (224, 112)}),
        ("color_twist", {"brightness": Range(0.8, 1.2), "hue": -5}),
        ("rotate", {"angle": Range(-10, 10), "fill_value": 114}),
        ("flip", {"p": 0.5}),
        ("crop_mirror_normalize", {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}),
    ]
    assert found.decoder.operator.name == "decode"
    assert found.layout == "HWC"


def test_decoding_may_be_left_out_or_said():
    assert chain.parse("").decoder.arguments == {}
    assert chain.parse("decode:gray").color == types.GRAY
    said = chain.parse("decode_random_crop:area=0.1..0.5,exif=ignore | crop_mirror_normalize:layout=chw")
    assert said.decoder.arguments == {"random_area": (0.1, 0.5), "exif": False}
    assert said.layout == "CHW"


REFUSED = [
    ("resise:3", "unknown operator 'resise': did you mean 'resize'?"),
    ("resize:3 |", "unknown operator ''"),
    ("resize:shrt=3", "unknown argument 'shrt': did you mean 'short'?"),
    ("resize", "give size or resize_shorter or resize_longer"),
    ("resize:2.5", "'2.5' is not a whole number"),
    ("resize:short=0", "'0' is not a number from 1 to 65535, or a range such as 0.8..1.2"),
    ("resize:65536x1", "'65536' is not a whole number from 1 to 65535"),
    ("resize:3,interp=bilinear", "unknown value 'bilinear': did you mean"),
    ("resize:short=3,short=4", "short is given twice"),
    ("resize:3,4", "'4' is not name=value"),
    ("flip:2", "'2' is not a number from 0 to 1"),
    ("letterbox:100..200", "'100..200' is not a whole number from 1 to 65535"),
    ("cast:uint9", "unknown value 'uint9': did you mean 'uint8'?"),
    ("crop_mirror_normalize:std=0/1/1", "'0' is not a number from 1e-06 to inf"),
    ("jpeg_compression_distortion:0..50", "is not a whole number from 1 to 100"),
    ("decode:gray | hue:3", "hue needs colour images, but decode makes gray ones"),
    ("crop:3 | decode", "decode must be the first operator"),
    ("layout:CHW | crop:3", "crop needs the layout HWC: put it before the change to CHW"),
    ("layout:HWC", "images are HWC already"),
]


@pytest.mark.parametrize(("ops", "said"), REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(ops, said):
    found = refusal(chain.parse, ops)
    assert said in found and found.startswith("--ops")


def test_arrays_are_not_decoded():
    assert "remove the decoder" in refusal(chain.parse, "decode:bgr", is_decoded=True)


def test_the_list_of_operators_names_all_with_their_arguments():
    text = chain.describe()
    for name in ("decode_random_crop", "resize", "letterbox", "crop_mirror_normalize", "warp_affine"):
        assert f"\n{name}: " in f"\n{text}"
    assert "    short, resize_shorter: number, may be a range" in text
    assert "    fill, fill_value: number" in text
