"""Makes the optimizer of both apps: SGD or Adam."""

from collections.abc import Sequence

import keras
import tensorflow as tf


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


def apply_if(
    condition: tf.Tensor | None,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    """Does the same as `optimizer.apply` if `condition` is true or None, and changes nothing if it is false.

    A tensor makes no branch, because on a GPU the host would wait for its condition. The update is always
    computed. It is undone if `condition` is false, if more gradients must be accumulated, or if gradients
    overflow in float16. Raises ValueError for an optimizer with `use_ema`: use --ema_decay instead.
    """
    if condition is None:
        optimizer.apply(gradients, variables)
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _apply_scaled_if(condition, optimizer, gradients, variables)
        return
    if optimizer.use_ema:
        raise ValueError(f"use_ema=True of {optimizer.name} is not supported: use --ema_decay")
    gradients, variables = optimizer._filter_empty_gradients(gradients, variables)
    if factor := optimizer.loss_scale_factor:
        gradients = [gradient / factor for gradient in gradients]
    steps = optimizer.gradient_accumulation_steps or 1
    is_due = condition & (tf.math.floormod(optimizer._iterations + 1, steps) == 0)
    indexes = [optimizer._get_variable_index(variable) for variable in variables if steps > 1]
    sums = [optimizer._accumulated_gradients[index].value for index in indexes]
    bookkeeping = {id(optimizer._iterations.value), *map(id, sums)}
    slots = [variable.value for variable in optimizer.variables if id(variable.value) not in bookkeeping]
    changing = [*(variable.value for variable in variables), *slots]
    old = [variable.read_value() for variable in changing]
    if steps > 1:
        totals = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        for variable, total in zip(sums, totals, strict=True):
            new_sum = tf.where(condition, total, variable)
            variable.assign(tf.where(is_due, tf.zeros_like(total), new_sum))
        gradients = [total / steps for total in totals]
    gradients = optimizer._clip_gradients(gradients)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)
    for variable, value in zip(changing, old, strict=True):
        variable.assign(tf.where(is_due, variable.read_value(), value))
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(tf.where(condition, variable.constraint(variable), variable))
    optimizer._iterations.assign_add(tf.cast(condition, optimizer._iterations.dtype))


def _apply_scaled_if(
    condition: tf.Tensor,
    optimizer: keras.optimizers.LossScaleOptimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    """`apply_if` of a loss-scale optimizer. If a gradient is not finite, only the loss scale changes."""
    finite = optimizer.check_finite(gradients)
    scale, count = (tf.convert_to_tensor(each) for each in (optimizer.dynamic_scale, optimizer.step_counter))
    unscaled = [gradient if gradient is None else gradient / scale for gradient in gradients]
    apply_if(condition & finite, optimizer.inner_optimizer, unscaled, variables)
    grows = count == optimizer.dynamic_growth_steps - 1
    new_scale = tf.where(finite, tf.where(grows, 2.0 * scale, scale), 0.5 * scale)
    optimizer.dynamic_scale.assign(tf.where(condition, new_scale, scale))
    new_count = tf.where(finite & ~grows, count + 1, tf.zeros_like(count))
    optimizer.step_counter.assign(tf.where(condition, new_count, count))


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
