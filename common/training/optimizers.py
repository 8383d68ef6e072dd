"""The optimizer that both apps build: SGD with momentum or Adam, clipped, accumulating, with loss scaling."""

import functools

import keras
import tensorflow as tf


class _Fused:
    """What both share: numbers that are the same for all variables of an update, and clipping."""

    def _clip_gradients(self, gradients):
        # Keras calls this once an update, before the update_step of each variable, and in the same graph.
        self._numbers: tuple[tf.Tensor, ...] = ()
        if self.clipnorm or not self.global_clipnorm:
            return super()._clip_gradients(gradients)
        # Keras' own takes five operations a gradient, this two; both are NaN where the norm is infinite.
        norm = tf.linalg.global_norm(gradients)
        scale = self.global_clipnorm / tf.maximum(norm, self.global_clipnorm) + (norm - norm)
        return [gradient * scale for gradient in gradients]


class FusedSGD(_Fused, keras.optimizers.SGD):
    """`keras.optimizers.SGD` with momentum, one TensorFlow operation a variable where Keras writes eight.

    Fewer passes over the memory, and a graph that is traced and optimised sooner.
    """

    def update_step(self, gradient, variable, learning_rate):
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
    """`keras.optimizers.Adam`, one TensorFlow operation a variable where Keras writes thirty."""

    def update_step(self, gradient, variable, learning_rate):
        if not self._numbers:
            constants = [tf.constant(x, tf.float32) for x in (self.beta_1, self.beta_2, self.epsilon, 0.0)]
            self._numbers = self._corrected(learning_rate), *constants
        rate, beta_1, beta_2, epsilon, zero = (tf.cast(x, variable.dtype) for x in self._numbers)
        index = self._get_variable_index(variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=zero,  # the learning rate is corrected already
            beta2_power=zero,
            lr=rate,
            beta1=beta_1,
            beta2=beta_2,
            epsilon=epsilon,
            grad=tf.cast(gradient, variable.dtype),
        )

    def _corrected(self, learning_rate):
        """arXiv 1412.6980, the end of section 2."""
        learning_rate = tf.convert_to_tensor(learning_rate)
        step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, learning_rate.dtype)
        return learning_rate * tf.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)


def last_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate of the last batch; accumulated batches count, because they move the schedule."""
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
    """SGD with momentum or Adam, inside a loss-scale optimizer for float16.

    Clipping sits in the inner optimizer, so it sees unscaled, accumulated gradients.

    Args:
        name: sgd or adam.
        schedule: learning rate by micro-step: Keras asks it for every batch, accumulated ones too.
        momentum: of SGD; Adam's beta_1.
        clip_norm: largest global norm of the gradients; 0 turns clipping off.
        precision: float32, mixed_bfloat16 or mixed_float16; the last gets the loss scale.
        accumulate_steps: batches whose gradients are averaged into one update.
        initial_loss_scale: of float16; it halves at every overflow and doubles after 2000 updates without.
    """
    common = {
        "learning_rate": schedule,
        "global_clipnorm": clip_norm or None,
        "gradient_accumulation_steps": accumulate_steps if accumulate_steps > 1 else None,
    }
    kinds = {
        "adam": functools.partial(FusedAdam, beta_1=momentum),
        "sgd": functools.partial(FusedSGD, momentum=momentum),
    }
    optimizer = kinds[name](**common)
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=initial_loss_scale)
    return optimizer
