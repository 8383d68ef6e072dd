"""What only YOLOv4's training does: mosaic closed at the end, several sizes, Darknet files."""

import dataclasses

import numpy as np
import pytest

from common.labels import LabelMap
from common.training import input_feed, weights
from yolov4.config import get_config
from yolov4.darknet_weights import save_darknet
from yolov4.init_from import init_from
from yolov4.loaders import epoch_kwargs
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata
from yolov4.predict import load_trained
from yolov4.train import make_model

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))


@pytest.fixture
def config():
    return dataclasses.replace(get_config("yolov4-nano"), image_size=(64, 96), width=0.25)


def test_the_last_epochs_have_no_mosaic(config):
    """Also where only MixUp or CutMix mix; more epochs on a finished run take mosaic up again."""
    closed = dataclasses.replace(
        config, epochs=3, close_mosaic=1, mosaic_prob=0.0, mixup_prob=0.0, cutmix_prob=0.0
    )
    for name in ("mosaic_prob", "mixup_prob", "cutmix_prob"):
        mixing = dataclasses.replace(closed, **{name: 0.5})
        assert [epoch_kwargs(mixing, 5, done)["mosaic"] for done in range(3)] == [True, True, False]
        longer = dataclasses.replace(mixing, epochs=4)
        assert [epoch_kwargs(longer, 5, done)["mosaic"] for done in range(4)] == [True, True, True, False]
    assert [epoch_kwargs(closed, 5, done)["mosaic"] for done in range(3)] == [False] * 3
    assert [epoch_kwargs(closed, 5, done)["seed"] for done in range(3)] == [5, 6, 7]
    assert epoch_kwargs(closed, 2**31 - 1, 1)["seed"] == 0


@pytest.mark.parametrize("app", ["yolov4"], indirect=True, scope="session")
def test_training_opens_the_loader_without_mosaic(app, tiny_train, drawn, tmp_path, monkeypatch):
    opened, make_loader = [], input_feed.make_loader

    def remember(*arguments, **options):
        if options["training"]:
            opened.append((options["seed"], options["mosaic"]))
        return make_loader(*arguments, **options)

    monkeypatch.setattr(input_feed, "make_loader", remember)
    flags = ["--hparams=width=0.25,optimizer=sgd,mosaic_prob=1", "--close_mosaic=1", "--eval_images="]
    tiny_train(drawn, tmp_path / "run", *flags, "--eval_annotations=", "--seed=5", "--steps_per_epoch=2")
    assert opened == [(5, True), (5, True), (6, False)]  # one to look at, and one for each epoch


def test_several_sizes_and_letterbox_travel_with_the_weights(config, tmp_path):
    config = dataclasses.replace(config, multi_scale=2.0, letterbox=True)
    trained = make_model(config, 3)
    assert trained.input_shape == (None, None, None, 3)
    weights.save(trained, tmp_path / weights.BEST, make_metadata(config, LABELS, 3))
    model, found, _, _ = load_trained(str(tmp_path))
    assert found.letterbox and found.size_range == (1, 4)
    assert model.input_shape == (None, 64, 96, 3)  # evaluation is at one size
    for a, b in zip(trained.weights, model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=a.path)


def test_weights_go_out_to_darknet_and_come_back(config, tmp_path):
    model, other = (build_model("yolov4-nano", 3, config=config) for _ in range(2))
    save_darknet(model, tmp_path / "own.weights")
    (tmp_path / "own.names").write_text("".join(f"{name}\n" for name in LABELS.names))
    report = init_from(other, LABELS, str(tmp_path / "own.weights"), config)
    assert not report.made_anew and not report.new_classes
    for a, b in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=a.path)
