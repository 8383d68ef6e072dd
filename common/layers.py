"""Layers of both networks whose training on a CPU is faster than Keras': batch norm, Swish and Mish.

BatchNormalization: Keras 3's own layer writes the normalisation out in elementary TensorFlow operations and,
under mixed precision, in float32. The fused kernel reads and writes the activations in their own type
and computes the statistics in float32.

Swish and Mish: in elementary operations they took a fifth of EfficientDet's training step on a CPU, because
each operation reads and writes the whole tensor. Large tensors go through XLA, which makes one loop of them.
Small ones do not: compiling takes a tenth of a second for each shape.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

FUSE_FROM = 2**17  # XLA compiles an activation from this many numbers an image on


@keras.saving.register_keras_serializable("dali_detection")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` for images: same arguments, variables, names, outputs and gradients.

    Inputs are (B, H, W, C). Anything that the fused kernel cannot do (other ranks or axes, a mask, no scale,
    no centre, batch renormalisation, statistics synchronised over replicas) goes to Keras' own code.

    The kernel hands out the unbiased variance (n / (n - 1) times the variance, Bessel's correction), and
    tf.keras averaged that one. Keras 3 averages the variance itself, and so does google/automl on TPUs, where
    the published models were trained (efficientdet/utils.py: TpuBatchNormalization is not fused). This layer
    follows them: at the coarse levels n is small (8 for two images of 2 x 2), and the difference large.
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
    """Whether TensorFlow sees no GPU. Then XLA always works; on a GPU it needs additional parts of CUDA."""
    return not tf.config.list_physical_devices("GPU")


def moving_statistics(model: keras.Model) -> list[tf.Variable]:
    """The variables that a forward pass in training changes, however much of the model is frozen."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    return [variable.value for layer in layers for variable in (layer.moving_mean, layer.moving_variance)]


def limit_bn_momentum(model: keras.Model, num_steps: int) -> keras.Model:
    """Lowers the momentum of all batch norms for a run of fewer than 2,000 steps, at most to 0.9.

    Moving statistics start at 0 and 1. After n steps a share of momentum**n of that start is left: 1.5 %
    after 420 steps at 0.99, which exceeds the variance of many layers. An EfficientDet-D0 of 420 steps had
    AP 11.4 with these statistics and 40.8 with new ones, on the same images (docs/accuracy.md).

    Args:
        model: the network; it is changed.
        num_steps: forward passes of the whole run.

    Returns:
        `model`.
    """
    limit = max(0.9, 1 - 20 / num_steps)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = min(layer.momentum, limit)
    return model


class _Activation(keras.layers.Layer):
    """A layer of floats, (B, ..., C) -> (B, ..., C); what to compile is settled when it is built.

    Settled once, and not by the shapes that come: those of a training at several sizes are known to the
    first step and unknown to later ones, and a run that is stopped and resumed would round otherwise. Such a
    model, its sides open, compiles all, for each size anew. Inference, which is exported, is free of XLA.
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
    """x * sigmoid(x); keeps only x for the way back."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([upstream]):  # else the sigmoid below would be kept for here
            gate = tf.sigmoid(x)
        return upstream * (gate + tf.raw_ops.SigmoidGrad(y=gate, dy=x))

    return x * tf.sigmoid(x), gradient


@tf.custom_gradient
def _fused_swish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    # On x86 TensorFlow's graph optimizer has a fused kernel for the way there.
    return x * tf.sigmoid(x), lambda upstream: _swish_gradient(x, upstream)


@tf.function(jit_compile=True, autograph=False)
def _swish_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    gate = tf.sigmoid(x)
    return upstream * (gate + x * gate * (1 - gate))


@tf.custom_gradient
def mish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """x * tanh(softplus(x)); keeps only x for the way back (with TensorFlow's own gradient a step takes a
    third more memory)."""
    return x * _mish_gate(x), lambda upstream: _mish_gradient(x, upstream)


@tf.custom_gradient
def _fused_mish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    return _compiled_mish(x), lambda upstream: _compiled_mish_gradient(x, upstream)


def _mish_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    gate = _mish_gate(x)
    return upstream * (gate + x * tf.sigmoid(x) * (1 - gate * gate))


def _mish_gate(x: tf.Tensor) -> tf.Tensor:
    """tanh(softplus(x)), as n / (n + 2) with n = e^x (e^x + 2).

    Written out as x * tanh(softplus(x)), TensorFlow 2.21 recognises it in a compiled graph, fuses it with the
    convolution and the batch norm before it, and then fails: it has no such kernel for a CPU.
    """
    e = tf.exp(tf.minimum(tf.cast(x, tf.float32), 20.0))  # the gate is 1 from 10 on
    n = e * (e + 2.0)
    return tf.cast(n / (n + 2.0), x.dtype)


_compiled_mish = tf.function(lambda x: x * _mish_gate(x), jit_compile=True, autograph=False)
_compiled_mish_gradient = tf.function(_mish_gradient, jit_compile=True, autograph=False)
