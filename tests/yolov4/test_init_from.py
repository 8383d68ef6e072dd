"""Tests --init_from of the YOLOv4 app."""

import dataclasses

import keras
import numpy as np
import pytest

from common.errors import UserError
from common.weights import weight_files
from tests.common.weights.test_fine_tuning import label_map, values_of
from yolov4.config import get_config
from yolov4.darknet_weights import save_darknet
from yolov4.import_weights import imagenet
from yolov4.import_weights.darknet_files import blocks_of
from yolov4.init_from import init_from
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata

NANO = dataclasses.replace(get_config("yolov4-nano"), width=0.125, image_size=(64, 64))
HEADS = ("head.layer_30.conv", "head.layer_37.conv", "head.layer_45.conv")


def random_model(num_classes, config=NANO, seed=0):
    model = build_model(config.model_name, num_classes, config=config)
    random = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(random.uniform(0.1, 1, weight.shape))
    return model


def save(model, path, names, config=NANO):
    weight_files.save(model, path, make_metadata(config, label_map(*names), len(names)))


def test_init_from_matches_darknet_classes_by_the_names_file_beside_the_weights(tmp_path):
    names, file = label_map("b", "a"), tmp_path / "mine.weights"
    source, model = random_model(3, seed=1), random_model(2)
    save_darknet(source, file)
    expected = values_of(source)
    before = {head: outputs_of_anchors(model, head) for head in HEADS}

    report = str(init_from(model, names, str(file), NANO))
    assert "new classes: " in report
    for path, value in values_of(model).items():
        if not path.startswith(HEADS):
            np.testing.assert_array_equal(value, expected[path], err_msg=path)
    for head in HEADS:
        outputs = outputs_of_anchors(model, head)
        np.testing.assert_array_equal(outputs[..., :5], outputs_of_anchors(source, head)[..., :5])
        np.testing.assert_array_equal(outputs[..., 5:], before[head][..., 5:])

    (tmp_path / "mine.names").write_text("a\nb\nc\n")
    report = str(init_from(model, names, str(file), NANO))
    assert "new classes" not in report
    for head in HEADS:
        b_and_a = outputs_of_anchors(source, head)[..., [0, 1, 2, 3, 4, 6, 5]]
        np.testing.assert_array_equal(outputs_of_anchors(model, head), b_and_a)


def outputs_of_anchors(model, head):
    """Returns kernel and bias of a head, (1 + inputs, anchors, 5 + classes)."""
    kernel, bias = (np.asarray(value) for value in model.get_layer(head).weights)
    return np.concatenate([kernel[0, 0], bias[np.newaxis]]).reshape(1 + kernel.shape[2], 3, -1)


def test_yolov4_heads_keep_initial_weights_if_init_from_has_another_number_of_anchors(tmp_path):
    config = dataclasses.replace(NANO, masks=((1, 2), (3, 4), (5, 6)))
    save(random_model(5, seed=1), tmp_path / "x.weights.h5", tuple("abcde"))
    model = random_model(10, config)
    before = values_of(model)
    report = str(init_from(model, label_map(*"abcdefghij"), str(tmp_path / "x.weights.h5"), config))
    for path, value in values_of(model).items():
        assert np.array_equal(value, before[path]) == path.startswith(HEADS), path
    assert f"made anew: {', '.join(HEADS)}" in report


def test_yolov4_init_from_refuses_weights_of_another_model_and_changes_no_weight(tmp_path):
    wider, file = dataclasses.replace(NANO, width=0.25), tmp_path / "wider.weights.h5"
    save(random_model(2, wider), file, ("a", "b"), wider)
    model = random_model(2, seed=1)
    before = values_of(model)
    for config, message in (
        (NANO, r"only \d+ of the 121 weights of yolov4-nano are in this file"),
        (get_config("yolov4"), r"wider.weights.h5 has weights of yolov4-nano, which do not fit: choose"),
    ):
        with pytest.raises(UserError, match=message):
            init_from(model, label_map("a", "b"), str(file), config)
    for path, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[path])


def test_init_from_imagenet_loads_the_backbone_weights_of_darknet_and_no_others(tmp_path, monkeypatch):
    config = dataclasses.replace(get_config("yolov4"), width=0.125, image_size=(64, 64))
    source, model = random_model(1, config, seed=1), random_model(1, config)
    before = values_of(model)
    monkeypatch.setattr(keras.src.backend.config, "_KERAS_DIR", str(tmp_path))
    monkeypatch.setattr(imagenet, "DARKNET_FILES", f"file://{tmp_path}/")
    with pytest.raises(
        UserError, match=r"^--init_from=imagenet: file://.*105 cannot be downloaded .* Copy it "
    ):
        init_from(model, label_map("a"), "imagenet", config)

    file = tmp_path / imagenet.CSP_DARKNET53
    save_darknet(source, file)
    blocks = blocks_of(source)[:72]  # Darknet's layers 0 to 104
    file.write_bytes(file.read_bytes()[: 20 + 4 * sum(np.size(v) for block in blocks for v in block)])
    init_from(model, label_map("a"), "imagenet", config)
    backbone = values_of(source)
    for path, value in values_of(model).items():
        expected = backbone if path.startswith("backbone.") else before
        np.testing.assert_array_equal(value, expected[path], err_msg=path)
    with pytest.raises(UserError, match=r"^--init_from=imagenet has no weights of csp_darknet_nano: "):
        init_from(model, label_map("a"), "imagenet", NANO)


@pytest.mark.parametrize("name", ["no.weights.h5", "no.weights", "yolov4.conv.137"])
def test_yolov4_init_from_of_a_missing_weights_file_is_refused_with_its_name(tmp_path, name):
    with pytest.raises(UserError, match=name):
        init_from(random_model(2), label_map("a", "b"), str(tmp_path / name), NANO)
