"""Batch norm, Swish and Mish for both networks. On a CPU they train faster than Keras' own layers.

BatchNormalization: Keras 3's own layer uses elementary TensorFlow operations, and computes in float32 under
mixed precision. The layer here uses TensorFlow's fused kernel, which reads and writes activations in their
own dtype and computes the statistics in float32.

Swish and Mish: as several TensorFlow operations, they took a fifth of EfficientDet's training step on a CPU,
because each operation reads and writes the whole tensor. For large tensors, XLA compiles these operations to
one loop. Small tensors do not use XLA, because compiling takes a tenth of a second for each shape.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

FUSE_FROM = 2**17  # XLA compiles activations of tensors with at least this many numbers per image


@keras.saving.register_keras_serializable("dali_detection")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` for images: same arguments, variables, names, outputs and gradients.

    Inputs are (B, H, W, C). Keras' own code runs if the fused kernel cannot do the work: for other shapes
    or axes, a mask, no scale, no centre, batch renormalisation, and statistics synchronised over replicas.

    For n values, the kernel returns the unbiased variance, n / (n - 1) times the biased variance (Bessel's
    correction). The moving variance of tf.keras averages unbiased variances. This layer averages biased
    variances, as Keras 3 does, and as google/automl did on TPUs for the published models (efficientdet/
    utils.py: TpuBatchNormalization is not fused). At the coarse levels n is small (8 for two images of 2 x 2
    cells), so the two variances differ a lot.
    """

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None) -> tf.Tensor:
        is_special = mask is not None or self.renorm or self.synchronized or not (self.scale and self.center)
        if is_special or len(inputs.shape) != 4 or self.axis not in (-1, 3):
            return super().call(inputs, training=training, mask=mask)

        use_batch_statistics = bool(training) and self.trainable
        outputs, batch_mean, unbiased_variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=self.gamma,
            offset=self.beta,
            mean=self.moving_mean,
            variance=self.moving_variance,
            epsilon=self.epsilon,
            is_training=use_batch_statistics,
        )
        if use_batch_statistics:
            count = inputs.shape[:3].num_elements()
            if count is None:
                count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), unbiased_variance.dtype)
            self._update(self.moving_mean, batch_mean)
            self._update(self.moving_variance, unbiased_variance * ((count - 1.0) / count))
        return outputs

    def _update(self, average: keras.Variable, value: tf.Tensor) -> None:
        average.assign_sub((average - value) * (1.0 - self.momentum))


def is_cpu_only() -> bool:
    """Returns whether TensorFlow sees no GPU."""
    return not tf.config.list_physical_devices("GPU")


def moving_statistics(model: keras.Model) -> list[tf.Variable]:
    """Returns the moving means and variances of all batch norms, also of frozen ones."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    return [variable.value for layer in layers for variable in (layer.moving_mean, layer.moving_variance)]


def limit_bn_momentum(model: keras.Model, num_steps: int) -> keras.Model:
    """Lowers the momentum of all batch norms for a run of fewer than 2,000 steps, but not below 0.9.

    Moving means start at 0, moving variances at 1. After n steps, the share momentum**n of these initial
    values is left. With momentum 0.99, 420 steps leave 1.5 % of the initial variance 1, which is more than
    the variance of many layers. An EfficientDet-D0 trained for 420 steps had AP 11.4 with these statistics,
    and AP 40.8 with statistics computed again for the same weights, on the same images (docs/accuracy.md).

    Args:
        model: the network; it is changed.
        num_steps: number of forward passes of the whole run.

    Returns:
        `model`.
    """
    limit = max(0.9, 1 - 20 / num_steps)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = min(layer.momentum, limit)
    return model


class _Activation(keras.layers.Layer):
    """An activation layer, (B, ..., C) -> (B, ..., C). `build` decides once whether XLA compiles the layer.

    `call` must not decide by the shape of its input: in training at several image sizes, the shape is known
    in the first step of a session but not later, so a resumed run would round differently. A model for
    several sizes has unknown sides; XLA then compiles all its activations, once per size. Inference never
    uses XLA, because the inference graph is also exported.
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        sides = input_shape[1:]
        is_large = None in sides or math.prod(filter(None, sides)) >= FUSE_FROM
        self.fuse = is_large and is_cpu_only()

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape


@keras.saving.register_keras_serializable("dali_detection")
class Swish(_Activation):
    """x * sigmoid(x) (arXiv 1710.05941)."""

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training:
            return inputs * tf.sigmoid(inputs)
        return _fused_swish(inputs) if self.fuse and not tf.executing_eagerly() else swish(inputs)


@keras.saving.register_keras_serializable("dali_detection")
class Mish(_Activation):
    """x * tanh(softplus(x)) (arXiv 1908.08681)."""

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training:
            return inputs * _mish_gate(inputs)
        return _fused_mish(inputs) if self.fuse and not tf.executing_eagerly() else mish(inputs)


@tf.custom_gradient
def swish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Returns x * sigmoid(x). To save memory, only x is kept for the backward pass."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([upstream]):  # else TensorFlow would keep the forward pass' sigmoid
            gate = tf.sigmoid(x)
        return upstream * (gate + tf.raw_ops.SigmoidGrad(y=gate, dy=x))

    return x * tf.sigmoid(x), gradient


@tf.custom_gradient
def _fused_swish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    # XLA compiles only the gradient, because TensorFlow has a fused kernel for the forward pass on x86.
    return x * tf.sigmoid(x), lambda upstream: _swish_gradient(x, upstream)


@tf.function(jit_compile=True, autograph=False)
def _swish_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    gate = tf.sigmoid(x)
    return upstream * (gate + x * gate * (1 - gate))


@tf.custom_gradient
def mish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Returns x * tanh(softplus(x)). Only x is kept for the backward pass; with TensorFlow's own gradient, a
    training step takes a third more memory."""
    return x * _mish_gate(x), lambda upstream: _mish_gradient(x, upstream)


@tf.custom_gradient
def _fused_mish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    return _compiled_mish(x), lambda upstream: _compiled_mish_gradient(x, upstream)


def _mish_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    gate = _mish_gate(x)
    return upstream * (gate + x * tf.sigmoid(x) * (1 - gate * gate))


def _mish_gate(x: tf.Tensor) -> tf.Tensor:
    """Returns tanh(softplus(x)), computed as n / (n + 2) with n = e^x (e^x + 2).

    The formula x * tanh(softplus(x)) fails on a CPU: in a compiled graph, TensorFlow 2.21 fuses Mish with the
    convolution and the batch norm before it, but has no CPU kernel for the fused operation.
    """
    e = tf.exp(tf.minimum(tf.cast(x, tf.float32), 20.0))  # the gate is 1 for x > 10
    n = e * (e + 2.0)
    return tf.cast(n / (n + 2.0), x.dtype)


_compiled_mish = tf.function(lambda x: x * _mish_gate(x), jit_compile=True, autograph=False)
_compiled_mish_gradient = tf.function(_mish_gradient, jit_compile=True, autograph=False)
