"""An index of the faults of public examples that this app must not have, one test each.

The docstrings say what went wrong in NVIDIA/DALI docs/examples/use_cases/tensorflow/yolov4, or in the
efficientdet beside it where the same could happen here. The tests of the single files go deeper.
"""

import collections
import dataclasses
import glob
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from common import hparams
from common.datacheck.datasets import list_images, open_source, open_tfrecords
from common.datacheck.tfrecord import expand_pattern
from common.errors import UserError
from common.evaluation import coco_metrics
from common.labels import LabelMap
from common.training import weights
from common.training.optimizers import AveragedWeights
from yolov4.config import MODEL_NAMES, get_config
from yolov4.decoding import decode_boxes
from yolov4.loaders import make_loader
from yolov4.losses import detection_loss
from yolov4.model import build_model
from yolov4.optimization import make_optimizer, make_schedule
from yolov4.pipeline import YOLOv4Pipeline
from yolov4.postprocess import detect
from yolov4.targets import assign_targets
from yolov4.train import Args, train

INPUT = (96, 160)  # height, width: not square
YOLOV4 = dataclasses.replace(get_config("yolov4"), image_size=INPUT)
STILL = {"jitter": 0.0, "flip_prob": 0.0, "hue": 0.0, "saturation": 1.0, "exposure": 1.0, "mosaic_prob": 0.0}
LOADED = dataclasses.replace(get_config("yolov4-tiny"), image_size=INPUT, **STILL)
AUGMENTED = dataclasses.replace(get_config("yolov4-tiny"), image_size=INPUT)
RED, GREY = (230, 20, 30), (90, 110, 100)


