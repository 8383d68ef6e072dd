"""Tests train_efficientdet.py: losses, weights, detections and AP equal those of the app."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import train_efficientdet as example

import efficientdet.eval
from efficientdet import postprocess
from efficientdet.config import get_config
from efficientdet.losses import detection_loss
from tests.examples import one_file

SIDE = 128
CONFIG = dataclasses.replace(get_config("efficientdet-d0"), image_size=(SIDE, SIDE))
NUM_CLASSES = len(one_file.CATEGORY_IDS)


def random_outputs(random: np.random.Generator, batch: int = 2) -> tuple[list, list]:
    sizes = CONFIG.anchors.feature_sizes
    logits = [random.normal(-4, 2, (batch, h, w, 9 * NUM_CLASSES)).astype("f") for h, w in sizes]
    return logits, [random.normal(0, 0.5, (batch, h, w, 36)).astype("f") for h, w in sizes]


def test_training_example_refuses_a_missing_path_in_one_line(tmp_path):
    one_file.assert_refuses_missing_paths("efficientdet", tmp_path)


def test_training_example_has_at_most_300_lines_and_imports_only_packages_and_its_pipeline():
    path = pathlib.Path(example.__file__)
    assert len(path.read_text().splitlines()) <= 300
    expected = {"efficientdet_pipeline", "horovod", "keras", "numpy", "nvidia", "pycocotools", "tensorflow"}
    assert one_file.imports_of(path) == expected


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_training_example_has_the_losses_of_the_efficientdet_app_for_random_outputs_and_targets(share):
    random = np.random.default_rng(1)
    outputs, targets = random_outputs(random), {}
    for level, (h, w) in zip(CONFIG.anchors.levels, CONFIG.anchors.feature_sizes, strict=True):
        is_positive = random.random((2, h, w, 9)) < share
        classes = np.where(is_positive, random.integers(0, NUM_CLASSES, (2, h, w, 9)), -1)
        targets[f"class_targets_{level}"] = tf.constant(classes, tf.int32)
        targets[f"box_targets_{level}"] = tf.constant(random.normal(size=(2, h, w, 36)), tf.float32)
    expected = detection_loss(*outputs, targets, CONFIG, tf.constant(7.0))
    lists = (
        [targets[f"{kind}_targets_{level}"] for level in CONFIG.anchors.levels] for kind in ("class", "box")
    )
    class_loss, box_loss = example.detection_loss(outputs, tuple(lists), 7.0)
    np.testing.assert_allclose(class_loss, expected["class_loss"], rtol=1e-6)
    np.testing.assert_allclose(box_loss, expected["box_loss"], rtol=1e-6)


def test_training_example_has_the_detections_of_the_app_for_random_network_outputs():
    outputs = random_outputs(np.random.default_rng(2))
    expected = postprocess.detect(outputs, CONFIG)
    for i, detections in enumerate(example.detect(*outputs, CONFIG.anchors.boxes_normalized)):
        assert len(detections[0]) == expected.count[i] == 100
        rows = sorted_rows(*detections)
        np.testing.assert_allclose(rows, sorted_rows(*(x[i] for x in expected[:3])), atol=1e-5)


def sorted_rows(boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Soft-NMS may change the order of detections whose scores differ by less than a rounding error."""
    rows = np.column_stack([np.clip(boxes, 0, 1), scores, classes])
    return rows[np.lexsort(rows[:, :4].round(4).T)]


def test_training_example_evaluates_to_the_ap_and_detections_of_eval_py(coco128, tmp_path):
    network = one_file.PixelNetwork(lambda random: random_outputs(random, batch=1))
    arguments = example, CONFIG, network, coco128, tmp_path
    expected, evaluation = one_file.evaluations(efficientdet.eval, *arguments)
    one_file.assert_same_evaluation(evaluation, expected)


@pytest.mark.slow
def test_training_example_has_the_losses_and_weights_of_train_py_for_20_steps(coco128, tmp_path):
    words = ["--model_name=efficientdet-d0", f"--image_size={SIDE}", "--hparams=warmup_epochs=0.25"]
    expected, first, last, averages = one_file.losses_of_app(
        "efficientdet", coco128, tmp_path / "app", *words
    )
    losses, (model, averaged) = one_file.losses_of_example(
        example,
        first,
        images=f"{coco128}/images",
        annotations=f"{coco128}/instances.json",
        image_size=SIDE,
        learning_rate=0.08,
        warmup_epochs=0.25,
        output_dir=str(tmp_path / "example"),
    )
    names = {name: name for name in ("loss", "class_loss", "box_loss", "l2_loss")}
    one_file.assert_same_losses(losses, expected, names)
    one_file.assert_same_weights(model.get_weights(), last, first)
    one_file.assert_same_weights(averaged.get_weights(), averages, first)
