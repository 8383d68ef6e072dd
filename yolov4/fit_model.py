"""Wraps the network in a model for Keras' `fit`, as in examples/keras_fit.py.

model = FitModel(build_model("yolov4-tiny", num_classes, config=config), config)
model.compile(optimizer)
model.fit(pipeline.dataset(), steps_per_epoch=pipeline.steps_per_epoch, epochs=10)
"""

from typing import Any

import keras
import tensorflow as tf

from yolov4 import losses
from yolov4.config import YOLOv4Config


class FitModel(keras.Model):
    """Adds the recipe's loss to a model of `build_model`. Both models share their weights."""

    def __init__(self, network: keras.Model, config: YOLOv4Config):
        super().__init__(inputs=network.inputs, outputs=network.outputs, name=network.name)
        self._config = config

    def compute_loss(
        self, x: Any, y: dict, y_pred: list, sample_weight: Any = None, training: bool = True
    ) -> tf.Tensor:
        """Returns the scalar loss of one replica's batch. `y` is the loader's dict of targets."""
        loss = losses.detection_loss(y_pred, y, self._config)["detection_loss"]
        loss += losses.l2_loss(self.trainable_variables, self._config.weight_decay)
        # Keras sums the gradients of the replicas. The division makes the sum a mean.
        return loss / tf.distribute.get_strategy().num_replicas_in_sync
