"""Makes the optimizer of both apps (SGD or Adam), and keeps moving averages of the weights."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.layers import moving_statistics

_ALONE = Ranks()


class _Fused(keras.optimizers.Optimizer):
    """Base class of both optimizers."""

    def _clip_gradients(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        # Keras begins each update with this method. It clears `_numbers`, the constants of an update.
        self._numbers: tuple[tf.Tensor, ...] = ()
        if self.clipnorm or not self.global_clipnorm:
            return super()._clip_gradients(gradients)
        # As in Keras, with fewer operations. norm - norm is 0, or NaN after an overflow.
        norm = tf.linalg.global_norm(gradients)
        scale = self.global_clipnorm / tf.maximum(norm, self.global_clipnorm) + (norm - norm)
        return [gradient * scale for gradient in gradients]


class FusedSGD(_Fused, keras.optimizers.SGD):
    """`keras.optimizers.SGD` with momentum in one TensorFlow operation per variable instead of 8."""

    def update_step(self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        if self.momentum == 0:
            super().update_step(gradient, variable, learning_rate)
            return
        if not self._numbers:
            self._numbers = tf.convert_to_tensor(learning_rate), tf.constant(self.momentum, tf.float32)
        rate, momentum = self._numbers
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=tf.cast(rate, variable.dtype),
            grad=tf.cast(gradient, variable.dtype),
            momentum=tf.cast(momentum, variable.dtype),
        )


class FusedAdam(_Fused, keras.optimizers.Adam):
    """`keras.optimizers.Adam` in one TensorFlow operation per variable instead of thirty."""

    def update_step(self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        if not self._numbers:
            constants = [tf.constant(x, tf.float32) for x in (self.beta_1, self.beta_2, self.epsilon, 0.0)]
            learning_rate = tf.convert_to_tensor(learning_rate)
            step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, learning_rate.dtype)
            # bias correction: arXiv 1412.6980, the end of section 2
            corrected = learning_rate * tf.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)
            self._numbers = corrected, *constants
        rate, beta_1, beta_2, epsilon, zero = (tf.cast(x, variable.dtype) for x in self._numbers)
        index = self._get_variable_index(variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=zero,  # no bias correction: the learning rate is already corrected
            beta2_power=zero,
            lr=rate,
            beta1=beta_1,
            beta2=beta_2,
            epsilon=epsilon,
            grad=tf.cast(gradient, variable.dtype),
        )


def last_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the learning rate of the last batch."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    batches = int(tf.convert_to_tensor(inner._iterations))  # `iterations` counts updates only
    return float(inner._learning_rate(max(batches - 1, 0)))


def make_optimizer(
    name: str,
    schedule: keras.optimizers.schedules.LearningRateSchedule,
    *,
    momentum: float,
    clip_norm: float,
    precision: str,
    accumulate_steps: int = 1,
    initial_loss_scale: float = 2.0**15,
) -> keras.optimizers.Optimizer:
    """Makes SGD with momentum or Adam, wrapped in a loss-scale optimizer for float16.

    Args:
        name: sgd or adam.
        schedule: number of batches done -> learning rate.
        momentum: momentum of SGD, or beta_1 of Adam.
        clip_norm: largest global norm of the gradients; 0 turns clipping off.
        precision: float32, mixed_bfloat16 or mixed_float16; only mixed_float16 uses loss scaling.
        accumulate_steps: number of batches whose gradients are averaged into one update.
        initial_loss_scale: halved at each overflow, doubled after 2000 updates without overflow.
    """
    common = {
        "learning_rate": schedule,
        "global_clipnorm": clip_norm or None,
        "gradient_accumulation_steps": accumulate_steps if accumulate_steps > 1 else None,
    }
    if name == "adam":
        optimizer = FusedAdam(beta_1=momentum, **common)
    else:
        optimizer = FusedSGD(momentum=momentum, **common)
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=initial_loss_scale)
    return optimizer


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
        """Gives the model the averaged weights inside this context, and then its own weights, bit for bit.

        All ranks enter this context together, because moving statistics are averaged over the ranks. With
        decay 0, only the moving statistics are replaced.
        """
        statistics = self._statistics()
        means = ranks.mean_over_ranks(self.averages_of(statistics) or statistics)
        own = [tf.identity(weight) for weight in self._weights()]
        own_statistics = ranks.run(self._copy)
        try:
            for average, weight in zip(self._averages, self._weights(), strict=True):
                weight.assign(tf.cast(average, weight.dtype))
            _assign(statistics, means)
            yield
        finally:
            _assign(self._weights(), own)
            ranks.run(self._restore, own_statistics)  # each replica has its own statistics


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
