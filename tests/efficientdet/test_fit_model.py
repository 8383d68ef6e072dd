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
from efficientdet.pipeline import EfficientDetPipeline

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = dataclasses.replace(get_config("efficientdet-nano"), image_size=(64, 96), augmentation="none")
CONFIG = dataclasses.replace(CONFIG, min_level=4, max_level=5, weight_decay=0.1)


def open_dataset(directory) -> tf.data.Dataset:
    source = open_coco(f"{directory}/images", f"{directory}/instances.json")
    return EfficientDetPipeline(source=source, config=CONFIG, batch_size=4, training=True).dataset()


@pytest.fixture(scope="module")
def data(drawn) -> tf.data.Dataset:
    return open_dataset(drawn)


def build() -> keras.Model:
    """Outputs as those of build_model, each by one convolution, so that a step is traced soon."""
    keras.utils.set_random_seed(0)
    images = keras.Input((*CONFIG.image_size, 3))
    outputs = [
        [keras.layers.Conv2D(9 * size, 2**level, 2**level)(images) for level in CONFIG.anchors.levels]
        for size in (3, 4)
    ]
    return keras.Model(images, outputs)


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
    falling = model.fit(data, steps_per_epoch=6, epochs=3, verbose=0).history["loss"]
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
def test_two_replicas_take_the_step_of_one_device(drawn):
    """In a process of its own, this file as a program: logical devices precede TensorFlow's start."""
    command, environment = [sys.executable, __file__, str(drawn)], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "replicas agree with one device" in done.stdout


def fit_under(strategy: tf.distribute.Strategy, directory: str) -> list[np.ndarray]:
    """The weights after three steps, in which all replicas get the same images."""
    with strategy.scope():
        model = FitModel(build(), CONFIG)
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9))
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    data = strategy.distribute_datasets_from_function(lambda context: open_dataset(directory), options)
    (loss,) = model.fit(data, steps_per_epoch=3, epochs=1, verbose=0).history["loss"]
    assert loss > 0
    return [np.asarray(weight) for weight in model.get_weights()]


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = [["/cpu:0"], ["/cpu:0", "/cpu:1"]]
    alone, together = (fit_under(tf.distribute.MirroredStrategy(of), sys.argv[1]) for of in devices)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    print("replicas agree with one device")
