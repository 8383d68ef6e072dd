"""Run by test_fit_model.py: `fit` under MirroredStrategy on two logical CPU devices, fed by DALI.

Both replicas get the same images, so the step must be the one that a single device takes on them.
"""

import dataclasses
import sys

import keras
import numpy as np
import tensorflow as tf

from common.datacheck.datasets import open_coco
from efficientdet.config import get_config
from efficientdet.fit_model import FitModel
from efficientdet.model import build_model
from efficientdet.pipeline import EfficientDetPipeline

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

CONFIG = dataclasses.replace(
    get_config("efficientdet-nano"), image_size=(64, 96), fpn_cells=1, head_repeats=1, max_level=5
)
DATA = sys.argv[1]


def dataset(context=None):
    source = open_coco(f"{DATA}/images", f"{DATA}/instances.json")
    return EfficientDetPipeline(source=source, config=CONFIG, batch_size=4, training=True).dataset()


def fitted(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = FitModel(build_model(CONFIG.model_name, num_classes=3, config=CONFIG), CONFIG)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9))
    data = dataset()
    if strategy.num_replicas_in_sync > 1:
        options = tf.distribute.InputOptions(
            experimental_fetch_to_device=False,
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        )
        data = strategy.distribute_datasets_from_function(dataset, options)
    history = model.fit(data, steps_per_epoch=3, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"][0]) and history.history["loss"][0] > 0
    return [np.asarray(w) for w in model.get_weights()]


one = fitted(tf.distribute.get_strategy())
two = fitted(tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]))
for a, b in zip(one, two, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
print("replicas agree with one device")
