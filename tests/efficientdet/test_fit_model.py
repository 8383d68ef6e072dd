"""Keras' own `fit` on the DALI pipeline: the loss of the recipe, which falls; and under MirroredStrategy."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.datacheck.datasets import open_coco
from efficientdet import losses
from efficientdet.config import get_config
from efficientdet.fit_model import FitModel
from efficientdet.model import build_model
from efficientdet.pipeline import EfficientDetPipeline

ROOT = pathlib.Path(__file__).resolve().parents[2]
# RetinaNet's small network: FitModel is the same for all, and this one is traced sooner.
CONFIG = dataclasses.replace(
    get_config("retinanet-nano"),
    image_size=(64, 96),
    head_repeats=1,
    max_level=5,
    augmentation="none",
    weight_decay=0.01,
)


@pytest.fixture(scope="module")
def data(drawn) -> tf.data.Dataset:
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    return EfficientDetPipeline(source=source, config=CONFIG, batch_size=4, training=True).dataset()


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    return build_model(CONFIG.model_name, num_classes=3, config=CONFIG)


def recipe_loss(images, targets) -> float:
    network = build()
    parts = losses.detection_loss(*network(images, training=True), targets, CONFIG)
    l2 = losses.l2_loss(network.trainable_variables, CONFIG.weight_decay)
    assert l2 > 0.1
    return float(parts["detection_loss"] + l2)


def test_fit_reports_the_loss_of_the_recipe_and_learns(data):
    model = FitModel(build(), CONFIG)
    model.compile(keras.optimizers.Adam(0.0), jit_compile=False)  # a step that leaves the weights
    (loss,) = model.fit(data, steps_per_epoch=1, epochs=1, verbose=0).history["loss"]
    assert loss == pytest.approx(recipe_loss(*next(iter(data))), rel=1e-4)

    model.optimizer.learning_rate = 2e-3
    falling = model.fit(data, steps_per_epoch=10, epochs=3, verbose=0).history["loss"]
    assert np.isfinite(falling).all()
    assert falling[-1] < 0.8 * falling[0]


def test_each_of_two_replicas_has_half_of_the_loss(data, monkeypatch):
    """Keras adds the gradients of all replicas."""
    network = build()
    images, targets = next(iter(data))
    outputs = tf.nest.flatten(network(images, training=True))
    strategy = types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    loss = FitModel(network, CONFIG).compute_loss(images, targets, outputs)
    assert float(loss) == pytest.approx(recipe_loss(images, targets) / 2)


@pytest.mark.slow
def test_fit_under_mirrored_strategy(drawn):
    """In a process of its own: logical devices must be made before TensorFlow starts."""
    program = pathlib.Path(__file__).with_name("mirrored_fit.py")
    done = subprocess.run(
        [sys.executable, str(program), str(drawn)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "replicas agree with one device" in done.stdout
