"""Averaged weights: the exponential moving average of a model's weights, which is evaluated and kept.

google/automl efficientdet averages the same way (det_model_fn.py: tf.train.ExponentialMovingAverage with
num_updates, over the trainable weights and the batch norm statistics): after n updates

    average <- d average + (1 - d) weight,  d = min(decay, (1 + n) / (10 + n))

so that the average of a young run is not made of its random initial weights.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf


class AveragedWeights(tf.Module):
    """Keeps the moving average of every weight of `model`, in float32; tf.train.Checkpoint takes it along.

    Args:
        model: a built model. The averages start as its weights.
        decay: at least 0 and below 1, for example 0.9998; 0 turns averaging off: nothing here does anything.

    Raises:
        ValueError: the decay is out of range, or the model has no weights yet.
    """

    def __init__(self, model: keras.Model, decay: float):
        super().__init__(name="averaged_weights")
        if not 0 <= decay < 1:
            raise ValueError(f"ema_decay={decay} must be at least 0 and below 1")
        if not model.weights:
            raise ValueError("the model has no weights yet: build it first")
        self.decay = decay
        floats = [w.value for w in model.weights if keras.backend.is_float_dtype(w.dtype)] if decay else []
        self._weights = lambda: floats  # as an attribute they would count as variables of this module
        self._averages = [
            tf.Variable(
                tf.cast(weight, tf.float32),
                trainable=False,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,  # replicas hold the same weights
                name=f"average_{index}",
            )
            for index, weight in enumerate(floats)
        ]
        self._num_updates = tf.Variable(
            0,
            trainable=False,
            dtype=tf.int64,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            name="num_updates",
        )

    def update(self) -> None:
        """Moves the averages towards the weights after an optimizer step; works in a tf.function."""
        if not self.decay:
            return
        n = tf.cast(self._num_updates, tf.float32)
        decay = tf.minimum(tf.constant(self.decay, tf.float32), (1.0 + n) / (10.0 + n))
        for average, weight in zip(self._averages, self._weights(), strict=True):
            average.assign_sub((1.0 - decay) * (average - tf.cast(weight, tf.float32)))
        self._num_updates.assign_add(1)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside this context the model has the averaged weights; after it, its own again, bit for bit."""
        own = [tf.identity(weight) for weight in self._weights()]
        for average, weight in zip(self._averages, self._weights(), strict=True):
            weight.assign(tf.cast(average, weight.dtype))
        try:
            yield
        finally:
            for value, weight in zip(own, self._weights(), strict=True):
                weight.assign(value)
