"""Focal loss of all anchors, Huber loss of the positive anchors, task-aligned loss, L2 loss of the kernels.

Sources: EfficientDet (arXiv 1911.09070) section 5.1, with the constants of google/automl tf2/train_lib.py;
focal loss: arXiv 1708.02002; task-aligned loss: targets.py.
One difference: automl's box loss leaves out the coordinates in which anchor and box are equal.
"""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from common import box_encoder
from common import boxes as box_ops
from efficientdet.config import EfficientDetConfig
from efficientdet.targets import assign_targets

# On a CPU, XLA compiles the focal loss if there are at least this many logits. (On a GPU, --xla decides.)
FUSE_FROM = 2**20
# task_aligned_loss: largest (dy, dx, dh, dw). Sides grow with exp(dh) and exp(dw), which could overflow.
LARGEST_DELTAS = (math.inf, math.inf, 4.0, 4.0)


def focal_loss(
    logits: tf.Tensor, class_targets: tf.Tensor, *, alpha: float, gamma: float, label_smoothing: float = 0.0
) -> tf.Tensor:
    """Returns the sum of the sigmoid focal loss over one level, a float32 scalar.

    Args:
        logits: (B, h, w, k * C), the output of the class head. Each anchor has C consecutive values.
        class_targets: int (B, h, w, k), 0-based class of each anchor, -1 for background.
        alpha: weight of the positive terms; the negative ones weigh 1 - alpha.
        gamma: exponent of the modulating factor (1 - p_t).
        label_smoothing: moves the targets of the cross-entropy towards 0.5.
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
    # This uses one_hot and not ==, because TensorFlow compares int32 tensors of a GPU on the host.
    positive = tf.one_hot(tf.reshape(class_targets, [-1]), num_classes, True, False, dtype=tf.bool)
    # Let z = -x where the target is 1, and z = x where it is 0. Then 1 - p_t = sigmoid(z) and cross-entropy =
    # softplus(z). So loss and gradient are finite for every finite logit x.
    z = tf.where(positive, -logits, logits)
    cross_entropy = tf.nn.softplus(z)
    modulation = tf.exp(gamma * (z - cross_entropy))  # log sigmoid(z) = z - softplus(z)
    if label_smoothing:
        # The opposite target has the weight label_smoothing / 2. Its loss is softplus(-z) = softplus(z) - z.
        cross_entropy = cross_entropy - 0.5 * label_smoothing * z
    return tf.reduce_sum(tf.where(positive, alpha, 1.0 - alpha) * modulation * cross_entropy)


def _fused_focal_loss(
    logits: tf.Tensor, class_targets: tf.Tensor, alpha: float, gamma: float, label_smoothing: float
) -> tf.Tensor:
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
    """Returns the sum of the Huber loss over the positive anchors of one level, a float32 scalar.

    Args:
        deltas: (B, h, w, k * 4) of the box head.
        box_targets: (B, h, w, k * 4), the deltas to learn.
        class_targets: int (B, h, w, k); an anchor is positive where this is not -1.
        delta: the error at which the loss changes from quadratic to linear.
    """
    classes = tf.cast(tf.reshape(class_targets, [-1, 1]), tf.float32)  # (B h w k, 1)
    positive = tf.cast(classes >= 0, tf.float32)
    error = tf.abs(tf.cast(deltas, tf.float32) - tf.cast(box_targets, tf.float32))
    error = tf.reshape(error, [-1, 4])
    quadratic = tf.minimum(error, delta)
    huber = quadratic * (error - 0.5 * quadratic)
    return tf.reduce_sum(huber * positive)


def detection_loss(
    class_logits: Sequence[tf.Tensor],
    box_deltas: Sequence[tf.Tensor],
    targets: dict[str, tf.Tensor],
    config: EfficientDetConfig,
    num_positives: tf.Tensor | None = None,
) -> dict[str, tf.Tensor]:
    """Returns the losses of a batch: the sums of `max_iou_loss` or `task_aligned_loss`, divided by P + 1.

    P is the number of positive anchors. `config.assignment` chooses the loss.

    Args:
        class_logits: one (B, h, w, k * C) per level.
        box_deltas: one (B, h, w, k * 4) per level.
        targets: the outputs of the training loader.
        num_positives: the mean of `num_positives_share` over the replicas; None: the value for this batch.

    Returns:
        float32 scalars `class_loss`, `box_loss` and `detection_loss`, their weighted sum.
    """
    if num_positives is None:
        num_positives = num_positives_share(targets)
    sum_losses = task_aligned_loss if config.assignment == "task_aligned" else max_iou_loss
    class_sum, box_sum = sum_losses(class_logits, box_deltas, targets, config)
    class_term, box_term = class_sum / num_positives, box_sum / num_positives
    return {
        "class_loss": class_term,
        "box_loss": box_term,
        "detection_loss": class_term + config.box_loss_weight * box_term,
    }


def max_iou_loss(
    class_logits: Sequence[tf.Tensor],
    box_deltas: Sequence[tf.Tensor],
    targets: dict[str, tf.Tensor],
    config: EfficientDetConfig,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of the focal loss over all anchors and a quarter of the sum of the Huber loss.

    `targets` has the loader's class_targets_<level> and box_targets_<level>.
    """
    class_sum, box_sum = tf.zeros([]), tf.zeros([])
    for i, level in enumerate(config.anchors.levels):
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
    return class_sum, box_sum / 4.0  # each anchor has four deltas


