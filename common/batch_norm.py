"""Batch normalisation by TensorFlow's fused kernel, with the numbers of Keras.

Keras 3's own layer writes the normalisation out in elementary TensorFlow operations and, under mixed
precision, in float32. The fused kernel reads and writes the activations in their own type and computes the
statistics in float32.
"""

import keras
import tensorflow as tf


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

    def call(self, inputs, training=None, mask=None):
        fused = (
            len(inputs.shape) == 4
            and self.axis in (-1, 3)
            and self.scale
            and self.center
            and mask is None
            and not self.renorm
            and not self.synchronized
        )
        if not fused:
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

    def _update(self, average, value):
        average.assign_sub((average - value) * (1.0 - self.momentum))


def moving_statistics(model: keras.Model) -> list[tf.Variable]:
    """The variables that a forward pass in training changes, however much of the model is frozen."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    return [variable.value for layer in layers for variable in (layer.moving_mean, layer.moving_variance)]
