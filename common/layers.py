"""Batch norm, Swish and Mish for both networks. On a CPU they train faster than Keras' own layers.

BatchNormalization uses TensorFlow's fused kernel, which computes the statistics in float32.

Swish and Mish of large tensors are compiled by XLA to one loop. Small tensors do not use XLA, because
compiling takes a tenth of a second for each shape.

`unfused` makes inference faster on CPUs without AVX-512.
"""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

FUSE_FROM = 2**17  # XLA compiles tensors with at least this many numbers per image


@keras.saving.register_keras_serializable("dali_detection")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` for images, (B, H, W, C), with the same arguments and outputs.

    For other shapes and rare options, Keras' own code runs.

    The fused kernel returns the unbiased variance. The moving variance is an average of biased variances, as
    in Keras 3, and in google/automl on TPUs (efficientdet/utils.py: TpuBatchNormalization).
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
    return not tf.config.list_physical_devices("GPU")


@functools.cache
def has_avx512() -> bool:
    """Whether the CPU has AVX-512. False where Linux's /proc/cpuinfo does not say so."""
    file = pathlib.Path("/proc/cpuinfo")
    return file.exists() and "avx512" in file.read_text()


def unfused(function: Callable) -> Callable:
    """Returns a tf.function of inference that computes convolution and batch norm separately.

    TensorFlow's remapper joins them. On a CPU without AVX-512, oneDNN makes a network 7 to 21 times slower
    with it if the weights are variables (docs/dev/performance_notes.md#inference). On other devices,
    and in other functions such as the training step, the remapper stays on.
    """
    if not is_cpu_only() or has_avx512():
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        options = context.context().function_call_options
        config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
        config.graph_options.rewrite_options.remapping = rewriter_config_pb2.RewriterConfig.OFF
        context.context().function_call_options = context.FunctionCallOptions(
            options.executor_type, config_proto=config
        )
        try:
            return function(*args, **kwargs)
        finally:
            context.context().function_call_options = options

    return run


def random_states(model: keras.Model) -> list[tf.Variable]:
    """Returns the (seed, counter) of each Keras seed generator."""
    weights = {id(weight) for weight in model.weights}
    return [variable.value for variable in model.variables if id(variable) not in weights]


def moving_statistics(model: keras.Model) -> list[tf.Variable]:
    """Returns the moving means and variances of all batch norms."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    return [variable.value for layer in layers for variable in (layer.moving_mean, layer.moving_variance)]


def limit_bn_momentum(model: keras.Model, num_steps: int) -> keras.Model:
    """Lowers the momentum of all batch norms for a run of fewer than 2,000 steps, but not below 0.9.

    After n steps, the initial statistics still have the weight momentum**n. docs/accuracy.md shows how much
    AP is lost in a short run.

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
    """An activation layer, (B, ..., C) -> (B, ..., C). `build` decides whether XLA compiles the layer.

    XLA is used only for training on a CPU. The input must be large or have a side of unknown size.
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
        with tf.control_dependencies([upstream]):  # else the sigmoid would be kept
            gate = tf.sigmoid(x)
        return upstream * (gate + tf.raw_ops.SigmoidGrad(y=gate, dy=x))

    return x * tf.sigmoid(x), gradient


@tf.custom_gradient
def _fused_swish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    # XLA compiles only the gradient. On x86, TensorFlow itself fuses x * sigmoid(x).
    return x * tf.sigmoid(x), lambda upstream: _swish_gradient(x, upstream)


@tf.function(jit_compile=True, autograph=False)
def _swish_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    gate = tf.sigmoid(x)
    return upstream * (gate + x * gate * (1 - gate))


@tf.custom_gradient
def mish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Returns x * tanh(softplus(x)). To save memory, only x is kept for the backward pass."""
    return x * _mish_gate(x), lambda upstream: _mish_gradient(x, upstream)


@tf.custom_gradient
def _fused_mish(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    return _compiled_mish(x), lambda upstream: _compiled_mish_gradient(x, upstream)


def _mish_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    gate = _mish_gate(x)
    return upstream * (gate + x * tf.sigmoid(x) * (1 - gate * gate))


def _mish_gate(x: tf.Tensor) -> tf.Tensor:
    """Returns tanh(softplus(x)), computed as (e + 2) / (e + 2 + 2 / e) with e = e^x.

    In float16, in which exported files may compute, 2 / e is infinite for x < -10; the result 0 is right.

    TensorFlow 2.21 replaces tanh(softplus(x)) and the layers before it by an operation that has no CPU
    kernel.
    """
    e = tf.exp(tf.minimum(tf.cast(x, tf.float32), 10.0))  # the gate is 1 for x > 10
    n = e + 2.0
    return tf.cast(n / (n + 2.0 / e), x.dtype)


_compiled_mish = tf.function(lambda x: x * _mish_gate(x), jit_compile=True, autograph=False)
_compiled_mish_gradient = tf.function(_mish_gradient, jit_compile=True, autograph=False)
