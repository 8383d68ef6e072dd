"""Focal loss on every anchor, Huber loss on the matched ones, L2 on the kernels.

EfficientDet (arXiv 1911.09070) section 5.1 with the constants of google/automl tf2/train_lib.py; focal loss:
arXiv 1708.02002.
One departure: automl masks the box loss by `box_targets != 0`, which drops the coordinates of an anchor that
is aligned exactly with its box; here an anchor is positive where its class target is not background.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from efficientdet.config import EfficientDetConfig

# From this many logits on, XLA compiles the focal loss on a CPU (on a GPU --xla decides): one loop in
# place of a dozen passes over memory. Below, the second that compiling takes would not be won back.
FUSE_FROM = 2**20


def focal_loss(
    logits: tf.Tensor,
    class_targets: tf.Tensor,
    *,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> tf.Tensor:
    """Sum of the sigmoid focal loss over one level.

    Args:
        logits: (B, h, w, k * C), anchor-major as the class head gives them.
        class_targets: int (B, h, w, k), 0-based class of each anchor, -1 for background.
        alpha: weight of the positive terms; the negative ones weigh 1 - alpha.
        gamma: exponent of the modulating factor (1 - p_t).
        label_smoothing: moves the targets of the cross-entropy towards 0.5; the modulating factor keeps the
            hard ones.

    Returns:
        float32 scalar, not normalised.
    """
    logits = tf.cast(logits, tf.float32)
    is_large = (logits.shape.num_elements() or 0) >= FUSE_FROM
    on_cpu = not tf.config.list_physical_devices("GPU")
    compute = _fused_focal_loss if is_large and on_cpu else _focal_loss
    return compute(logits, class_targets, alpha, gamma, label_smoothing)


def _focal_loss(
    logits: tf.Tensor, class_targets: tf.Tensor, alpha: float, gamma: float, label_smoothing: float
) -> tf.Tensor:
    num_classes = logits.shape[-1] // class_targets.shape[-1]
    logits = tf.reshape(logits, [-1, num_classes])  # (B h w k, C)
    # one_hot, because TensorFlow compares int32 on the host even where all else is on a GPU
    positive = tf.one_hot(tf.reshape(class_targets, [-1]), num_classes, True, False, dtype=tf.bool)
    # With z = -x where the target is 1 and x where it is 0: 1 - p_t = sigmoid(z) and cross-entropy =
    # softplus(z), so the loss is finite with a finite gradient for every finite logit, and costs two
    # transcendental functions.
    z = tf.where(positive, -logits, logits)
    cross_entropy = tf.nn.softplus(z)
    modulation = tf.exp(gamma * (z - cross_entropy))  # log sigmoid(z) = z - softplus(z)
    if label_smoothing:
        # smoothing moves half of it from the target to its opposite, whose cross-entropy is softplus(-z)
        cross_entropy = cross_entropy - 0.5 * label_smoothing * z
    return tf.reduce_sum(tf.where(positive, alpha, 1.0 - alpha) * modulation * cross_entropy)


def _fused_focal_loss(
    logits: tf.Tensor, class_targets: tf.Tensor, alpha: float, gamma: float, label_smoothing: float
) -> tf.Tensor:
    """`_focal_loss` compiled together with its gradient: else all intermediate tensors go through memory."""

    @tf.custom_gradient
    def of(logits: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        loss, gradient = _loss_and_gradient(logits, class_targets, alpha, gamma, label_smoothing)
        return loss, lambda upstream: upstream * gradient

    return of(logits)


@tf.function(jit_compile=True)
def _loss_and_gradient(
    logits: tf.Tensor, class_targets: tf.Tensor, alpha: float, gamma: float, label_smoothing: float
) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = _focal_loss(logits, class_targets, alpha, gamma, label_smoothing)
    return loss, tape.gradient(loss, logits)


def box_loss(
    deltas: tf.Tensor, box_targets: tf.Tensor, class_targets: tf.Tensor, *, delta: float
) -> tf.Tensor:
    """Sum of the Huber loss over the four box deltas of every positive anchor of one level.

    Args:
        deltas: (B, h, w, k * 4) from the box head.
        box_targets: (B, h, w, k * 4).
        class_targets: int (B, h, w, k); an anchor is positive where this is not -1.
        delta: where the loss turns from quadratic to linear.

    Returns:
        float32 scalar, not normalised.
    """
    classes = tf.cast(tf.reshape(class_targets, [-1, 1]), tf.float32)  # (B h w k, 1)
    positive = tf.cast(classes >= 0, tf.float32)
    error = tf.abs(tf.cast(deltas, tf.float32) - tf.cast(box_targets, tf.float32))
    error = tf.reshape(error, [-1, 4])
    quadratic = tf.minimum(error, delta)
    huber = quadratic * (error - 0.5 * quadratic)
    return tf.reduce_sum(huber * positive)


def l2_loss(variables: Sequence[keras.Variable], weight_decay: float) -> tf.Tensor:
    """`weight_decay` times half the sum of squares of every convolution kernel.

    As google/automl tf2/train_lib.py _reg_l2_loss.
    Biases, batch-norm parameters and fusion weights are left alone.
    """
    kernels = [v for v in variables if v.name.endswith("kernel")]
    if not kernels:  # all frozen
        return tf.zeros([])
    return weight_decay * tf.add_n([tf.nn.l2_loss(tf.cast(v.value, tf.float32)) for v in kernels])


def num_positives_share(targets: dict[str, tf.Tensor], num_replicas: int = 1) -> tf.Tensor:
    """float32 scalar: what one replica's batch adds to the number that the loss is divided by.

    Its mean over the replicas is (P + 1) / num_replicas, P the positive anchors of all of them. Dividing each
    replica's sum by that mean, and averaging the gradients, is dividing the sum over all by P + 1: where the
    objects lie unevenly, it is not the mean of each replica's own loss.
    """
    # plus one as in automl: a batch without any object still has a finite loss
    return tf.reduce_sum(targets["num_positives"]) + 1.0 / num_replicas


def detection_loss(
    class_logits: Sequence[tf.Tensor],
    box_deltas: Sequence[tf.Tensor],
    targets: dict[str, tf.Tensor],
    config: EfficientDetConfig,
    num_positives: tf.Tensor | None = None,
) -> dict[str, tf.Tensor]:
    """Class and box loss of a batch, both normalised by P + 1, P positive anchors; the box loss by 4 (P + 1).

    Args:
        class_logits: per level (B, h, w, k * C).
        box_deltas: per level (B, h, w, k * 4).
        targets: as the loader gives them: num_positives (B,), class_targets_<level>, box_targets_<level>.
        config: names the levels and holds the constants.
        num_positives: the mean of `num_positives_share` over the replicas; None for a batch on its own.

    Returns:
        float32 scalars `class_loss`, `box_loss` (before its weight) and `detection_loss` (their weighted
        sum).
    """
    if num_positives is None:
        num_positives = num_positives_share(targets)
    class_sum, box_sum = 0.0, 0.0
    for i, level in enumerate(range(config.min_level, config.max_level + 1)):
        class_targets = targets[f"class_targets_{level}"]
        class_sum += focal_loss(
            class_logits[i],
            class_targets,
            alpha=config.focal_alpha,
            gamma=config.focal_gamma,
            label_smoothing=config.label_smoothing,
        )
        box_sum += box_loss(
            box_deltas[i], targets[f"box_targets_{level}"], class_targets, delta=config.huber_delta
        )
    class_term = class_sum / num_positives
    box_term = box_sum / (4.0 * num_positives)
    return {
        "class_loss": class_term,
        "box_loss": box_term,
        "detection_loss": class_term + config.box_loss_weight * box_term,
    }
