"""Keras' own `fit` on the loaders by DALI: the loss of the recipe, which trains; and under MirroredStrategy.

Run as a program, this file compares two replicas with one device; launching.py gives it two CPU devices.
"""

import importlib
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from common import hparams
from common.datacheck.datasets import open_coco
from tests.apps.conftest import APPS
from tests.distributed import launching

CHANGES = {
    "efficientdet": "augmentation=none",
    "yolov4": "multi_scale=2",
}


def make(app, directory, optimizer, **options):
    """A loader, the network, and the model around it, compiled."""
    config = app.package.config.get_config(app.model_name)
    spec = f"{app.tiny},image_size=64x96,weight_decay=0.1,{CHANGES[app.name]}"
    config = hparams.override(config, spec)
    source = open_coco(f"{directory}/images", f"{directory}/instances.json")
    loader = app.make_loader("dali_cpu", source=source, config=config, batch_size=4, training=True, seed=2)
    keras.utils.set_random_seed(0)
    network = app.package.train.make_model(config, 3)
    model = importlib.import_module(f"{app.name}.fit_model").FitModel(network, config)
    model.compile(optimizer, **options)
    return loader, network, model


def test_fit_reports_the_loss_of_the_recipe_and_trains(app, drawn, monkeypatch):
    loader, network, model = make(app, drawn, keras.optimizers.SGD(1.0), run_eagerly=True)
    images, targets = next(iter(loader.dataset()))
    assert (images.shape[1:3] == (64, 96)) == (app.name == "efficientdet")
    outputs = tf.nest.flatten(network(images, training=True))
    expected = app.package.train.loss_values(network, loader.config, images, targets)
    assert expected["l2_loss"] > 0.1
    before = [np.array(variable) for variable in network.trainable_variables]
    (loss,) = model.fit(loader.dataset(), steps_per_epoch=1, epochs=1, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-4)
    pairs = list(zip(network.trainable_variables, before, strict=True))
    assert np.mean([np.any(np.array(variable) != value) for variable, value in pairs]) > 0.95
    for variable, value in pairs:
        variable.assign(value)
    four = types.SimpleNamespace(num_replicas_in_sync=4)  # Keras sums the gradients of replicas
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: four)
    share = model.compute_loss(images, targets, outputs)
    np.testing.assert_allclose(share, expected["loss"] / 4, rtol=1e-4)


@pytest.mark.slow
def test_two_replicas_take_the_step_of_one_device(drawn):
    (result,) = launching.run_two_replicas("mirrored", [__file__, drawn], timeout=300)
    assert "replicas agree with one device" in result.stdout


def fit_under(strategy: tf.distribute.Strategy, directory: str) -> list[np.ndarray]:
    """The weights after three steps, in which all replicas get the same images."""
    with strategy.scope():
        loader, _, model = make(APPS["yolov4"], directory, keras.optimizers.SGD(1e-4, momentum=0.9))
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    data = strategy.distribute_datasets_from_function(lambda context: loader.dataset(), options)
    (loss,) = model.fit(data, steps_per_epoch=3, epochs=1, verbose=0).history["loss"]
    assert loss > 0
    return [np.asarray(weight) for weight in model.get_weights()]


if __name__ == "__main__":
    devices = [["/cpu:0"], ["/cpu:0", "/cpu:1"]]
    alone, together = (fit_under(tf.distribute.MirroredStrategy(of), sys.argv[1]) for of in devices)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    print("replicas agree with one device")