def silent_heads(config, num_classes=2):
    """Raw outputs (1, h, w, 3, 5 + C) of boxes of the anchors' sizes, confidently background."""
    height, width = config.image_size
    heads = [np.zeros((1, height // s, width // s, 3, 5 + num_classes), np.float32) for s in config.strides]
    for head in heads:
        head[..., 4:] = -12
    return heads


def targets_of(boxes, classes, padding=2):
    """The loader's targets of one image."""
    return {
        "boxes": tf.constant([[*boxes, *[[-1.0] * 4] * padding]], tf.float32),
        "classes": tf.constant([[*classes, *[-1] * padding]], tf.int32),
        "num_boxes": tf.constant([len(boxes)], tf.int32),
    }


def normalized(left, top, right, bottom, image_size=INPUT):
    height, width = image_size
    return [left / width, top / height, right / width, bottom / height]


def gradients_of_loss(heads, targets, config):
    heads = [tf.constant(head) for head in heads]
    with tf.GradientTape() as tape:
        tape.watch(heads)
        losses = detection_loss(heads, targets, config)
    gradients = tape.gradient(losses["detection_loss"], heads)
    return losses, [np.asarray(gradient) for gradient in gradients]


# --- YOLOv4: assignment, losses, suppression ---


def test_a_box_trains_the_head_that_owns_its_anchor():
    """Every box was assigned on all three heads, however badly their anchors fit."""
    config = dataclasses.replace(YOLOV4, iou_thresh=1.0, image_size=(416, 608))
    for number, (width, height) in enumerate(config.anchor_sizes):
        box = normalized(
            304 - width / 2, 208 - height / 2, 304 + width / 2, 208 + height / 2, config.image_size
        )
        trained = [
            assign_targets(
                tf.constant([[box]]),
                tf.constant([[0]]),
                config,
                head,
                grid_size=(416 // stride, 608 // stride),
                num_classes=1,
            ).assigned
            for head, stride in enumerate(config.strides)
        ]
        expected = [[number == anchor for anchor in mask] for mask in config.masks]
        np.testing.assert_array_equal(np.concatenate(trained)[:, 0], expected)


@pytest.mark.parametrize("model_name", MODEL_NAMES)
def test_0_213_chooses_anchors_and_suppresses_nothing(model_name):
    """0.213, Darknet's threshold for further anchors, was used to suppress boxes: neighbours vanished."""
    config = dataclasses.replace(get_config(model_name), image_size=INPUT)
    anchor_width, _ = config.anchor_sizes[config.masks[-1][0]]
    heads = silent_heads(config)
    for column, logit in ((2, 3), (3, 2)):
        heads[-1][0, 1, column, 0, [4, 5]] = logit, 9
    wide = math.log(32 * 7 / 3 / anchor_width)  # 32 pixels apart: IoU 4 / 10
    heads[-1][0, 1, :, 0, 2] = wide
    assert detect(heads, config).count == [2]
    assert detect(heads, dataclasses.replace(config, nms_iou=0.213)).count == [1]


def test_objectness_and_classes_are_cross_entropy():
    """Squared error on sigmoids has hardly a gradient where the network is confidently wrong."""
    box = normalized(40, 20, 116, 75)  # 76 x 55: anchor 4, the second of head 1, in row 2, column 4
    heads = silent_heads(YOLOV4)
    _, gradients = gradients_of_loss(heads, targets_of([box], [1]), YOLOV4)
    objectness, first_class, second_class = gradients[1][0, 2, 4, 1, 4:]
    probability = 1 / (1 + math.exp(12))
    np.testing.assert_allclose([objectness, second_class], probability - 1, rtol=1e-5)
    np.testing.assert_allclose(first_class, probability, rtol=1e-3)


def test_box_loss_is_ciou():
    """GIoU stood for CIoU: inside the true box it cannot tell where the prediction lies."""
    config = dataclasses.replace(YOLOV4, iou_thresh=1.0)
    losses = []
    for share in (0.5, 0.75):  # of a cell of 16 pixels: the centre of the true box, and 4 pixels to the right
        heads = silent_heads(config)
        share = (share + 0.05) / 1.1
        heads[1][0, 2, 4, 1, :4] = [math.log(share / (1 - share)), 0, math.log(0.5), math.log(0.5)]
        targets = targets_of([normalized(72 - 38, 40 - 27.5, 72 + 38, 40 + 27.5)], [0])
        losses.append(
            float(detection_loss([tf.constant(head) for head in heads], targets, config)["box_loss"])
        )
    area = 76 * 55 / (96 * 160)
    weight = 0.07 * (2 - area if config.size_weighting else 1)
    distance = (4 / 160) ** 2 / ((76 / 160) ** 2 + (55 / 96) ** 2)
    np.testing.assert_allclose(losses, [weight * 0.75, weight * (0.75 + distance)], rtol=1e-4)


def test_boxes_without_area_leave_the_loss_finite():
    """A box of zero size gave an IoU of 0 / 0, and the loss was NaN from then on."""
    config = dataclasses.replace(YOLOV4, iou_thresh=0.213)
    good, flat, point = normalized(40, 20, 116, 75), [0.3, 0.3, 0.7, 0.3], [0.5, 0.5, 0.5, 0.5]
    losses, gradients = gradients_of_loss(
        silent_heads(config), targets_of([flat, good, point], [0] * 3), config
    )
    without, _ = gradients_of_loss(silent_heads(config), targets_of([good], [0]), config)
    for name, value in losses.items():
        np.testing.assert_allclose(value, without[name], rtol=1e-6)
        assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_images_without_boxes_and_padding_train_nothing_but_background():
    """Padding of -1 went through the box arithmetic as if it were a box."""
    losses, _ = gradients_of_loss(silent_heads(YOLOV4), targets_of([], []), YOLOV4)
    assert losses["box_loss"] == losses["class_loss"] == 0
    predictions = sum(head[..., 4].size for head in silent_heads(YOLOV4))
    np.testing.assert_allclose(losses["objectness_loss"], predictions * math.log1p(math.exp(-12)), rtol=1e-3)


def test_anchors_are_pixels_of_the_network_input_at_any_size():
    """Anchors were divided by 608 and cells counted by the height alone, whatever the network's input was."""
    for image_size in ((96, 160), (320, 256)):
        config = dataclasses.replace(YOLOV4, image_size=image_size)
        for head, raw in enumerate(silent_heads(config)):
            boxes = np.asarray(decode_boxes(tf.constant(raw), config, head))[0] * [
                *image_size[::-1],
                *image_size[::-1],
            ]
            sizes = boxes[..., 2:] - boxes[..., :2]
            np.testing.assert_allclose(
                sizes[1, 2], [config.anchor_sizes[i] for i in config.masks[head]], rtol=1e-5
            )
            stride = config.strides[head]
            centers = (boxes[1, 2, :, :2] + boxes[1, 2, :, 2:]) / 2
            np.testing.assert_allclose(centers, [[2.5 * stride, 1.5 * stride]] * 3, rtol=1e-4)


# --- YOLOv4: network and optimisation ---


@pytest.fixture(scope="module")
def tiny():
    keras.utils.set_random_seed(0)
    return build_model("yolov4-tiny", 3, image_size=(64, 96))


def test_moving_statistics_start_at_0_and_1(tiny):
    """The moving variance started at 0: what is evaluated early is divided by next to nothing."""
    variances = [weight for weight in tiny.weights if weight.name == "moving_variance"]
    means = [weight for weight in tiny.weights if weight.name == "moving_mean"]
    assert len(variances) == len(means) == 19
    assert all((np.asarray(variance) == 1).all() for variance in variances)
    assert all((np.asarray(mean) == 0).all() for mean in means)


def test_initial_kernels_follow_the_channels_that_they_read(tiny):
    """All layers were initialised as if they read three channels, and a hundred times too small."""
    for weight in tiny.weights:
        if weight.name == "kernel":
            limit = math.sqrt(2 / math.prod(weight.shape[:3]))  # rows, columns, input channels
            values = np.asarray(weight)
            assert 0.98 * limit < np.abs(values).max() <= limit
            assert 0.9 < values.std() / (limit / math.sqrt(3)) < 1.1


def test_momentum_is_that_of_the_recipe():
    """SGD without momentum."""
    for model_name, momentum in (("yolov4", 0.949), ("yolov4-tiny", 0.9)):
        config = get_config(model_name)
        optimizer = make_optimizer(config, make_schedule(config, 64, 100), precision="float32")
        assert isinstance(optimizer, keras.optimizers.SGD)
        assert optimizer.momentum == momentum


def test_learning_rate_falls_and_is_scaled_once():
    """After its warm-up the rate never fell; elsewhere it was scaled by the number of devices twice."""
    config = get_config("yolov4")
    schedule = make_schedule(config, 64, steps_per_epoch=1000)
    total = 1000 * config.epochs
    rates = [float(schedule(round(share * total))) for share in (0.5, 0.79, 0.81, 0.89, 0.91, 0.999)]
    np.testing.assert_allclose(rates, np.array([1, 1, 0.1, 0.1, 0.01, 0.01]) * 0.0013, rtol=1e-5)
    assert make_schedule(config, 512, 1000).peak == pytest.approx(8 * 0.0013)


def test_a_resumed_warm_up_goes_on(tmp_path):
    """Resuming loaded weights only: the warm-up started again, and the velocity was lost."""
    config = get_config("yolov4-tiny")

    def make():
        variable = tf.Variable([1.0, 2.0])
        optimizer = make_optimizer(config, make_schedule(config, 64, 10_000), precision="float32")
        optimizer.build([variable])
        return variable, optimizer, tf.train.Checkpoint(variable=variable, optimizer=optimizer)

    variable, optimizer, checkpoint = make()
    for _ in range(300):
        optimizer.apply([tf.constant([1.0, -1.0])], [variable])
    path = checkpoint.save(tmp_path / "checkpoint")
    resumed_variable, resumed, new_checkpoint = make()
    new_checkpoint.restore(path).assert_consumed()
    assert float(resumed.learning_rate) == float(optimizer.learning_rate) > 0
    assert float(resumed.learning_rate) < config.learning_rate
    for some_variable, some_optimizer in ((variable, optimizer), (resumed_variable, resumed)):
        some_optimizer.apply([tf.constant([0.5, 0.5])], [some_variable])
    np.testing.assert_array_equal(variable, resumed_variable)


def test_l2_momentum_averages_and_the_last_step_are_in_the_saved_weights(tmp_path):
    """Four faults: L2 was configured and never in the loss; there was no momentum; averaged weights were
    configured and never used; weights were written before each epoch, so the last epoch's were never saved.

    Two epochs of one update each, on nothing but L2, show all four in the kernels of last.weights.h5.
    """
    decay = 0.1  # learning rate times weight decay
    config = hparams.override(get_config("yolov4-tiny"), "width=0.125")
    model = build_model("yolov4-tiny", 2, config=config)
    metadata = {
        "app": "yolov4",
        "num_classes": 2,
        "label_map": LabelMap.numbered(2).to_json(),
        "config": dataclasses.asdict(config),
    }
    weights.save(model, tmp_path / "start.weights.h5", metadata)
    a = Args(
        model_name="yolov4-tiny",
        image_size="64x96",
        num_classes=2,
        pipeline_type="synthetic",
        hparams=f"width=0.125,iou_normalizer=0,obj_normalizer=0,cls_normalizer=0,weight_decay={decay},"
        "burn_in_steps=0,lr_step_factor=1,reference_batch=2",
        learning_rate=1.0,
        batch_size=2,
        epochs=2,
        steps_per_epoch=1,
        ema_decay=0.9,
        init_from=str(tmp_path / "start.weights.h5"),
        output_dir=str(tmp_path / "run"),
    )
    train(a)
    start = [np.asarray(w) for w in model.weights if w.name == "kernel"]
    saved = weights.load(model, tmp_path / "run" / weights.LAST)
    shrunk = [np.asarray(w) for w in model.weights if w.name == "kernel"]

    first = 1 - decay
    second = first - config.momentum * decay - decay * first
    average = 0.1 + 0.9 * first  # the share of the old average is 1 / 10, then 2 / 11 (ema.py)
    average = 2 / 11 * average + 9 / 11 * second
    for before, after in zip(start, shrunk, strict=True):
        np.testing.assert_allclose(after, average * before, rtol=2e-4, atol=1e-6)
    assert saved["epoch"] == 2


def test_averaged_weights_are_what_is_evaluated(tiny):
    """Averaged weights were configured and never used."""
    averaged = AveragedWeights(tiny, 0.5)
    kernel = tiny.trainable_weights[0]
    own = np.asarray(kernel)
    kernel.assign(own + 1)
    with averaged.swapped_in():
        np.testing.assert_array_equal(kernel, own)
    kernel.assign(own)


# --- the loader ---


@pytest.fixture(scope="module")
def reds(tmp_path_factory):
    """Eight images of two shapes, neither square nor the network's, with one red rectangle each."""
    directory = tmp_path_factory.mktemp("reds")
    random = np.random.default_rng(1)
    images, boxes = [], []
    for number in range(8):
        height, width = ((300, 460), (380, 210))[number % 2]
        w, h = width // 3, height // 3
        x, y = int(random.integers(20, width - w - 20)), int(random.integers(20, height - h - 20))
        image = np.full((height, width, 3), GREY, np.uint8)
        image[y : y + h, x : x + w] = RED
        add_image(directory, images, number + 1, image)
        boxes.append([x, y, w, h])
    return write_source(directory, images, boxes)


def add_image(directory, images, image_id, image):
    Image.fromarray(image).save(directory / f"{image_id}.png")
    height, width, _ = image.shape
    images.append({"id": image_id, "file_name": f"{image_id}.png", "height": height, "width": width})


def write_source(directory, images, boxes_ltwh_px):
    """One box in each image."""
    annotations = [
        {"id": image["id"], "image_id": image["id"], "category_id": 1, "bbox": box}
        for image, box in zip(images, boxes_ltwh_px, strict=True)
    ]
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "red"}]}
    (directory / "instances.json").write_text(json.dumps(document))
    return source_of(directory, directory)


def source_of(directory, images):
    return open_source(images=str(images), annotations=str(directory / "instances.json"))


def read(source, config, steps=None, **options):
    """Batches of the DALI pipeline: dicts of arrays, `steps` of them or one epoch."""
    options = {"batch_size": 4, "training": False, **options}
    loader = YOLOv4Pipeline(source=source, config=config, **options)
    batches = []
    for outputs in (loader.pipeline.run() for _ in range(steps or loader.steps_per_epoch)):
        arrays = (np.array(output.as_tensor()) for output in outputs)
        batches.append(dict(zip(loader.element_spec, arrays, strict=True)))
    return batches


def red_box(image):
    """ltrb of the red pixels."""
    rows, columns = np.nonzero((image[..., 0] > 0.5) & (image[..., 1] < 0.25))
    return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


@pytest.mark.parametrize("letterbox", [False, True], ids=["stretched", "letterbox"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_boxes_lie_on_their_objects_in_images_that_are_not_square(reds, training, letterbox):
    """Height and width were swapped in crops, in resizing, in scale factors: right on square images only."""
    config = dataclasses.replace(LOADED, letterbox=letterbox, jitter=0.3, flip_prob=0.5)
    found = 0
    for batch in read(reds, config, steps=4, training=training):
        assert batch["images"].shape == (4, *INPUT, 3)
        for image, boxes, count in zip(batch["images"], batch["boxes"], batch["num_boxes"], strict=True):
            if count:
                np.testing.assert_allclose(boxes[0] * [160, 96, 160, 96], red_box(image), atol=1.6)
                found += 1
    assert found >= 12


def test_evaluation_shows_whole_images_and_never_changes(reds):
    """Evaluation images went through the random crop of training."""
    config = dataclasses.replace(AUGMENTED, mosaic_prob=1.0, mixup_prob=1.0, multi_scale=1.5)
    first, second = (read(reds, config, seed=seed) for seed in (0, 1))
    truth = reds.annotations
    for batch, again in zip(first, second, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], again[name])
        np.testing.assert_array_equal(batch["letterbox"], [[0, 0, *INPUT]] * 4)
        for boxes, image_id, size in zip(
            batch["boxes"], batch["image_ids"].ravel(), batch["image_sizes"], strict=True
        ):
            left, top, width, height = truth.boxes_ltwh_px[image_id - 1]
            expected = normalized(left, top, left + width, top + height, size)
            np.testing.assert_allclose(boxes[0], expected, atol=1e-6)


def test_hue_reaches_36_degrees_and_saturation_changes(tmp_path):
    """Hue was turned by half of Darknet's range, and saturation not at all."""
    images = []
    color = np.array([130, 90, 50])  # far from black and white: nothing is cut off
    for number in range(8):
        add_image(tmp_path, images, number + 1, np.full((40, 60, 3), color, np.uint8))
    source = write_source(tmp_path, images, [[5, 5, 20, 20]] * 8)
    config = dataclasses.replace(AUGMENTED, jitter=0.0, mosaic_prob=0.0, image_size=(32, 32))
    for model_name in MODEL_NAMES:
        recipe = get_config(model_name)
        assert (recipe.hue, recipe.saturation, recipe.exposure) == (36, 1.5, 1.5)
    batches = read(source, config, steps=60, batch_size=8, training=True, num_threads=1)
    colors = np.concatenate([batch["images"][:, 16, 16] for batch in batches]) * 255  # (480, 3)

    # YIQ: the angle in the plane of I and Q turns with the hue, and their length grows with the saturation
    yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
    brightness, i, q = yiq @ colors.T / (yiq @ color)[0]
    start = (yiq @ color) / (yiq @ color)[0]
    turned = np.degrees(np.angle((i + 1j * q) / (start[1] + 1j * start[2])))
    assert -38 < turned.min() < -33
    assert 33 < turned.max() < 38
    saturation = np.hypot(i, q) / math.hypot(*start[1:]) / brightness
    for factor in (brightness, saturation):
        assert 0.63 < factor.min() < 0.7
        assert 1.45 < factor.max() < 1.55
        assert 0.4 < (factor > 1).mean() < 0.6


def test_settings_of_the_loader_and_the_loss_come_from_the_config(reds):
    """Sizes and anchors of one model were written into the pipeline: wrong for all others."""
    for config in (dataclasses.replace(LOADED, image_size=(64, 32), max_instances=3), LOADED):
        (batch, *_) = read(reds, config)
        assert batch["images"].shape[1:3] == config.image_size
        assert batch["boxes"].shape[1] == config.max_instances
    heads = silent_heads(LOADED)
    heads[0][0, 2, 4, 0, [4, 5]] = 9
    widths = []
    for factor in (1.0, 0.5):
        config = dataclasses.replace(LOADED, anchors=tuple(factor * side for side in LOADED.anchors))
        box = np.asarray(detect(heads, config).boxes)[0, 0]
        widths.append((box[2] - box[0]) * 160)
    np.testing.assert_allclose(widths, [23, 11.5], rtol=1e-4)  # the anchor 23,27


def expected_classes(drawn):
    """Image id -> sorted classes of what can be learned from the drawn images."""
    document = json.loads((drawn / "instances.json").read_text())
    widths = {image["id"]: image["width"] for image in document["images"]}
    classes = {image_id: [] for image_id in widths}
    for annotation in document["annotations"]:
        left, _, width, height = annotation["bbox"]
        if not annotation["iscrowd"] and width * height > 0 and left < widths[annotation["image_id"]]:
            classes[annotation["image_id"]].append([3, 17, 90].index(annotation["category_id"]))
    return {image_id: sorted(numbers) for image_id, numbers in classes.items()}


def test_records_and_json_give_the_same_classes_and_ids(drawn, drawn_records):
    """Classes were 1..90 from TFRecords and 1..80 from json; no image ids came out, so no COCO numbers."""
    for source in (source_of(drawn, drawn / "images"), open_tfrecords(f"{drawn_records}-*.tfrecord")):
        found = {}
        for batch in read(source, LOADED):
            for image_id, classes, count in zip(
                batch["image_ids"].ravel(), batch["classes"], batch["num_boxes"], strict=True
            ):
                found[int(image_id)] = sorted(classes[:count].tolist())
                assert (classes[count:] == -1).all()
        assert found == expected_classes(drawn)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_crowds_and_boxes_without_area_are_not_trained_on(drawn, training):
    """Crowd boxes were positives like any other; boxes of zero size came through."""
    expected = expected_classes(drawn)
    assert len(expected[10 + 3 * 4]) == 1  # of two annotations, one a crowd
    assert len(expected[10 + 3 * 6]) == 4  # of six, one without area, one outside
    counts = collections.Counter()
    for batch in read(source_of(drawn, drawn / "images"), LOADED, training=training):
        counts.update(batch["num_boxes"].ravel().tolist())
    assert counts == collections.Counter(map(len, expected.values()))


def test_padding_truncates_and_counts(drawn):
    """fn.pad never truncates: an image with more boxes than the padding has rows stopped the run."""
    config = dataclasses.replace(LOADED, max_instances=2)
    source = source_of(drawn, drawn / "images")

    def areas(batch):  # ascending, 0 in the padding
        return np.sort(np.prod(batch["boxes"][..., 2:] - batch["boxes"][..., :2], axis=-1))

    lost = 0
    for batch, whole in zip(read(source, config, count_lost=True), read(source, LOADED), strict=True):
        assert batch["boxes"].shape == (4, 2, 4)
        np.testing.assert_array_equal(areas(batch), areas(whole)[:, -2:])
        np.testing.assert_array_equal(batch["num_boxes"], np.minimum(whole["num_boxes"], 2))
        np.testing.assert_array_equal(batch["lost"][:, 1], whole["num_boxes"] - batch["num_boxes"])
        lost += batch["lost"][:, 1].sum()
    assert lost > 0


def test_threads_and_shards_are_not_the_device_number(reds):
    """One CPU thread per GPU; the device number was the shard: the second node read what the first did."""
    options = {"source": reds, "config": LOADED, "batch_size": 2, "training": False}
    assert YOLOv4Pipeline(**options, num_threads=3).pipeline.num_threads == 3
    assert Args(output_dir="").num_threads >= 2
    seen = [
        image_id
        for shard_id in range(3)  # all on the same device
        for batch in read(reds, LOADED, batch_size=1, shard_id=shard_id, num_shards=3)
        for image_id in set(batch["image_ids"].ravel().tolist())
    ]
    assert set(seen) == set(range(1, 9))
    assert len(seen) <= 9  # three shards of three: one image fills up


def test_files_are_sorted(tmp_path, monkeypatch):
    """Unsorted globs: each machine has its own order, and ranks train on overlapping shares."""
    original = glob.glob
    monkeypatch.setattr(glob, "glob", lambda *a, **k: sorted(original(*a, **k), reverse=True))
    for number in range(12):
        (tmp_path / f"{number:02d}.jpg").touch()
        (tmp_path / f"{number:02d}.tfrecord").touch()
    images = list_images(f"{tmp_path}/*.jpg")
    records = expand_pattern(f"{tmp_path}/*.tfrecord")
    for files, suffix in ((images, "jpg"), (records, "tfrecord")):
        assert list(map(str, files)) == [f"{tmp_path}/{number:02d}.{suffix}" for number in range(12)]


def test_seed_0_is_a_seed_and_ranks_augment_differently(tmp_path):
    """Seed 0 was taken for none; and the same seed on every rank made all ranks augment alike."""
    images = []
    picture = np.random.default_rng(0).integers(0, 255, (120, 90, 3), np.uint8)
    for image_id in (1, 2):
        add_image(tmp_path, images, image_id, picture)  # twins: each rank reads one of them
    source = write_source(tmp_path, images, [[5, 5, 20, 20]] * 2)
    options = {"steps": 2, "batch_size": 1, "training": True, "num_shards": 2}

    def pixels(seed, shard_id):
        return np.stack(
            [b["images"] for b in read(source, AUGMENTED, seed=seed, shard_id=shard_id, **options)]
        )

    np.testing.assert_array_equal(pixels(0, 0), pixels(0, 0))
    assert (pixels(0, 0) != pixels(1, 0)).any()
    assert (pixels(0, 0) != pixels(0, 1)).any()


# --- evaluation and settings ---


def test_a_second_detection_of_an_object_costs_precision():
    """A home-made mAP let one true box confirm any number of detections."""
    truth = {
        "images": [{"id": 1, "width": 100, "height": 100}],
        "annotations": [
            {"id": i, "image_id": 1, "category_id": 1, "bbox": box, "area": 400, "iscrowd": 0}
            for i, box in enumerate(([10, 10, 20, 20], [60, 60, 20, 20]), 1)
        ],
        "categories": [{"id": 1, "name": "red"}],
    }
    scored = zip(([10, 10, 20, 20], [10, 10, 20, 20], [60, 60, 20, 20]), (0.9, 0.8, 0.7), strict=True)
    detections = [{"image_id": 1, "category_id": 1, "bbox": box, "score": score} for box, score in scored]
    # precision 1 up to recall 0.5 (51 of COCO's 101 points), then 2 / 3
    assert coco_metrics.score(truth, detections).metrics["AP"] == pytest.approx((51 + 50 * 2 / 3) / 101)


def test_misspelt_settings_are_errors(reds):
    """Unknown keywords vanished in **kwargs: a misspelt one moved evaluation to the CPU without a word."""
    options = {"source": reds, "config": LOADED, "batch_size": 2, "training": False}
    with pytest.raises(TypeError, match="use_gpu"):
        YOLOv4Pipeline(**options, use_gpu=True)
    with pytest.raises(TypeError, match="evice"):
        make_loader("auto", **options, evice_id=0)
    with pytest.raises(TypeError, match="pipline_type"):
        Args(pipline_type="dali_gpu")
    with pytest.raises(UserError, match="momentum"):
        hparams.override(YOLOV4, "momentun=0.9")
    loaders = [make_loader("auto", **(options | {"training": training})) for training in (False, True)]
    assert loaders[0].pipeline_type == loaders[1].pipeline_type
