"""CIoU loss of assigned predictions, cross-entropy of objectness and classes, L2 loss of the kernels.

Sources: YOLOv4 (arXiv 2004.10934) section 3.4, AlexeyAB/darknet cfg/yolov4.cfg and src/yolo_layer.c.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from common import boxes as box_ops
from yolov4.decoding import MAX_LOG_SIZE, decode_offsets
from yolov4.targets import Assignment, assign_targets, ignore_mask

if TYPE_CHECKING:
    from yolov4.config import YOLOv4Config


def box_loss(
    offsets: tf.Tensor,
    assignment: Assignment,
    config: "YOLOv4Config",
    head: int,
    *,
    grid_size: tuple[tf.Tensor | int, tf.Tensor | int],
) -> tf.Tensor:
    """Returns iou_normalizer times the sum of 1 - CIoU over the assigned predictions, a float32 scalar.

    config.box_gradient chooses the gradient for the raw outputs. "exact" is the derivative of the loss.
    "darknet" is the gradient of Darknet's delta_yolo_box (`_darknet_derivative`), which is many times larger.
    iou_normalizer 0.07 and max_delta 5 were tuned for "darknet". With "exact", iou_normalizer 2 works.

    config.size_weighting multiplies the loss of a box by 2 - width * height, so that small boxes count more.
    Darknet's loss does not have this factor. config.max_delta limits each value of the gradient, like
    Darknet's clip_value. If iou_thresh is below 1, the loss is divided by `assignment.num_classes`.

    Args:
        offsets: (B, M, K, 4), raw outputs of the predictions `assignment.cells`.
        assignment: the assignment of M boxes to this head.
        head: number of the head, the finest stride first.
        grid_size: (rows, columns) of the head.
    """
    boxes = assignment.boxes[:, :, None, :]  # (B, M, 1, 4)
    area = box_ops.area(boxes)
    weight = config.iou_normalizer * (2.0 - area if config.size_weighting else tf.ones_like(area))
    decode = functools.partial(_decode, assignment=assignment, config=config, head=head, grid_size=grid_size)

    # The derivative is clipped before it is multiplied by `upstream`, which contains the loss scale.
    @tf.custom_gradient
    def loss_of_each(offsets: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        ciou, derivative = _DERIVATIVES[config.box_gradient](offsets, boxes, decode)
        derivative *= -weight[..., None]
        derivative = tf.where(tf.math.is_finite(derivative), derivative, 0.0)
        if config.max_delta:
            derivative = tf.clip_by_value(derivative, -config.max_delta, config.max_delta)
        return weight * (1.0 - ciou), lambda upstream: upstream[..., None] * derivative

    loss = loss_of_each(tf.cast(offsets, tf.float32))  # (B, M, K)
    if config.iou_thresh < 1:
        loss /= tf.maximum(assignment.num_classes, 1.0)
    return tf.reduce_sum(tf.where(assignment.assigned, loss, 0.0))


def objectness_loss(
    logits: tf.Tensor, assignment: Assignment, ignored: tf.Tensor, shortfall: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns the sum of the cross-entropy of one head's objectness, a float32 scalar.

    A prediction with boxes has the target 1 - `shortfall` of the first box. A prediction without a box has
    the target 0, and does not count if `ignored` is true.

    Args:
        logits: (B, h, w, K).
        ignored: bool (B, h, w, K), from `targets.ignore_mask`.
        shortfall: float32 (B, M, K), 1 minus the target of each assigned prediction; None: zeros.
    """
    logits = tf.cast(logits, tf.float32)
    shape = tf.shape(logits, tf.int64)
    # int64, because TensorFlow adds int32 on the CPU
    first = tf.range(shape[0])[:, None, None] * tf.reduce_prod(shape[1:])
    cells = tf.reshape(first + assignment.cells, [-1, 1])

    def scatter(values: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.scatter_nd(cells, tf.reshape(values, [-1]), [tf.reduce_prod(shape)]), shape)

    trained = scatter(tf.cast(assignment.owner, tf.float32)) > 0.5
    cross_entropy = tf.nn.softplus(tf.where(trained, -logits, logits))
    if shortfall is not None:
        cross_entropy += scatter(tf.where(assignment.owner, shortfall, 0.0)) * logits
    return tf.reduce_sum(tf.where(ignored & ~trained, 0.0, cross_entropy))


def class_loss(logits: tf.Tensor, assignment: Assignment, *, label_smoothing: float = 0.0) -> tf.Tensor:
    """Returns the sum of the cross-entropy of the classes over the assigned predictions of one head.

    Each prediction counts once, with the classes of all its boxes as targets (delta_yolo_class).

    Args:
        logits: (B, M, K, C), class logits of the predictions `assignment.cells`.
        label_smoothing: moves all targets towards 0.5.
    """
    logits = tf.cast(logits, tf.float32)
    # Let z = -x where the target is 1, and z = x where it is 0. Then the cross-entropy is softplus(z).
    z = tf.where(assignment.class_targets, -logits, logits)
    cross_entropy = tf.nn.softplus(z)
    if label_smoothing:
        # The opposite target has the weight label_smoothing / 2. Its loss is softplus(-z) = softplus(z) - z.
        cross_entropy -= 0.5 * label_smoothing * z
    return tf.reduce_sum(tf.where(assignment.owner[..., None], cross_entropy, 0.0))


