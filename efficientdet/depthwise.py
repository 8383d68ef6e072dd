"""Keras' layers with depthwise convolutions, whose kernels have a faster gradient on CPUs.

oneDNN's gradient of a depthwise kernel takes up to 2.7 times as long as TensorFlow's own operation, which
TensorFlow uses if the padding is explicit. So the gradient gets the same padding in numbers.
docs/dev/performance_notes.md has the effect on a training step.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from common.layers import is_cpu_only


@keras.saving.register_keras_serializable("dali_detection")
class DepthwiseConv2D(keras.layers.DepthwiseConv2D):
    """`keras.layers.DepthwiseConv2D` with the same outputs."""

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training or not _has_faster_gradient(self, inputs):
            return super().call(inputs)
        outputs = _depthwise_conv(inputs, self.kernel, self.strides[0], self.padding)
        return self.activation(outputs + self.bias if self.use_bias else outputs)


@keras.saving.register_keras_serializable("dali_detection")
class SeparableConv2D(keras.layers.SeparableConv2D):
    """`keras.layers.SeparableConv2D` with the same outputs."""

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training or not _has_faster_gradient(self, inputs):
            return super().call(inputs)
        outputs = _depthwise_conv(inputs, self.depthwise_kernel, self.strides[0], self.padding)
        outputs = keras.ops.conv(outputs, self.pointwise_kernel, padding="valid")
        return self.activation(outputs + self.bias if self.use_bias else outputs)


def _has_faster_gradient(layer: keras.layers.Layer, images: tf.Tensor) -> bool:
    is_plain = layer.data_format == "channels_last" and layer.dilation_rate == (1, 1)
    has_one_stride = layer.strides[0] == layer.strides[1]
    has_numbers = images.dtype == tf.float32 and None not in images.shape[1:3]
    return is_plain and has_one_stride and has_numbers and is_cpu_only()


def _depthwise_conv(
    images: tf.Tensor, kernel: keras.Variable | tf.Tensor, stride: int, padding: str
) -> tf.Tensor:
    """Computes the depthwise convolution of images (B, H, W, C) and a kernel (K, K, C, M): (B, h, w, C M)."""
    kernel = tf.convert_to_tensor(kernel)
    options = {"strides": [1, stride, stride, 1], "padding": padding.upper()}
    sides = zip(images.shape[1:3], kernel.shape[:2], strict=True)
    rows, columns = (_paddings(side, size, stride) if padding == "same" else (0, 0) for side, size in sides)
    explicit = options | {"padding": "EXPLICIT", "explicit_paddings": [0, 0, *rows, *columns, 0, 0]}

    @tf.custom_gradient
    def convolve(images: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return (
                tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
                    input_sizes=tf.shape(images), filter=kernel, out_backprop=upstream, **options
                ),
                tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                    input=images, filter_sizes=tf.shape(kernel), out_backprop=upstream, **explicit
                ),
            )

        return tf.raw_ops.DepthwiseConv2dNative(input=images, filter=kernel, **options), gradient

    return convolve(images, kernel)


def _paddings(side: int, size: int, stride: int) -> tuple[int, int]:
    """Returns how many zeros "same" adds before and after a side (tensorflow.org/api_docs/python/tf/nn)."""
    num_outputs = -(-side // stride)
    total = max((num_outputs - 1) * stride + size - side, 0)
    return total // 2, total - total // 2
