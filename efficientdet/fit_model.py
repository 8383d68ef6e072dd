"""Wraps the network in a model for Keras' `fit`, as in examples/keras_fit.py.

model = FitModel(build_model("efficientdet-d0", num_classes, config=config), config)
model.compile(optimizer)
model.fit(pipeline.dataset(), steps_per_epoch=pipeline.steps_per_epoch, epochs=10)
"""

from typing import Any

import keras
import tensorflow as tf

from common.distributed.ranks import Ranks
from efficientdet import losses
from efficientdet.config import EfficientDetConfig


class FitModel(keras.Model):
    """Adds the recipe's loss to a model of `build_model`. Both models share their weights.

    If `ranks` is given, all ranks divide the loss by the same number of positive anchors. Otherwise each
    replica divides the loss by the number of its own positive anchors.
    """

    def __init__(self, network: keras.Model, config: EfficientDetConfig, ranks: Ranks | None = None):
        super().__init__(inputs=network.inputs, outputs=network.outputs, name=network.name)
        self._num_levels = len(network.outputs) // 2
        self._config, self._ranks = config, ranks or Ranks()

    def compute_loss(
        self, x: Any, y: dict, y_pred: list, sample_weight: Any = None, training: bool = True
    ) -> tf.Tensor:
        """Returns the scalar loss of one replica's batch. `y` is the loader's dict of targets."""
        class_logits, box_deltas = y_pred[: self._num_levels], y_pred[self._num_levels :]
        share = losses.num_positives_share(y, self._ranks.num_replicas)
        num_positives = self._ranks.mean({"share": share})["share"]
        parts = losses.detection_loss(class_logits, box_deltas, y, self._config, num_positives)
        loss = parts["detection_loss"] + losses.l2_loss(self.trainable_variables, self._config.weight_decay)
        # Keras sums the gradients of the replicas. The division makes the sum a mean.
        return loss / tf.distribute.get_strategy().num_replicas_in_sync
