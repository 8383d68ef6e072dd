"""Exponential moving averages (EMA) of the weights, which are evaluated and saved instead of the weights."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.layers import moving_statistics

_ALONE = Ranks()


class AveragedWeights(tf.Module):
    """Keeps moving averages of all weights of `model`, in float32, for tf.train.Checkpoint.

    Args:
        model: a built model. The averages start with the values of its weights.
        decay: at least 0 and below 1, for example 0.9998; 0 turns averaging off.
    """

    def __init__(self, model: keras.Model, decay: float):
        super().__init__(name="averaged_weights")
        self.decay = decay
        floats = [w.value for w in model.weights if keras.backend.is_float_dtype(w.dtype)] if decay else []
        statistics = moving_statistics(model)
        self._weights = lambda: floats  # a function, because tf.Module would save a list of variables
        self._statistics = lambda: statistics
        self._copy = lambda: [tf.identity(statistic) for statistic in statistics]
        self._restore = lambda values: _assign(statistics, values)
        variable = functools.partial(
            tf.Variable, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
        self._averages = [variable(tf.cast(weight, tf.float32), name="average") for weight in floats]
        self._num_updates = variable(0, dtype=tf.int64, name="num_updates")

    def update(self, moved: tf.Tensor | bool = True) -> None:
        """Moves the averages towards the weights after an optimizer step; works in a tf.function.

        Every replica updates its own averages.

        Args:
            moved: whether the optimizer has changed the weights; may be a tensor.
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
        """Returns the averages of these model variables; [] if averaging is off."""
        pairs = zip(self._averages, self._weights(), strict=True)
        averages = {id(weight): average for average, weight in pairs}
        return [averages[id(variable)] for variable in variables] if averages else []

    @contextlib.contextmanager
    def swapped_in(self, ranks: Ranks = _ALONE) -> Iterator[None]:
        """Gives the model the averaged weights inside this context, and then its weights again, bit for bit.

        All ranks enter this context together, because moving statistics are averaged over the ranks. With
        decay 0, only the moving statistics are replaced.
        """
        statistics = self._statistics()
        means = ranks.mean_over_replicas(self.averages_of(statistics) or statistics)
        weights = [tf.identity(weight) for weight in self._weights()]
        local_statistics = ranks.run(self._copy)
        try:
            for average, weight in zip(self._averages, self._weights(), strict=True):
                weight.assign(tf.cast(average, weight.dtype))
            _assign(statistics, means)
            yield
        finally:
            _assign(self._weights(), weights)
            ranks.run(self._restore, local_statistics)  # each replica has its own statistics


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
