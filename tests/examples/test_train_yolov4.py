"""Tests train_yolov4.py: losses, weights, detections and AP equal those of the app."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import train_yolov4 as example

import yolov4.eval
from tests.examples import one_file
from yolov4 import postprocess
from yolov4.config import get_config
from yolov4.losses import detection_loss

SIDE = 128
CONFIG = dataclasses.replace(get_config("yolov4"), image_size=(SIDE, SIDE))
NUM_CLASSES = len(one_file.CATEGORY_IDS)


def random_outputs(random: np.random.Generator, spread: float, batch: int = 2) -> list[np.ndarray]:
    shapes = [(batch, SIDE // stride, SIDE // stride, 3, 5 + NUM_CLASSES) for stride in CONFIG.strides]
    return [random.normal(0, spread, shape).astype(np.float32) for shape in shapes]


def random_targets(random: np.random.Generator, counts: tuple[int, int]) -> dict[str, tf.Tensor]:
    boxes, classes = np.full((2, 200, 4), -1.0), np.full((2, 200), -1)
    for image, count in enumerate(counts):
        centers, half = random.random((count, 2)), 0.01 + 0.4 * random.random((count, 2)) ** 3
        boxes[image, :count] = np.clip(np.concatenate([centers - half, centers + half], axis=1), 0, 1)
        classes[image, :count] = random.integers(0, NUM_CLASSES, count)
    numbers = tf.constant(classes, tf.int32), tf.constant(counts, tf.int32)
    return dict(
        zip(("boxes", "classes", "num_boxes"), (tf.constant(boxes, tf.float32), *numbers), strict=True)
    )


def test_training_example_refuses_a_missing_path_in_one_line(tmp_path):
    one_file.assert_refuses_missing_paths("yolov4", tmp_path)


def test_training_example_has_at_most_300_lines_and_imports_only_packages_and_its_pipeline():
    path = pathlib.Path(example.__file__)
    assert len(path.read_text().splitlines()) <= 300
    expected = {"horovod", "keras", "numpy", "nvidia", "pycocotools", "tensorflow", "yolov4_pipeline"}
    assert one_file.imports_of(path) == expected


@pytest.mark.parametrize("spread", [0.5, 3.0], ids=["small-outputs", "large-outputs"])
@pytest.mark.parametrize(
    "counts", [(0, 0), (1, 30), (200, 7)], ids=lambda counts: f"{counts[0]}-{counts[1]}-boxes"
)
def test_training_example_has_the_losses_and_gradients_of_the_yolov4_app_for_random_outputs(counts, spread):
    random = np.random.default_rng(1)
    outputs = list(map(tf.constant, random_outputs(random, spread)))
    targets = random_targets(random, counts)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(outputs)
        losses = example.detection_loss(outputs, **targets)
        parts = detection_loss(outputs, targets, CONFIG)
        expected = [parts[name] for name in ("box_loss", "objectness_loss", "class_loss")]
        total, expected_total = tf.add_n(losses), parts["detection_loss"]
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for gradient, exact in zip(
        tape.gradient(total, outputs), tape.gradient(expected_total, outputs), strict=True
    ):
        np.testing.assert_allclose(gradient, exact, atol=2e-5)


def test_training_example_has_the_detections_of_the_app_for_random_network_outputs():
    outputs = list(map(tf.constant, random_outputs(np.random.default_rng(2), 2.0)))
    boxes, scores, classes, count = postprocess.detect(outputs, CONFIG)
    detections = example.detect(outputs)
    np.testing.assert_allclose(detections[0], boxes, atol=1e-6)
    np.testing.assert_allclose(detections[1], scores, atol=1e-6)
    for i in range(2):
        assert count[i] == detections[3][i] > 50
        np.testing.assert_array_equal(detections[2][i, : count[i]], classes[i, : count[i]])


def test_training_example_evaluates_to_the_ap_and_detections_of_eval_py(coco128, tmp_path):
    network = one_file.PixelNetwork(lambda random: random_outputs(random, 2.0, batch=1))
    expected, evaluation = one_file.evaluations(yolov4.eval, example, CONFIG, network, coco128, tmp_path)
    one_file.assert_same_evaluation(evaluation, expected)


def test_network_of_the_training_example_has_as_many_numbers_as_the_published_weights_file():
    assert example.build_model(80, 64).count_params() == 64_429_405


@pytest.mark.slow
def test_training_example_has_the_losses_and_weights_of_train_py_for_20_steps(coco128, tmp_path, monkeypatch):
    """Both networks have half the channels, because the test process must not exceed 3 GB."""
    conv = example.conv
    monkeypatch.setattr(
        example, "conv", lambda x, filters, *more, **options: conv(x, filters // 2, *more, **options)
    )
    words = ["--model_name=yolov4", "--image_size=64", "--hparams=multi_scale=1,width=0.5"]
    expected, first, last, _ = one_file.losses_of_app("yolov4", coco128, tmp_path / "app", *words)
    losses, (model,) = one_file.losses_of_example(
        example,
        first,
        images=f"{coco128}/images",
        annotations=f"{coco128}/instances.json",
        image_size=64,
        learning_rate=0.0013,
        output_dir=str(tmp_path / "example"),
    )
    names = {"loss": "loss", "box": "box_loss", "object": "objectness_loss", "class": "class_loss"}
    one_file.assert_same_losses(losses, expected, names | {"l2": "l2_loss"})
    one_file.assert_same_weights(model.get_weights(), last, first)
