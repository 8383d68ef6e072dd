"""Keras' own `fit` on the loader: its loss is that of losses.py."""

import dataclasses
import types

import keras
import numpy as np
import tensorflow as tf

from common.datacheck.datasets import open_coco
from yolov4 import losses
from yolov4.config import get_config
from yolov4.fit_model import FitModel
from yolov4.loaders import make_loader
from yolov4.model import build_model

CONFIG = dataclasses.replace(
    get_config("yolov4-nano"), image_size=(64, 64), width=0.25, weight_decay=0.01, multi_scale=2.0
)


def test_fit_reports_the_loss_of_the_recipe_at_every_size_and_trains(drawn, monkeypatch):
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    loader = make_loader("dali_cpu", source=source, config=CONFIG, batch_size=4, training=True, seed=2)
    images, targets = next(iter(loader.dataset()))
    assert images.shape[1:3] != CONFIG.image_size

    network = build_model(CONFIG.model_name, 3, config=CONFIG, any_size=True)
    outputs = network(images, training=True)
    l2 = losses.l2_loss(network.trainable_variables, CONFIG.weight_decay)
    expected = float(losses.detection_loss(outputs, targets, CONFIG)["detection_loss"] + l2)
    assert float(l2) > 0.1

    model = FitModel(network, CONFIG)
    before = [np.array(variable) for variable in network.trainable_variables]
    model.compile(keras.optimizers.SGD(1e-3), run_eagerly=True)
    (loss,) = model.fit(loader.dataset(), steps_per_epoch=1, epochs=1, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    for variable, value in zip(network.trainable_variables, before, strict=True):
        assert (np.array(variable) != value).any(), variable.path
        variable.assign(value)
    four = types.SimpleNamespace(num_replicas_in_sync=4)  # Keras sums the gradients of replicas
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: four)
    np.testing.assert_allclose(model.compute_loss(images, targets, outputs), expected / 4, rtol=1e-4)
