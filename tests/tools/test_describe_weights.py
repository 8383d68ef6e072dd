"""Tests tools/describe_weights.py."""

import dataclasses
import json
import re

import keras
import pytest

from common.data.labels import LabelMap
from common.weights import checkpoint_files, model_metadata, weight_files
from efficientdet.config import get_config
from efficientdet.model_metadata import make_metadata
from tests.refusal import refusal
from tools import describe_weights

LABELS = LabelMap((3, 17, 90), ("car", "Katze", "toothbrush"))


def make(**changes):
    """`changes` replaces fields of the model's config."""
    return make_metadata(dataclasses.replace(get_config("efficientdet-nano"), **changes), LABELS, 3)


@pytest.fixture(scope="module")
def made():
    return make()


def save(path, metadata):
    weight_files.save(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), path, metadata)
    return path


@pytest.fixture
def weights(made, tmp_path):
    return save(tmp_path / "best.weights.h5", made | {"epoch": 4, "AP": 0.251})


def test_it_is_printed_for_people_and_for_programs(weights, made, capsys):
    describe_weights.show(str(weights))
    shown = capsys.readouterr().out
    rows = dict(re.split(" {2,}", line, maxsplit=1) for line in shown.splitlines())
    assert rows["config.model_name"] == "efficientdet-nano"
    assert (rows["config.image_size"], rows["epoch"], rows["AP"]) == ("[256, 256]", "4", "0.251")
    assert rows["class 2"] == "category 90, toothbrush"
    describe_weights.show(str(weights), json=True)
    assert json.loads(capsys.readouterr().out)["config"] == made["config"]


def test_two_files_are_compared(weights, made, tmp_path, capsys):
    other = save(tmp_path / "other.weights.h5", make(nms_iou=0.6))
    describe_weights.show(str(weights), str(other))
    assert capsys.readouterr().out == "config.nms_iou: first 0.5, second 0.6\n"
    describe_weights.show(str(other), str(other))
    assert capsys.readouterr().out == "nothing differs\n"
    assert "give one weights file" in refusal(describe_weights.show)


def test_checkpoint_and_file_with_few_fields_are_described(made, tmp_path):
    manifest = made | {"state": {"step": 10, "epoch": 1}}
    checkpoint_files.write(tmp_path, 10, manifest, lambda path: None)
    text = describe_weights.describe(model_metadata.read(tmp_path))
    assert re.search(r"^state.step +10$", text, re.M)
    few = {name: made[name] for name in ("app", "num_classes", "label_map")}
    assert re.search(r"^class 1 +category 17, Katze$", describe_weights.describe(few), re.M)
