"""CIoU on the predictions that a box trains, cross-entropy for objectness and classes, L2 on the kernels.

YOLOv4 (arXiv 2004.10934) section 3.4 with the constants of AlexeyAB/darknet cfg/yolov4.cfg, and the rules of
its src/yolo_layer.c; targets.py says which prediction a box trains.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from common import boxes as box_ops
from yolov4.config import YOLOv4Config
from yolov4.decoding import decode_offsets
from yolov4.targets import Assignment, assign_targets, ignore_mask


def box_loss(
    offsets: tf.Tensor,
    boxes: tf.Tensor,
    assignment: Assignment,
    config: YOLOv4Config,
    head: int,
    *,
    grid_size: tuple[tf.Tensor | int, tf.Tensor | int],
) -> tf.Tensor:
    """Sum of 1 - CIoU over the predictions that each box trains, times iou_normalizer.

    CIoU compares aspect ratios of normalised sides, as Darknet does: on a network input that is not square
    they are not the ratios in pixels.

    The gradient is the derivative by the raw outputs. What Darknet's delta_yolo_box hands back is one by the
    box itself, without the slope of the sigmoid, the number of columns and the size of the anchor: 3 to 270
    times as large for yolov4 at 608, most for small boxes. Its normaliser and max_delta are made for that.

    config.size_weighting multiplies the loss of a box by 2 - width * height, so that small boxes count more.
    Darknet hands this factor to delta_yolo_box, which uses it in its squared-error branch only: without the
    weighting the loss is Darknet's.
    config.max_delta limits the gradient of each box by each raw output, weights included, as clip_value does
    there. Where boxes share a prediction and iou_thresh is below 1, their sum is divided by the number of
    their classes (averages_yolo_deltas; that counts, under label smoothing, improbable classes as well).

    Args:
        offsets: (B, M, K, 4), raw outputs of the predictions `assignment.cells`.
        boxes: float32 (B, M, 4), ltrb, normalised to the network input.
        assignment: of these boxes to this head.
        config: holds the anchors and constants.
        head: number of the head, the finest stride first.
        grid_size: (rows, columns) of the head.

    Returns:
        float32 scalar. Its gradient is finite whatever the boxes and offsets are (fix_nan_inf).
    """
    stride = config.strides[head]
    boxes = boxes[:, :, None, :]  # (B, M, 1, 4)
    weight = config.iou_normalizer
    if config.size_weighting:
        weight *= 2.0 - box_ops.area(boxes)

    def loss_of_each(offsets: tf.Tensor) -> tf.Tensor:  # (B, M, K)
        predictions = decode_offsets(
            offsets,
            rows=assignment.rows[:, :, None],
            columns=assignment.columns[:, :, None],
            anchor_sizes=tf.constant([config.anchor_sizes[i] for i in config.masks[head]], tf.float32),
            scale_xy=config.scale_xy[head],
            grid_size=grid_size,
            image_size=(stride * grid_size[0], stride * grid_size[1]),
        )
        return weight * (1.0 - box_ops.ciou(predictions, boxes))

    loss = _limit_gradient(loss_of_each, tf.cast(offsets, tf.float32), config.max_delta)
    if config.iou_thresh < 1:
        loss /= tf.maximum(assignment.num_classes, 1.0)
    return tf.reduce_sum(tf.where(assignment.assigned, loss, 0.0))


def objectness_loss(logits: tf.Tensor, assignment: Assignment, ignored: tf.Tensor) -> tf.Tensor:
    """Sum of the cross-entropy of one head's objectness, before obj_normalizer.

    The target is 1 where a box trains the prediction, and once, however many do; 0 elsewhere, except where
    `ignored` takes a prediction out of the sum.

    Args:
        logits: (B, h, w, K).
        assignment: of the boxes to this head.
        ignored: bool (B, h, w, K), `targets.ignore_mask`.

    Returns:
        float32 scalar.
    """
    logits = tf.cast(logits, tf.float32)
    shape = tf.shape(logits, tf.int64)
    # int64, because TensorFlow adds int32 on the host even where all else is on a GPU
    first = tf.range(shape[0])[:, None, None] * tf.reduce_prod(shape[1:])
    cells = tf.reshape(first + tf.cast(assignment.cells, tf.int64), [-1, 1])
    owned = tf.reshape(tf.cast(assignment.owner, tf.float32), [-1])
    trained = tf.reshape(tf.scatter_nd(cells, owned, [tf.reduce_prod(shape)]) > 0.5, shape)
    cross_entropy = tf.nn.softplus(tf.where(trained, -logits, logits))
    return tf.reduce_sum(tf.where(ignored & ~trained, 0.0, cross_entropy))


def class_loss(logits: tf.Tensor, assignment: Assignment, *, label_smoothing: float = 0.0) -> tf.Tensor:
    """Sum of the cross-entropy of the classes over the predictions of one head that boxes train.

    Each prediction counts once, with the classes of all its boxes as targets (delta_yolo_class).

    Args:
        logits: (B, M, K, C), of the predictions `assignment.cells`.
        assignment: of the boxes to this head.
        label_smoothing: moves all targets towards 0.5.

    Returns:
        float32 scalar, before cls_normalizer.
    """
    logits = tf.cast(logits, tf.float32)
    # with z = -x where the target is 1 and x where it is 0, the cross-entropy is softplus(z)
    z = tf.where(assignment.class_targets, -logits, logits)
    cross_entropy = tf.nn.softplus(z)
    if label_smoothing:
        # smoothing moves half of it from the target to its opposite, whose cross-entropy is softplus(-z)
        cross_entropy -= 0.5 * label_smoothing * z
    return tf.reduce_sum(tf.where(assignment.owner[..., None], cross_entropy, 0.0))


def detection_loss(
    heads: Sequence[tf.Tensor], targets: dict[str, tf.Tensor], config: YOLOv4Config
) -> dict[str, tf.Tensor]:
    """Box, objectness and class loss of a batch.

    Sums over all predictions of an image, averaged over the images of the batch: Darknet's learning rates
    mean that.

    Args:
        heads: raw outputs (B, h, w, K, 5 + C), finest stride first: x, y, width, height, objectness, classes.
        targets: as the loader gives them: boxes (B, M, 4), classes (B, M), num_boxes (B,).
        config: holds the anchors and constants.

    Returns:
        float32 scalars `box_loss`, `objectness_loss` and `class_loss`, each times its normaliser, and
        `detection_loss`, their sum.
    """
    boxes, classes = targets["boxes"], targets["classes"]
    box_sum, objectness_sum, class_sum = 0.0, 0.0, 0.0
    for head, raw in enumerate(heads):
        raw = tf.cast(raw, tf.float32)
        shape = tf.shape(raw)
        grid_size = shape[1], shape[2]
        num_outputs = raw.shape[-1]  # 5 + C
        assignment = assign_targets(
            boxes, classes, config, head, grid_size=grid_size, num_classes=num_outputs - 5
        )
        ignored = ignore_mask(raw, boxes, classes, targets["num_boxes"], config, head)
        predictions = tf.reshape(raw, [shape[0], shape[1] * shape[2] * shape[3], num_outputs])
        trained = tf.gather(predictions, assignment.cells, batch_dims=1)  # (B, M, K, 5 + C)
        box_sum += box_loss(trained[..., :4], boxes, assignment, config, head, grid_size=grid_size)
        objectness_sum += objectness_loss(raw[..., 4], assignment, ignored)
        class_sum += class_loss(trained[..., 5:], assignment, label_smoothing=config.label_smoothing)
    batch = tf.cast(tf.shape(boxes)[0], tf.float32)
    values = {
        "box_loss": box_sum / batch,
        "objectness_loss": config.obj_normalizer * objectness_sum / batch,
        "class_loss": config.cls_normalizer * class_sum / batch,
    }
    return values | {"detection_loss": tf.add_n(list(values.values()))}


def l2_loss(variables: Sequence[keras.Variable], weight_decay: float) -> tf.Tensor:
    """`weight_decay` times half the sum of squares of every convolution kernel.

    As Darknet's src/convolutional_layer.c, update_convolutional_layer, which shrinks the kernels by the
    learning rate times `weight_decay`. Biases and batch-norm parameters are left alone.
    """
    kernels = [v for v in variables if v.name.endswith("kernel")]
    if not kernels:  # all frozen
        return tf.zeros([])
    return weight_decay * tf.add_n([tf.nn.l2_loss(tf.cast(v.value, tf.float32)) for v in kernels])


def _limit_gradient(
    loss_of_each: Callable[[tf.Tensor], tf.Tensor], offsets: tf.Tensor, max_delta: float
) -> tf.Tensor:
    """`loss_of_each(offsets)`, with the derivative of each loss cut to +-max_delta (0: not cut).

    The derivative is worked out beforehand, so that what comes after (the mean over the batch, the loss scale
    of float16) multiplies a gradient that is cut already. Derivatives that are not finite become 0.

    Args:
        loss_of_each: (..., 4) -> (...), each of which depends on its own four numbers alone.
        offsets: float32 (..., 4).
        max_delta: limit.
    """

    @tf.custom_gradient
    def limited(offsets: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(offsets)
            losses = loss_of_each(offsets)
        derivative = tape.gradient(losses, offsets)
        derivative = tf.where(tf.math.is_finite(derivative), derivative, 0.0)
        if max_delta:
            derivative = tf.clip_by_value(derivative, -max_delta, max_delta)
        return losses, lambda upstream: upstream[..., None] * derivative

    return limited(offsets)
