"""Averaged weights: the exponential moving average of a model's weights, which is evaluated and kept.

google/automl efficientdet averages the same way (det_model_fn.py: tf.train.ExponentialMovingAverage with
num_updates, over the trainable weights and the batch norm statistics): after n updates

    average <- d average + (1 - d) weight,  d = min(decay, (1 + n) / (10 + n))

so that the average of a young run is not made of its random initial weights.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.layers import moving_statistics

_ALONE = Ranks()


class AveragedWeights(tf.Module):
    """Keeps the moving average of every weight of `model`, in float32; tf.train.Checkpoint saves it.

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
        statistics = moving_statistics(model)
        self._weights = lambda: floats  # as an attribute they would count as variables of this module
        self._statistics = lambda: statistics
        variable = functools.partial(
            tf.Variable, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
        self._averages = [
            variable(tf.cast(weight, tf.float32), name=f"average_{index}")
            for index, weight in enumerate(floats)
        ]
        self._num_updates = variable(0, dtype=tf.int64, name="num_updates")

    def update(self, moved: tf.Tensor | bool = True) -> None:
        """Moves the averages towards the weights after an optimizer step; works in a tf.function.

        Every replica calls it and moves its own averages, which differ in their moving statistics only.

        Args:
            moved: whether the optimizer did move the weights. A tensor and no `if`, because replicas cannot
                agree on the number of updates inside a branch.
        """
        if not self.decay:
            return
        n = tf.cast(self._num_updates, tf.float32)
        decay = tf.minimum(tf.constant(self.decay, tf.float32), (1.0 + n) / (10.0 + n))
        share = tf.where(moved, 1.0 - decay, 0.0)
        for average, weight in zip(self._averages, self._weights(), strict=True):
            # average -= share * (average - weight), with fewer passes over memory than `assign_sub`
            tf.raw_ops.ResourceApplyGradientDescent(
                var=average.handle, alpha=share, delta=average - tf.cast(weight, tf.float32)
            )
        self._num_updates.assign_add(tf.cast(moved, tf.int64))

    def averages_of(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """The averages of some of the model's variables, in their order; [] where averaging is off."""
        pairs = zip(self._averages, self._weights(), strict=True)
        averages = {id(weight): average for average, weight in pairs}
        return [averages[id(variable)] for variable in variables] if averages else []

    @contextlib.contextmanager
    def swapped_in(self, ranks: Ranks = _ALONE) -> Iterator[None]:
        """Inside this context the model has the averaged weights; after it, its own again, bit for bit.

        Moving statistics are besides averaged over the ranks, each of which has seen other images; so all
        ranks enter this together. Without averaging, that is all that happens.
        """
        statistics = self._statistics()
        means = ranks.mean_over_ranks(self.averages_of(statistics) or statistics)
        own = [tf.identity(weight) for weight in self._weights()]
        own_statistics = ranks.run(lambda: [tf.identity(statistic) for statistic in statistics])
        try:
            for average, weight in zip(self._averages, self._weights(), strict=True):
                weight.assign(tf.cast(average, weight.dtype))
            _assign(statistics, means)
            yield
        finally:
            _assign(self._weights(), own)
            ranks.run(_assign, statistics, own_statistics)  # replicas have their own


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
