"""Tests options of training that only YOLOv4 has."""

import dataclasses

import numpy as np
import pytest

from common.data import loader
from common.data.labels import LabelMap
from common.weights import weight_files as weights
from yolov4.config import get_config
from yolov4.model_metadata import make_metadata
from yolov4.predict import load_trained
from yolov4.train import make_model

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))


@pytest.mark.parametrize("app", ["yolov4"], indirect=True, scope="session")
def test_close_mosaic_makes_the_last_epochs_open_loaders_without_mosaic(
    app, tiny_train, tmp_path, monkeypatch
):
    opened, make_loader = [], loader.make_loader

    def remember(*arguments, **options):
        if options["training"] and "seed" in options:  # not the loaders that read no data
            opened.append((options["seed"], options["mosaic"]))
        return make_loader(*arguments, **options)

    monkeypatch.setattr(loader, "make_loader", remember)
    flags = ["--hparams=width=0.25,optimizer=sgd,mosaic_prob=1", "--close_mosaic=1", "--seed=5"]
    synthetic = ["--pipeline_type=synthetic", "--num_classes=3", "--steps_per_epoch=1"]
    tiny_train(tmp_path / "none", tmp_path / "run", *flags, *synthetic)
    assert opened == [(5, True), (6, False)]


def test_weights_of_a_multi_scale_letterbox_model_are_loaded_for_one_size(tmp_path):
    fields = {"image_size": (64, 96), "width": 0.25, "multi_scale": 2.0, "letterbox": True}
    config = dataclasses.replace(get_config("yolov4-nano"), **fields)
    trained = make_model(config, 3)
    assert trained.input_shape == (None, None, None, 3)
    weights.save(trained, tmp_path / weights.BEST, make_metadata(config, LABELS, 3))
    model, config, _, _ = load_trained(str(tmp_path))
    assert config.letterbox and config.size_range == (1, 4)
    assert model.input_shape == (None, 64, 96, 3)
    for a, b in zip(trained.weights, model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=a.path)
