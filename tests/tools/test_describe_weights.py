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


def metadata_of(**changes):
    """`changes` replaces fields of the model's config."""
    return make_metadata(dataclasses.replace(get_config("efficientdet-nano"), **changes), LABELS, 3)


def save(path, metadata):
    weight_files.save(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), path, metadata)
    return str(path)


@pytest.fixture
def weights(tmp_path):
    return save(tmp_path / "best.weights.h5", metadata_of() | {"epoch": 4, "AP": 0.251})


def test_describe_weights_prints_the_metadata_of_a_weights_file_as_table_or_as_json(weights, capsys):
    describe_weights.show(weights)
    rows = dict(re.split(" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["config.model_name"] == "efficientdet-nano"
    assert (rows["config.image_size"], rows["epoch"], rows["AP"]) == ("[256, 256]", "4", "0.251")
    assert rows["class 2"] == "category 90, toothbrush"
    describe_weights.show(weights, json=True)
    assert json.loads(capsys.readouterr().out)["config"] == metadata_of()["config"]


def test_differences_of_two_weights_files_are_printed(weights, tmp_path, capsys):
    second = save(tmp_path / "second.weights.h5", metadata_of(nms_iou=0.6))
    describe_weights.show(weights, second)
    assert capsys.readouterr().out == "config.nms_iou: first 0.5, second 0.6\n"
    describe_weights.show(second, second)
    assert capsys.readouterr().out == "nothing differs\n"


def test_describe_weights_without_a_file_argument_is_refused():
    assert "give one weights file" in refusal(describe_weights.show)


def test_describe_weights_shows_the_step_of_a_checkpoint(tmp_path):
    manifest = metadata_of() | {"state": {"step": 10, "epoch": 1}}
    checkpoint_files.write(tmp_path, 10, manifest, lambda path: None)
    text = describe_weights.describe(model_metadata.read(tmp_path))
    assert re.search(r"^state.step +10$", text, re.M)


def test_describe_weights_shows_the_classes_of_metadata_that_lack_most_other_fields():
    fields = {name: metadata_of()[name] for name in ("app", "num_classes", "label_map")}
    assert re.search(r"^class 1 +category 17, Katze$", describe_weights.describe(fields), re.M)
