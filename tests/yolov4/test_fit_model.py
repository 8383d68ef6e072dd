"""Keras' own `fit` on the loaders: its loss is that of losses.py, and it falls."""

import dataclasses

import keras
import numpy as np

from common.datacheck.datasets import open_coco
from yolov4 import losses
from yolov4.config import get_config
from yolov4.fit_model import FitModel
from yolov4.loaders import make_loader
from yolov4.model import build_model

CONFIG = dataclasses.replace(get_config("yolov4-nano"), image_size=(64, 64), width=0.25, weight_decay=0.01)


def test_fit_reports_the_loss_of_the_recipe(drawn):
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    loader = make_loader("dali_cpu", source=source, config=CONFIG, batch_size=4, training=True, seed=2)
    keras.utils.set_random_seed(0)
    model = FitModel(build_model(CONFIG.model_name, 3, config=CONFIG), CONFIG)
    model.compile(keras.optimizers.SGD(0.0), run_eagerly=True)  # a step that leaves the weights
    history = model.fit(loader.dataset(), steps_per_epoch=1, epochs=1, verbose=0)

    images, targets = next(iter(loader.dataset()))
    keras.utils.set_random_seed(0)
    network = build_model(CONFIG.model_name, 3, config=CONFIG)
    detection = losses.detection_loss(network(images, training=True), targets, CONFIG)["detection_loss"]
    l2 = losses.l2_loss(network.trainable_variables, CONFIG.weight_decay)
    assert float(l2) > 0.1
    (loss,) = history.history["loss"]
    np.testing.assert_allclose(loss, float(detection + l2), rtol=1e-4)


def test_fit_learns_at_every_size(drawn):
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    config = dataclasses.replace(CONFIG, multi_scale=2.0, jitter=0.0, mosaic_prob=0.0, weight_decay=0.0)
    loader = make_loader("tensorflow", source=source, config=config, batch_size=4, training=True)
    keras.utils.set_random_seed(0)
    model = FitModel(build_model(config.model_name, 3, config=config, any_size=True), config)
    model.compile(keras.optimizers.Adam(5e-3), jit_compile=False)
    values = model.fit(loader.dataset(), steps_per_epoch=6, epochs=3, verbose=0).history["loss"]
    assert np.isfinite(values).all() and values[-1] < 0.8 * values[0]