def task_aligned_loss(
    class_logits: Sequence[tf.Tensor],
    box_deltas: Sequence[tf.Tensor],
    targets: dict[str, tf.Tensor],
    config: EfficientDetConfig,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of the cross-entropy over all anchors and the sum of 1 - CIoU, weighted by quality.

    targets.py assigns the loader's padded boxes and classes to anchors. As in YOLOv8 (ultralytics/utils/
    loss.py), the class loss is a plain cross-entropy; the box loss uses CIoU (arXiv 1911.08287). In YOLOv8,
    the loss is divided by the sum of qualities, here by the number of positive anchors.
    """
    num_classes = class_logits[0].shape[-1] // config.anchors_per_location
    logits = tf.cast(tf.concat(box_encoder.split_anchors(class_logits, num_classes), axis=1), tf.float32)
    anchors = tf.constant(config.anchors.boxes_normalized)
    deltas = tf.concat(box_encoder.split_anchors(box_deltas, 4), axis=1)
    boxes = box_encoder.decode_deltas(tf.minimum(deltas, LARGEST_DELTAS), anchors)
    assignment = assign_targets(
        tf.stop_gradient(boxes),
        tf.stop_gradient(tf.sigmoid(logits)),
        (anchors[:, :2] + anchors[:, 2:]) / 2,
        targets["boxes"],
        targets["classes"],
        config.image_size,
    )
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=assignment.quality, logits=logits)
    weights = tf.reduce_sum(assignment.quality, axis=-1)
    box_sum = tf.reduce_sum(weights * (1.0 - box_ops.ciou(boxes, assignment.boxes)))
    return tf.reduce_sum(cross_entropy), box_sum


def l2_loss(variables: Sequence[keras.Variable], weight_decay: float) -> tf.Tensor:
    """Returns `weight_decay` times half the sum of the squares of all values of convolution kernels.

    As in google/automl (tf2/train_lib.py, _reg_l2_loss), biases, batch-norm parameters and fusion weights
    have no weight decay.
    """
    kernels = [v for v in variables if v.name.endswith("kernel")]
    if not kernels:  # all layers are frozen
        return tf.zeros([])
    return weight_decay * tf.add_n([tf.nn.l2_loss(tf.cast(v.value, tf.float32)) for v in kernels])


def num_positives_share(targets: dict[str, tf.Tensor], num_replicas: int = 1) -> tf.Tensor:
    """Returns the number of positive anchors of one replica, plus 1 / num_replicas, as a float32 scalar.

    Each replica divides its summed loss by the mean of this value over all replicas.
    """
    # All replicas together add 1, as in automl: the loss of a batch without objects stays finite.
    return tf.reduce_sum(targets["num_positives"]) + 1.0 / num_replicas
