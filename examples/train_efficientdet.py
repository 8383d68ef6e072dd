r"""Trains EfficientDet-D0 (arXiv 1911.09070) with DALI, Keras and pycocotools: a whole training in one file.

    python train_efficientdet.py --image_size=128 --batch_size=4 --epochs=2  # generated images, on a laptop
    python train_efficientdet.py --images=train2017 --annotations=instances_train2017.json \
        --eval_images=val2017 --eval_annotations=instances_val2017.json --output_dir=runs/d0
    horovodrun -np 8 python train_efficientdet.py ...  # one process per GPU

Copy this file and efficientdet_pipeline.py, which makes the batches. They need DALI, its plugin for
TensorFlow, TensorFlow, Keras 3, pycocotools, Pillow, and Horovod for several processes. Run
tools/check_data.py first. The same command resumes after the last whole epoch, with batches other than those
of an unbroken run. Losses and detections equal those of efficientdet/train.py and eval.py. Numbers without
another source are those of google/automl: efficientdet/hparams_config.py, tf2/train_lib.py and
tf2/efficientdet_keras.py. Never run on a GPU.
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
import efficientdet_pipeline as data
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from nvidia.dali import Pipeline, fn
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

GPUS = tf.config.list_physical_devices("GPU")

# --- The network: EfficientNet-B0, BiFPN and two heads ---
# (repeats, kernel, strides, expansion, filters) of each stage: arXiv 1905.11946 table 1
STAGES = [(1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112)]
STAGES += [(4, 5, 2, 6, 192), (1, 3, 1, 6, 320)]
CHANNELS, CELLS, HEAD_REPEATS, ANCHORS = 64, 3, 3, 9  # arXiv 1911.09070 table 1 and, per cell, section 5.1
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
fan_out = functools.partial(keras.initializers.VarianceScaling, 2.0, "fan_out", "untruncated_normal")


def norm(x, swish: bool = False):
    x = layers.BatchNormalization(epsilon=1e-3)(x)
    return layers.Activation("swish")(x) if swish else x


def conv(x, filters: int, kernel: int = 1, strides: int = 1, use_bias: bool = False):
    return layers.Conv2D(filters, kernel, strides, "same", use_bias=use_bias, kernel_initializer=fan_out())(x)


def mbconv(x, kernel: int, strides: int, expansion: int, filters: int):
    """Inverted bottleneck (arXiv 1801.04381) with squeeze and excitation (arXiv 1709.01507)."""
    inputs, channels = x, x.shape[-1]
    if expansion > 1:
        x = norm(conv(x, channels * expansion), swish=True)
    options = {"use_bias": False, "depthwise_initializer": fan_out()}
    x = norm(layers.DepthwiseConv2D(kernel, strides, "same", **options)(x), swish=True)
    gates = conv(layers.GlobalAveragePooling2D(keepdims=True)(x), channels // 4, use_bias=True)
    gates = conv(layers.Activation("swish")(gates), x.shape[-1], use_bias=True)
    x = norm(conv(layers.Multiply()([x, layers.Activation("sigmoid")(gates)]), filters))
    return layers.Add()([x, inputs]) if strides == 1 and filters == channels else x


class Fusion(layers.Layer):
    """Fast normalised fusion (arXiv 1911.09070 section 3.3): adds N tensors with learned shares."""

    def build(self, shapes):
        self.shares = self.add_weight(name="shares", shape=(len(shapes),), initializer="ones")

    def call(self, inputs):
        shares = tf.nn.relu(self.shares)
        shares = tf.unstack(shares / (tf.reduce_sum(shares) + 1e-4))
        return sum(x * share for x, share in zip(inputs, shares, strict=True))


def resample(x, side: int):
    """Gives `x` CHANNELS channels. Then halves or doubles its height and width, unless they are `side`."""
    if x.shape[-1] != CHANNELS:
        x = norm(layers.Conv2D(CHANNELS, 1)(x))
    if x.shape[1] > side:
        x = layers.MaxPooling2D(3, 2, "same")(x)
    return layers.UpSampling2D(2)(x) if x.shape[1] < side else x


def node(*inputs):
    """A node of BiFPN: fuses its inputs at the size of the first input, and convolves the sum."""
    x = Fusion()([resample(x, inputs[0].shape[1]) for x in inputs])
    return norm(layers.SeparableConv2D(CHANNELS, 3, padding="same")(layers.Activation("swish")(x)))


def head(features: dict, filters: int, bias: float) -> list:
    """Predicts `filters` numbers per cell. All levels share the convolutions, but not the batch norms."""
    options = dict.fromkeys(("depthwise_initializer", "pointwise_initializer"), "variance_scaling")
    convs = [layers.SeparableConv2D(CHANNELS, 3, padding="same", **options) for _ in range(HEAD_REPEATS)]
    options["bias_initializer"] = keras.initializers.Constant(bias)
    predict = layers.SeparableConv2D(filters, 3, padding="same", **options)
    outputs = []
    for x in features.values():
        for convolution in convs:
            x = norm(convolution(x), swish=True)
        outputs.append(predict(x))
    return outputs


def build_model(num_classes: int, image_size: int) -> keras.Model:
    """Returns a model: normalised images -> class logits (B, h, w, 9 C) and box deltas (B, h, w, 36)."""
    images = keras.Input((image_size, image_size, 3))
    x, stages = norm(conv(images, 32, 3, 2), swish=True), []
    for repeats, kernel, strides, expansion, filters in STAGES:
        for repeat in range(repeats):
            x = mbconv(x, kernel, 1 if repeat else strides, expansion, filters)
        stages.append(x)
    features = {3: stages[2], 4: stages[4], 5: stages[6]}  # level l has cells of 2**l pixels
    for level in (6, 7):
        features[level] = resample(features[level - 1], image_size // 2**level)
    for _ in range(CELLS):  # arXiv 1911.09070 figure 3: top-down, then bottom-up
        down = {7: features[7]}
        for level in (6, 5, 4, 3):
            down[level] = node(features[level], down[level + 1])
        up = {3: down[3]}
        for level in (4, 5, 6):
            up[level] = node(features[level], down[level], up[level - 1])
        features = up | {7: node(features[7], up[6])}
    prior = math.log(0.01 / 0.99)  # each class starts with probability 0.01: arXiv 1708.02002 section 4.1
    return keras.Model(images, [head(features, ANCHORS * num_classes, prior), head(features, ANCHORS * 4, 0)])


def detection_loss(outputs: tuple, targets: tuple, num_positives):
    """Returns the focal loss (arXiv 1708.02002) of all anchors and the Huber loss of positive anchors."""
    class_loss = box_loss = 0.0
    for logits, deltas, classes, boxes in zip(*outputs, *targets, strict=True):  # one level at a time
        classes = tf.reshape(classes, [-1])  # (B h w 9,), -1: background
        logits = tf.reshape(logits, [classes.shape[0], -1])  # (B h w 9, C)
        is_class = tf.one_hot(classes, logits.shape[1], True, False, dtype=tf.bool)
        z = tf.where(is_class, -logits, logits)  # 1 - sigmoid(z) is the probability of the truth
        cross_entropy = tf.nn.softplus(z)
        focal = tf.exp(1.5 * (z - cross_entropy)) * cross_entropy  # sigmoid(z)**gamma, gamma = 1.5
        class_loss += tf.reduce_sum(tf.where(is_class, 0.25, 0.75) * focal)  # alpha = 0.25
        error = tf.reshape(tf.abs(deltas - boxes), [-1, 4])
        quadratic = tf.minimum(error, 0.1)  # delta = 0.1
        huber = tf.reduce_sum(quadratic * (error - 0.5 * quadratic), axis=1)
        box_loss += tf.reduce_sum(tf.where(classes >= 0, huber, 0.0))
    return class_loss / num_positives, box_loss / (4.0 * num_positives)


def detect(class_logits: list, box_deltas: list, anchors: np.ndarray):
    """Yields boxes (N, 4) in 0..1 of the network input, scores and classes (N,) of each image."""
    batch, num_classes = class_logits[0].shape[0], class_logits[0].shape[-1] // ANCHORS
    logits = tf.concat([tf.reshape(x, [batch, -1]) for x in class_logits], axis=1)  # (B, A C)
    deltas = tf.concat([tf.reshape(x, [batch, -1, 4]) for x in box_deltas], axis=1)  # (B, A, 4)
    logits, places = tf.math.top_k(logits, min(1000, logits.shape[1]))
    rows, classes = places // num_classes, places % num_classes
    deltas, anchors = tf.gather(deltas, rows, batch_dims=1), tf.gather(anchors, rows)  # (B, 1000, 4)
    sides = anchors[..., 2:] - anchors[..., :2]  # width, height
    centers = deltas[..., 1::-1] * sides + (anchors[..., :2] + anchors[..., 2:]) / 2  # deltas: dy, dx, dh, dw
    half = tf.exp(deltas[..., :1:-1]) * sides / 2
    boxes = tf.clip_by_value(tf.concat([centers - half, centers + half], axis=-1), -8.0, 8.0)
    # Each class gets its own square of a grid, so that boxes of different classes do not overlap.
    columns = math.ceil(math.sqrt(num_classes))
    squares = tf.cast(tf.stack([classes % columns, classes // columns] * 2, axis=-1), tf.float32)
    # Soft-NMS (arXiv 1704.04503): 100 detections with scores above 0.001. TensorFlow doubles sigma, here 0.5.
    for i, scores in enumerate(tf.sigmoid(logits)):
        moved = boxes[i] + squares[i] * (tf.reduce_max(boxes[i]) - tf.reduce_min(boxes[i]))
        picks, scores = tf.image.non_max_suppression_with_scores(moved, scores, 100, 1.0, 0.001, 0.5 / 2)
        yield tf.gather(boxes[i], picks).numpy(), scores.numpy(), tf.gather(classes[i], picks).numpy()


def evaluate(args: argparse.Namespace, config: data.Config, model: keras.Model) -> None:
    """Detects in the evaluation images, and writes metrics.json and detections.json."""
    truth, results = COCO(args.eval_annotations), {}
    images, category_ids = truth.dataset["images"], sorted(truth.getCatIds())
    anchors = np.concatenate([level.reshape(-1, 4) for level in data.make_anchors(config)])
    files = [os.path.join(args.eval_images, image["file_name"]) for image in images]
    shard = {"shard_id": RANK, "num_shards": SIZE, "pad_last_batch": True, "stick_to_shard": True}
    place = {"crop": config.image_size, "crop_pos_x": 0, "crop_pos_y": 0, "out_of_bounds_policy": "pad"}
    place |= {"mean": data.MEAN, "std": data.STDDEV, "output_layout": "HWC"}
    with Pipeline(config.batch_size, config.num_threads, config.device_id) as pipeline:
        jpegs, row = fn.readers.file(files=files, labels=list(range(len(files))), **shard)
        size = data.int32(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2])
        longer = fn.reductions.max(size)
        new_size = data.math.max((2 * config.image_size[0] * size + longer) // (2 * longer), 1)  # half up
        pixels = data.decode(jpegs, fn.cat(0 * size, size), bool(GPUS))
        pixels = fn.resize(pixels, size=new_size * 1.0)
        pipeline.set_outputs(fn.crop_mirror_normalize(pixels, **place), row, new_size)
    for _ in range(math.ceil(math.ceil(len(images) / SIZE) / config.batch_size)):
        batch, rows, new_sizes = (output.as_cpu().as_array() for output in pipeline.run())
        for i, (boxes, scores, classes) in enumerate(detect(*model.predict_on_batch(batch), anchors=anchors)):
            image = images[rows[i, 0]]
            boxes *= config.image_size[0] / np.tile(new_sizes[i, ::-1], 2)  # to 0..1 of the image
            boxes_px = np.clip(boxes, 0, 1) * np.array([image["width"], image["height"]] * 2)
            boxes_px[:, 2:] -= boxes_px[:, :2]  # ltrb -> ltwh
            detections = zip(boxes_px.round(2).tolist(), scores.round(6).tolist(), classes, strict=True)
            results[image["id"]] = [  # a shard may repeat its last image
                {"image_id": image["id"], "category_id": category_ids[k], "bbox": box, "score": score}
                for box, score, k in detections
                if min(box[2:]) > 0
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
    model, averaged = (build_model(len(document["categories"]), args.image_size) for _ in range(2))
    averaged.set_weights(model.get_weights())
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):  # short runs must forget the first statistics
            layer.momentum = min(0.99, max(0.9, 1 - 20 / (args.epochs * steps)))
    peak, warmup = args.learning_rate * args.batch_size * SIZE / 64, round(args.warmup_epochs * steps)
    options = {"decay_steps": max(args.epochs * steps - warmup, 1), "warmup_steps": warmup}
    schedule = keras.optimizers.schedules.CosineDecay(0.1 * peak, warmup_target=peak, **options)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=10.0)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(images, num_positives, *targets):
        (count,) = average([tf.reduce_sum(num_positives) + 1 / SIZE])  # all processes together add 1
        with tf.GradientTape() as tape:
            class_loss, box_loss = detection_loss(model(images, training=True), targets, count)
            kernels = [v for v in model.trainable_variables if v.name.endswith("kernel")]
            l2_loss = 4e-5 * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
            loss = class_loss + 50.0 * box_loss + l2_loss
        optimizer.apply(average(tape.gradient(loss, model.trainable_variables)), model.trainable_variables)
        updates = tf.cast(optimizer.iterations, tf.float32)
        decay = tf.minimum(0.9998, updates / (updates + 9.0))  # less at first, to forget the first weights
        for mean, weight in zip(averaged.weights, model.weights, strict=True):
            mean.assign_sub((1.0 - decay) * (mean - weight))
        return {"loss": loss, "class_loss": class_loss, "box_loss": box_loss, "l2_loss": l2_loss}

    checkpoint = tf.train.Checkpoint(model=model, averaged=averaged, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, f"{args.output_dir}/checkpoints", max_to_keep=2)
    if RANK == 0 and manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
    if SIZE > 1:
        hvd.broadcast_variables([v.value for v in model.weights + averaged.weights + optimizer.variables], 0)
    first_epoch, sides = int(optimizer.iterations) // steps, (args.image_size, args.image_size)
    options = {"image_size": sides, "seed": args.seed + first_epoch, "device_id": 0 if GPUS else None}
    config = data.Config(args.annotations, args.images, batch_size=args.batch_size, **options)
    batches = iter(data.make_dataset(config, RANK, SIZE))
    for epoch in range(first_epoch + 1, args.epochs + 1):
        start = time.time()
        for step in range(1, steps + 1):
            images, *targets = next(batches)
            num_positives, _, _, *targets = targets if GPUS else targets[0].values()
            losses = train_step(images, num_positives, targets[0::2], targets[1::2])
            if RANK == 0 and (step % 20 == 0 or step == steps):
                values = " ".join(f"{name} {float(value):.4f}" for name, value in losses.items())
                print(f"epoch {epoch}, {step}/{steps}, {time.time() - start:.0f} s: {values}", flush=True)
        if not math.isfinite(losses["loss"]):
            raise SystemExit("error: the loss is not finite; use a lower --learning_rate")
        # Each process has its own moving statistics of the batch norms. All evaluate and save their mean.
        averaged.set_weights(average([mean.value for mean in averaged.weights]))
        if RANK == 0:
            manager.save()
            averaged.save_weights(f"{args.output_dir}/averaged.weights.h5")
        evaluate(args, config, averaged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains EfficientDet-D0.")
    parser.add_argument("--images", default="", help="directory; default: generated images")
    parser.add_argument("--annotations", default="", help="COCO json of --images")
    parser.add_argument("--eval_images", default="", help="directory; needed with --images")
    parser.add_argument("--eval_annotations", default="", help="COCO json with ids from 1, area and iscrowd")
    parser.add_argument("--output_dir", default="runs/train_efficientdet", help="directory of the results")
    parser.add_argument("--image_size", type=int, default=512, choices=range(128, 2049, 128), metavar="128n")
    parser.add_argument("--batch_size", type=int, default=8, help="images per process")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--learning_rate", type=float, default=0.08, help="for 64 images per step")
    parser.add_argument("--warmup_epochs", type=float, default=1.0, help="the rate rises from a tenth")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    synthetic = {} if args.images else data.draw_synthetic(data.SCRATCH.name)
    vars(args).update(synthetic, **{f"eval_{name}": path for name, path in synthetic.items()})
    for name in ("images", "annotations", "eval_images", "eval_annotations"):
        if not os.path.exists(vars(args)[name]):
            raise SystemExit(f"error: --{name}={vars(args)[name]}: no such file or directory")
    train(args)
