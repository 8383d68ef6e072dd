r"""Trains YOLOv4 (arXiv 2004.10934) with DALI, Keras and pycocotools: a whole training in one file.

    python train_yolov4.py --image_size=128 --batch_size=4 --epochs=2  # generated images, on a laptop
    python train_yolov4.py --images=train2017 --annotations=instances_train2017.json \
        --eval_images=val2017 --eval_annotations=instances_val2017.json --output_dir=runs/yolov4
    horovodrun -np 8 python train_yolov4.py ...  # one process per GPU

Copy this file and yolov4_pipeline.py, which makes the batches. They need DALI, its plugin for TensorFlow,
TensorFlow, Keras 3, pycocotools, Pillow, and Horovod for several processes. Run tools/check_data.py first.
The same command resumes after the last whole epoch, with batches other than those of an unbroken run. Losses
and detections equal those of yolov4/train.py and eval.py with --hparams=multi_scale=1. Network, loss and
numbers follow AlexeyAB/darknet: cfg/yolov4.cfg, src/. docs/yolov4.md has differences. Never run on a GPU.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import time

# Each process sees only its own GPU, as GPU 0, and leaves memory there for DALI. oneDNN speeds up x86 CPUs.
RANK, SIZE = int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1"))  # horovodrun
os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true"} | os.environ
if SIZE > 1:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(16)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["HOROVOD_LOCAL_RANK"]) % len(gpus)]
    import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import yolov4_pipeline as data
from keras import layers
from nvidia.dali import Pipeline, fn
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

GPUS = tf.config.list_physical_devices("GPU")

# --- The network: CSPDarknet53, SPP, PANet and three heads ---
STRIDES, SCALE_XY = (8, 16, 32), (1.2, 1.1, 1.05)  # of the heads; a stride is the pixels of a cell
ANCHORS_PX = [(12, 16), (19, 36), (40, 28), (36, 75), (76, 55), (72, 146), (142, 110), (192, 243), (459, 401)]
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
uniform = functools.partial(keras.initializers.VarianceScaling, 2 / 3, "fan_in", "uniform")
leaky = functools.partial(tf.nn.leaky_relu, alpha=0.1)


def mish(x):  # arXiv 1908.08681: x * tanh(softplus(x)), which TensorFlow 2.21 fails to compile on a CPU
    e = tf.exp(tf.minimum(x, 10.0))  # for larger x, the factor is 1
    return x * (e + 2.0) / (e + 2.0 + 2.0 / e)


def conv(x, filters: int, kernel: int = 1, strides: int = 1, activation=leaky):
    if strides == 2:  # pad all sides, as Darknet; Keras' "same" pads only the bottom and the right side
        x = layers.ZeroPadding2D(((1, 0), (1, 0)))(x)
    options = {"padding": "valid" if strides == 2 else "same", "use_bias": False}
    x = layers.Conv2D(filters, kernel, strides, kernel_initializer=uniform(), **options)(x)
    return layers.Activation(activation)(layers.BatchNormalization(epsilon=1e-5)(x))


def csp_stage(x, filters: int, blocks: int, width: int):
    """Halves height and width. Only one of two branches has residual blocks (arXiv 1911.11929)."""
    block = functools.partial(conv, activation=mish)
    x = block(x, filters, 3, 2)
    shortcut, x = block(x, width), block(x, width)
    for _ in range(blocks):
        x = layers.Add()([block(block(x, filters // 2), width, 3), x])
    return block(layers.Concatenate()([block(x, width), shortcut]), filters)


def bottlenecks(x, filters: int, count: int):  # `count` convolutions, in turn 1 x 1 and 3 x 3
    for i in range(count):
        x = conv(x, 2 * filters, 3) if i % 2 else conv(x, filters)
    return x


def build_model(num_classes: int, image_size: int) -> keras.Model:
    """Returns a model: images in 0..1 -> a list of three heads (B, h, w, 3, 5 + C), finest first."""
    images = keras.Input((image_size, image_size, 3))
    x = conv(images, 32, 3, activation=mish)
    x = csp_stage(csp_stage(x, 64, 1, 64), 128, 2, 64)
    c3 = csp_stage(x, 256, 8, 128)
    c4 = csp_stage(c3, 512, 8, 256)
    x = bottlenecks(csp_stage(c4, 1024, 4, 512), 512, 3)
    pools = [layers.MaxPooling2D(size, 1, "same")(x) for size in (13, 9, 5)]  # SPP: arXiv 1903.08589 figure 2
    p5 = bottlenecks(layers.Concatenate()([*pools, x]), 512, 3)
    up = layers.UpSampling2D(2)(conv(p5, 256))  # PANet (arXiv 1803.01534 figure 1), which adds: top-down,
    p4 = bottlenecks(layers.Concatenate()([conv(c4, 256), up]), 256, 5)
    up = layers.UpSampling2D(2)(conv(p4, 128))
    p3 = bottlenecks(layers.Concatenate()([conv(c3, 128), up]), 128, 5)
    n4 = bottlenecks(layers.Concatenate()([conv(p3, 256, 3, 2), p4]), 256, 5)  # then bottom-up
    n5 = bottlenecks(layers.Concatenate()([conv(n4, 512, 3, 2), p5]), 512, 5)
    heads = []
    for x, filters in ((p3, 256), (n4, 512), (n5, 1024)):
        x = layers.Conv2D(3 * (5 + num_classes), 1, kernel_initializer=uniform())(conv(x, filters, 3))
        heads.append(layers.Reshape((*x.shape[1:3], 3, 5 + num_classes))(x))
    return keras.Model(images, heads)


def decode(raw, number: int):
    """Returns the boxes of a head as centre x, centre y, width and height in 0..1, (B, h, w, 3, 4)."""
    grid, scale = float(raw.shape[1]), SCALE_XY[number]  # grid: cells per row and per column
    cells = tf.stack(tf.meshgrid(tf.range(grid), tf.range(grid)), axis=-1)[:, :, None]  # (h, w, 1, 2): x, y
    centers = (cells + scale * tf.sigmoid(raw[..., :2]) - 0.5 * (scale - 1.0)) / grid
    anchors = tf.constant(ANCHORS_PX[3 * number : 3 * number + 3], tf.float32) / (grid * STRIDES[number])
    return tf.concat([centers, tf.exp(tf.minimum(raw[..., 2:4], 10.0)) * anchors], axis=-1)


def corners(boxes):  # from centre x, centre y, width, height to left, top, right, bottom
    return tf.concat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], axis=-1)


def ciou_terms(a, b):
    """Returns IoU, distance and aspect of ltrb boxes; CIoU = IoU - distance - aspect (arXiv 1911.08287)."""
    inner = tf.maximum(tf.minimum(a[..., 2:], b[..., 2:]) - tf.maximum(a[..., :2], b[..., :2]), 0.0)
    outer = tf.maximum(a[..., 2:], b[..., 2:]) - tf.minimum(a[..., :2], b[..., :2])
    sides_a, sides_b = a[..., 2:] - a[..., :2], b[..., 2:] - b[..., :2]
    intersection, area_a, area_b = (x[..., 0] * x[..., 1] for x in (inner, sides_a, sides_b))
    iou = intersection / tf.maximum(area_a + area_b - intersection, 1e-12)
    move = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    distance = tf.reduce_sum(move**2, axis=-1) / tf.maximum(tf.reduce_sum(outer**2, axis=-1), 1e-12)
    angle_a, angle_b = (tf.atan2(x[..., 0], tf.maximum(x[..., 1], 1e-12)) for x in (sides_a, sides_b))
    v = (2 / math.pi * (angle_a - angle_b)) ** 2
    return iou, distance, tf.stop_gradient(v / tf.maximum(1.0 - iou + v, 1e-12)) * v


def box_loss(raw, predictions, boxes):
    """Returns 0.07 (1 - CIoU), (P,), with the gradient of delta_yolo_box (Darknet's yolo_layer.c)."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(predictions)
        iou, distance, aspect = ciou_terms(corners(predictions), boxes)
    of_iou, of_distance, of_aspect = (tape.gradient(term, predictions) for term in (iou, distance, aspect))
    # Darknet does not divide the aspect's by width**2 + height**2, and doubles the IoU's for width, height.
    of_aspect *= tf.reduce_sum(predictions[:, 2:] ** 2, axis=1, keepdims=True)
    factors = tf.concat([tf.ones_like(raw[:, 2:4]), tf.exp(tf.minimum(raw[:, 2:4], 10.0))], axis=1)
    gradient = -0.07 * factors * (of_iou * [1.0, 1.0, 2.0, 2.0] - of_distance - of_aspect)
    gradient = tf.stop_gradient(tf.clip_by_value(gradient, -5.0, 5.0))  # max_delta
    loss = tf.stop_gradient(0.07 * (1.0 - iou + distance + aspect))
    return loss + tf.reduce_sum((raw[:, :4] - tf.stop_gradient(raw[:, :4])) * gradient, axis=1)  # adds 0


def detection_loss(heads: list, boxes, classes, num_boxes):
    """Returns box, objectness and class loss: sums over predictions, averaged over images."""
    # A box belongs to the best of the nine anchors, and to all whose shape has an IoU above iou_thresh.
    anchors = tf.constant(ANCHORS_PX, tf.float32) / (heads[0].shape[1] * STRIDES[0])  # (9, 2)
    sides = (boxes[..., 2:] - boxes[..., :2])[:, :, None]  # (B, M, 1, 2)
    shared = tf.reduce_prod(tf.minimum(sides, anchors), axis=-1)  # (B, M, 9)
    fit = shared / (tf.reduce_prod(sides, axis=-1) + tf.reduce_prod(anchors, axis=-1) - shared)
    is_best = tf.one_hot(tf.argmax(fit, axis=-1), 9, True, False, dtype=tf.bool)
    is_assigned = (is_best | (fit > 0.213)) & (classes >= 0)[..., None]  # iou_thresh
    all_boxes = boxes[:, None, None, None, : tf.reduce_max(num_boxes)]
    losses = []
    for number, raw in enumerate(heads):
        image, box, anchor = tf.unstack(tf.where(is_assigned[:, :, 3 * number : 3 * number + 3]), axis=1)
        truth = tf.gather_nd(boxes, tf.stack([image, box], axis=1))  # (P, 4), one row for each box and anchor
        cells = tf.cast((truth[:, :2] + truth[:, 2:]) / 2 * float(raw.shape[1]), tf.int64)  # rounds down
        column, row = tf.unstack(tf.minimum(cells, raw.shape[1] - 1), axis=1)
        places = tf.stack([image, row, column, anchor], axis=1)  # of predictions in (B, h, w, 3)
        one_hot = tf.one_hot(tf.gather_nd(classes, tf.stack([image, box], axis=1)), raw.shape[-1] - 5)
        is_class = tf.scatter_nd(places, one_hot, tf.shape(raw[..., 5:], tf.int64)) > 0  # (B, h, w, 3, C)
        is_object = tf.reduce_any(is_class, axis=-1)
        predictions = decode(tf.stop_gradient(raw), number)
        of_boxes = box_loss(tf.gather_nd(raw, places), tf.gather_nd(predictions, places), truth)
        of_boxes /= tf.gather_nd(tf.reduce_sum(tf.cast(is_class, tf.float32), axis=-1), places)
        overlap = tf.reduce_max(ciou_terms(corners(predictions)[..., None, :], all_boxes)[0], axis=-1)
        is_probable = tf.reduce_max(tf.sigmoid(raw[..., 5:]), axis=-1) > 0.25  # yolo_layer.c: process_batch
        is_ignored = (overlap > 0.7) & is_probable & ~is_object  # ignore_thresh
        of_objects = tf.nn.softplus(tf.where(is_object, -raw[..., 4], raw[..., 4]))
        of_classes = tf.nn.softplus(tf.where(is_class, -raw[..., 5:], raw[..., 5:]))
        of_classes = tf.where(is_object[..., None], of_classes, 0.0)
        parts = of_boxes, tf.where(is_ignored, 0.0, of_objects), of_classes
        losses.append([tf.reduce_sum(part) / boxes.shape[0] for part in parts])
    return [tf.add_n(parts) for parts in zip(*losses, strict=True)]


def detect(heads: list):
    """Returns boxes (B, 100, 4) in 0..1, scores and classes (B, 100) and the number of detections (B,)."""
    batch, num_classes = heads[0].shape[0], heads[0].shape[-1] - 5
    boxes = [tf.reshape(corners(decode(raw, number)), [batch, -1, 4]) for number, raw in enumerate(heads)]
    raw = tf.concat([tf.reshape(raw, [batch, -1, 5 + num_classes]) for raw in heads], axis=1)
    scores = tf.reshape(tf.sigmoid(raw[..., 4:5]) * tf.sigmoid(raw[..., 5:]), [batch, -1])  # (B, N C)
    scores, places = tf.math.top_k(scores, min(1000, scores.shape[1]))
    boxes = tf.gather(tf.concat(boxes, axis=1), places // num_classes, batch_dims=1)[:, :, None]
    scores = tf.one_hot(places % num_classes, num_classes) * scores[..., None]  # (B, 1000, C)
    return tf.image.combined_non_max_suppression(boxes, scores, 100, 100, 0.6, 0.001)  # IoU, score


def evaluate(args: argparse.Namespace, config: data.Config, model: keras.Model) -> None:
    """Detects in the evaluation images, and writes metrics.json and detections.json."""
    truth, results = COCO(args.eval_annotations), {}
    images, category_ids = truth.dataset["images"], sorted(truth.getCatIds())
    files = [os.path.join(args.eval_images, image["file_name"]) for image in images]
    shard = {"shard_id": RANK, "num_shards": SIZE, "pad_last_batch": True, "stick_to_shard": True}
    with Pipeline(config.batch_size, config.num_threads, config.device_id) as pipeline:
        jpegs, row = fn.readers.file(files=files, labels=list(range(len(files))), **shard)
        size = data.int32(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2])
        pixels = data.decode(jpegs, fn.cat(0 * size, size), bool(GPUS))
        pixels = fn.resize(pixels, size=[float(side) for side in config.image_size])
        pipeline.set_outputs(fn.crop_mirror_normalize(pixels, std=[255.0] * 3, output_layout="HWC"), row)
    for _ in range(math.ceil(math.ceil(len(images) / SIZE) / config.batch_size)):
        batch, rows = (output.as_cpu().as_array() for output in pipeline.run())
        boxes, scores, classes, _ = (x.numpy() for x in detect(model.predict_on_batch(batch)))
        for i, image in enumerate(images[row] for row in rows[:, 0]):
            boxes_px = boxes[i] * np.array([image["width"], image["height"]] * 2)
            boxes_px[:, 2:] -= boxes_px[:, :2]  # ltrb -> ltwh
            detections = zip(boxes_px.round(2).tolist(), scores[i].round(6).tolist(), classes[i], strict=True)
            results[image["id"]] = [  # a shard may repeat its last image
                {"image_id": image["id"], "category_id": category_ids[int(k)], "bbox": box, "score": score}
                for box, score, k in detections
                if min(box[2:]) > 0  # else a box outside the image, or padding
            ]
    parts = hvd.allgather_object(results) if SIZE > 1 else [results]
    results = [result for part in parts for of_image in part.values() for result in of_image]
    if RANK == 0:
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        metrics = dict(zip(METRICS, evaluation.stats.tolist(), strict=True))
        pathlib.Path(args.output_dir, "metrics.json").write_text(json.dumps(metrics, indent=2))
        pathlib.Path(args.output_dir, "detections.json").write_text(json.dumps(results))


def train(args: argparse.Namespace) -> None:
    if SIZE > 1:
        hvd.init()
    average = functools.partial(hvd.grouped_allreduce, op=hvd.Average) if SIZE > 1 else list
    document = json.loads(pathlib.Path(args.annotations).read_bytes())
    steps = max(len(document["images"]) // (args.batch_size * SIZE), 1)  # per epoch
    keras.utils.set_random_seed(args.seed)
    model = build_model(len(document["categories"]), args.image_size)
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):  # short runs must forget the first statistics
            layer.momentum = min(0.99, max(0.9, 1 - 20 / (args.epochs * steps)))
    optimizer = keras.optimizers.SGD(momentum=0.949)
    optimizer.build(model.trainable_variables)
    peak, total = args.learning_rate * args.batch_size * SIZE / 64, args.epochs * steps
    burn_in = max(min(1000, total // 10), 1)

    @tf.function
    def train_step(images, boxes, classes, num_boxes):
        with tf.GradientTape() as tape:
            parts = detection_loss(model(images, training=True), boxes, classes, num_boxes)
            kernels = [v for v in model.trainable_variables if v.name.endswith("kernel")]
            l2_loss = 5e-4 * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
            loss = tf.add_n([*parts, l2_loss])
        optimizer.apply(average(tape.gradient(loss, model.trainable_variables)), model.trainable_variables)
        return dict(zip(("loss", "box", "object", "class", "l2"), (loss, *parts, l2_loss), strict=True))

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, f"{args.output_dir}/checkpoints", max_to_keep=2)
    if RANK == 0 and manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
    if SIZE > 1:
        hvd.broadcast_variables([v.value for v in model.weights + optimizer.variables], 0)
    first_epoch, sides = int(optimizer.iterations) // steps, (args.image_size, args.image_size)
    options = {"image_size": sides, "seed": args.seed + first_epoch, "device_id": 0 if GPUS else None}
    config = data.Config(args.annotations, args.images, batch_size=args.batch_size, **options)
    batches = iter(data.make_dataset(config, RANK, SIZE))
    for epoch in range(first_epoch + 1, args.epochs + 1):
        start = time.time()
        for step in range(1, steps + 1):
            images, *targets = next(batches)
            number = (epoch - 1) * steps + step
            falls = (number >= round(0.8 * total)) + (number >= round(0.9 * total))
            optimizer.learning_rate = peak * min(number / burn_in, 1.0) ** 4 * 0.1**falls
            losses = train_step(images, *(targets if GPUS else targets[0].values()))
            if RANK == 0 and (step % 20 == 0 or step == steps):
                values = " ".join(f"{name} {float(value):.4f}" for name, value in losses.items())
                print(f"epoch {epoch}, {step}/{steps}, {time.time() - start:.0f} s: {values}", flush=True)
        if not math.isfinite(losses["loss"]):
            raise SystemExit("error: the loss is not finite; use a lower --learning_rate")
        # Each process has its own moving statistics of the batch norms. All evaluate and save their mean.
        model.set_weights(average([weight.value for weight in model.weights]))
        if RANK == 0:
            manager.save()
            model.save_weights(f"{args.output_dir}/last.weights.h5")
        evaluate(args, config, model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains YOLOv4.")
    parser.add_argument("--images", default="", help="directory; default: generated images")
    parser.add_argument("--annotations", default="", help="COCO json of --images")
    parser.add_argument("--eval_images", default="", help="directory; needed with --images")
    parser.add_argument("--eval_annotations", default="", help="COCO json with ids from 1, area and iscrowd")
    parser.add_argument("--output_dir", default="runs/train_yolov4", help="directory of the results")
    parser.add_argument("--image_size", type=int, default=608, choices=range(32, 2049, 32), metavar="32n")
    parser.add_argument("--batch_size", type=int, default=8, help="images per process")
    parser.add_argument("--epochs", type=int, default=271)
    parser.add_argument("--learning_rate", type=float, default=0.0013, help="for 64 images per step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    synthetic = {} if args.images else data.draw_synthetic(data.SCRATCH.name)
    vars(args).update(synthetic, **{f"eval_{name}": path for name, path in synthetic.items()})
    for name in ("images", "annotations", "eval_images", "eval_annotations"):
        if not os.path.exists(vars(args)[name]):
            raise SystemExit(f"error: --{name}={vars(args)[name]}: no such file or directory")
    train(args)