def detection_loss(
    heads: Sequence[tf.Tensor], targets: dict[str, tf.Tensor], config: "YOLOv4Config"
) -> dict[str, tf.Tensor]:
    """Returns the box, objectness and class loss of a batch.

    Each loss is a sum over all predictions of an image, averaged over the images of the batch.

    Args:
        heads: raw outputs (B, h, w, K, 5 + C), finest stride first: x, y, width, height, objectness, classes.
        targets: the loader's boxes (B, M, 4), classes (B, M) and num_boxes (B,).

    Returns:
        float32 scalars `box_loss`, `objectness_loss`, `class_loss` and `detection_loss`, their sum.
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
        box_sum += box_loss(trained[..., :4], assignment, config, head, grid_size=grid_size)
        shortfall = None
        if config.objectness_iou:
            decoded = _decode(tf.stop_gradient(trained[..., :4]), assignment, config, head, grid_size)
            shortfall = config.objectness_iou * (1.0 - box_ops.iou(decoded, assignment.boxes[:, :, None, :]))
        objectness_sum += objectness_loss(raw[..., 4], assignment, ignored, shortfall)
        class_sum += class_loss(trained[..., 5:], assignment, label_smoothing=config.label_smoothing)
    batch = tf.cast(tf.shape(boxes)[0], tf.float32)
    values = {
        "box_loss": box_sum / batch,
        "objectness_loss": config.obj_normalizer * objectness_sum / batch,
        "class_loss": config.cls_normalizer * class_sum / batch,
    }
    return values | {"detection_loss": tf.add_n(list(values.values()))}


def l2_loss(variables: Sequence[keras.Variable], weight_decay: float) -> tf.Tensor:
    """Returns `weight_decay` times half the sum of the squares of all values of convolution kernels.

    As in Darknet (src/convolutional_layer.c, update_convolutional_layer), biases and batch-norm parameters
    have no weight decay.
    """
    kernels = [v for v in variables if v.name.endswith("kernel")]
    if not kernels:  # all layers are frozen
        return tf.zeros([])
    return weight_decay * tf.add_n([tf.nn.l2_loss(tf.cast(v.value, tf.float32)) for v in kernels])


def _decode(
    offsets: tf.Tensor, assignment: Assignment, config: "YOLOv4Config", head: int, grid_size: tuple
) -> tf.Tensor:
    """Decodes the raw outputs (B, M, K, 4) at the cells `assignment.cells` to boxes (B, M, K, 4)."""
    rows, columns = assignment.rows[:, :, None], assignment.columns[:, :, None]
    return decode_offsets(offsets, rows, columns, config, head, grid_size)


def _exact_derivative(
    offsets: tf.Tensor, boxes: tf.Tensor, decode: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the CIoU (...) of `decode(offsets)` and `boxes`, and the CIoU's gradient for `offsets`."""
    with tf.GradientTape() as tape:
        tape.watch(offsets)
        ciou = box_ops.ciou(decode(offsets), boxes)
    return ciou, tape.gradient(ciou, offsets)


def _darknet_derivative(
    offsets: tf.Tensor, boxes: tf.Tensor, decode: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the CIoU, and the gradient that Darknet uses for `offsets` (yolo_layer.c, delta_yolo_box).

    Darknet computes the derivative for the box's normalised centre x, centre y, width and height, and uses
    this derivative for the raw outputs, with three changes:
    - The derivative for a side is multiplied by the exponential of the raw output.
    - For the sides, the derivative of the IoU is doubled.
    - The aspect term is not divided by width**2 + height**2.
    Darknet's dx_box_iou (src/box.c) has a wrong sign, which is corrected here.
    """
    boxes_cxcywh = box_ops.ltrb_to_cxcywh(decode(offsets))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(boxes_cxcywh)
        predictions = box_ops.cxcywh_to_ltrb(boxes_cxcywh)
        iou, diou, ciou = (f(predictions, boxes) for f in (box_ops.iou, box_ops.diou, box_ops.ciou))
        distance, aspect = iou - diou, diou - ciou
    sides = boxes_cxcywh[..., 2:]
    divisor = tf.reduce_sum(tf.square(sides), axis=-1, keepdims=True)
    derivative = (
        tape.gradient(iou, boxes_cxcywh) * [1.0, 1.0, 2.0, 2.0]
        - tape.gradient(distance, boxes_cxcywh)
        - tape.gradient(aspect, boxes_cxcywh) * divisor
    )
    factors = tf.exp(tf.minimum(offsets[..., 2:], MAX_LOG_SIZE))
    return ciou, derivative * tf.concat([tf.ones_like(factors), factors], axis=-1)


_DERIVATIVES = {"exact": _exact_derivative, "darknet": _darknet_derivative}
