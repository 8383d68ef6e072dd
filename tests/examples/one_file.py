"""Compares an example with a whole training in one file to the app's train.py and eval.py."""

import argparse
import ast
import collections
import contextlib
import gc
import json
import pathlib
import subprocess
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from common.args import EvalArgs
from common.data.open import open_coco
from common.evaluation.detectors import Detector
from tests.conftest import ROOT
from tests.small_apps import parsed

STEPS = 20
CATEGORY_IDS = (3, 17, 44, 62, 90)  # few, so that random detections have an AP above 0
BATCH_SIZE = 6  # coco128 has 21 such batches, so the schedules end within the compared steps


class StoppedError(Exception):
    """Raised after STEPS steps."""


def imports_of(path: pathlib.Path) -> set[str]:
    """Returns the packages outside the standard library that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def losses_of_app(app: str, data: pathlib.Path, output_dir: pathlib.Path, *words: str) -> tuple:
    """Runs STEPS steps of the app's train.py.

    Returns:
        A dict of losses for each step; the first weights; the last weights; the averages of the weights.
    """
    flags = [f"--train_images={data}/images", f"--train_annotations={data}/instances.json"]
    flags += [f"--output_dir={output_dir}", f"--batch_size={BATCH_SIZE}", "--epochs=1", "--num_threads=1"]
    module, a = parsed(app, *flags, *words, "--pipeline_type=dali_cpu")
    make_model, make_train_step = module.make_model, module.make_train_step
    losses, weights, parts = [], [], {}

    def make_tame_model(*arguments):
        model = make_model(*arguments)
        tame(model)
        weights.extend(model.get_weights())
        return model

    def make_recorded_step(ranks, model, config, optimizer, ema, **options):
        step = make_train_step(ranks, model, config, optimizer, ema, **options)
        parts.update(model=model, ema=ema)

        def train_step(*batch):
            result = step(*batch)
            losses.append({name: float(value) for name, value in result.values.items()})
            if len(losses) == STEPS:
                raise StoppedError
            return result

        return train_step

    with (
        mock.patch.object(module, "make_model", make_tame_model),
        mock.patch.object(module, "make_train_step", make_recorded_step),
        contextlib.suppress(StoppedError),
    ):
        module.train(a)
    averages = parts["ema"].averages_of([weight.value for weight in parts["model"].weights])
    return losses, weights, parts["model"].get_weights(), [x.numpy() for x in averages]


def assert_refuses_missing_paths(app: str, tmp_path: pathlib.Path) -> None:
    """Runs the example with a missing json, as a user does."""
    flags = [f"--{name}={tmp_path}" for name in ("images", "eval_images", "eval_annotations")]
    command = [sys.executable, f"examples/train_{app}.py", f"--annotations={tmp_path}/a.json", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"error: --annotations={tmp_path}/a.json: no such file or directory\n" in done.stderr
    assert "Traceback" not in done.stderr


def tame(model: keras.Model) -> None:
    """Shifts the activations so that they are almost linear.

    In a deep network with random weights and batch norms, each layer makes a rounding error larger. Here, one
    layer's error is not enlarged, so two implementations can be compared over many steps.
    """
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.beta.assign_add(3.0 * tf.ones_like(layer.beta))


def losses_of_example(example: types.ModuleType, weights: list[np.ndarray], **arguments: object) -> tuple:
    """Runs STEPS steps of an example with the weights that the app began with.

    Returns:
        A dict of losses for each step, and the models.
    """
    gc.collect()  # frees the app's model and optimizer
    losses, models, build_model, function = [], [], example.build_model, tf.function

    def build_with_weights(*options):
        models.append(build_model(*options))
        models[-1].set_weights(weights)
        return models[-1]

    def recorded_function(python_function=None, **options):
        compiled = function(python_function, **options)
        if getattr(python_function, "__name__", "") != "train_step":
            return compiled

        def train_step(*batch):
            result = compiled(*batch)
            losses.append({name: float(value) for name, value in result.items()})
            if len(losses) == STEPS:
                raise StoppedError
            return result

        return train_step

    with (
        mock.patch.object(example, "build_model", build_with_weights),
        mock.patch.object(tf, "function", recorded_function),
        contextlib.suppress(StoppedError),
    ):
        example.train(argparse.Namespace(batch_size=BATCH_SIZE, epochs=1, seed=0, **arguments))
    return losses, models


def assert_same_losses(losses: list[dict], expected: list[dict], names: dict[str, str]) -> None:
    """`names`: the example's name of a loss -> the app's."""
    table = np.array([[values[name] for name in names] for values in losses])
    expected_table = np.array([[values[name] for name in names.values()] for values in expected])
    assert table.shape == (STEPS, len(names))
    assert np.ptp(expected_table[:, 0]) > 0.1 * expected_table[0, 0]
    np.testing.assert_allclose(table, expected_table, rtol=1e-5)


def assert_same_weights(
    weights: list[np.ndarray], expected: list[np.ndarray], first: list[np.ndarray]
) -> None:
    """The difference of all weights is below a thousandth of their update, in the Euclidean norm."""
    squared_distance = squared_update = 0.0
    for a, b, c in zip(weights, expected, first, strict=True):
        squared_distance += np.sum((a - b) ** 2, dtype=np.float64)
        squared_update += np.sum((b - c) ** 2, dtype=np.float64)
    assert squared_update > 0
    assert np.sqrt(squared_distance / squared_update) < 1e-3


# --- evaluation ---


class PixelNetwork:
    """Takes the place of a network. Its outputs are random numbers whose seed is a checksum of the pixels.

    `make_outputs(random)` returns nested lists of float32 arrays (1, ...): the outputs for one image.
    """

    def __init__(self, make_outputs: Callable):
        self._make_outputs = make_outputs
        self._structure = make_outputs(np.random.default_rng(0))

    def predict_on_batch(self, images: np.ndarray) -> object:
        return tf.nest.pack_sequence_as(self._structure, self._arrays(images))

    def __call__(self, images: tf.Tensor, training: bool) -> object:
        shapes = [array.shape[1:] for array in tf.nest.flatten(self._structure)]
        outputs = tf.numpy_function(self._arrays, [images], [tf.float32] * len(shapes))
        for tensor, shape in zip(outputs, shapes, strict=True):
            tensor.set_shape((images.shape[0], *shape))
        return tf.nest.pack_sequence_as(self._structure, outputs)

    def _arrays(self, images: np.ndarray) -> list[np.ndarray]:
        randoms = [np.random.default_rng(zlib.crc32(image.tobytes())) for image in images]
        outputs = [tf.nest.flatten(self._make_outputs(random)) for random in randoms]
        return [np.concatenate(arrays) for arrays in zip(*outputs, strict=True)]


def evaluations(
    app: types.ModuleType, example, config, network: PixelNetwork, data, tmp_path
) -> Iterator[tuple]:
    """Yields the metrics and the detections of eval.py, and then those of the example, on 48 images."""
    document = json.loads((data / "instances.json").read_text())
    document["images"] = document["images"][:48]
    image_ids = {image["id"] for image in document["images"]}
    document["annotations"] = [row for row in document["annotations"] if row["image_id"] in image_ids]
    document["categories"] = [{"id": category_id, "name": str(category_id)} for category_id in CATEGORY_IDS]
    for row in document["annotations"]:
        row["category_id"] = CATEGORY_IDS[row["category_id"] % len(CATEGORY_IDS)]
    annotations = tmp_path / "instances.json"
    annotations.write_text(json.dumps(document))
    label_map = open_coco(f"{data}/images", str(annotations)).annotations.label_map
    detector = Detector(app.APP.make_detect(network, config), config, label_map, tmp_path / "none.weights.h5")
    files = {"eval_images": f"{data}/images", "eval_annotations": str(annotations)}
    arguments = {"output_dir": str(tmp_path / "app"), "pipeline_type": "dali_cpu", "batch_size": 8}
    with mock.patch.object(app, "open_detector", lambda *_: detector):
        app.evaluate_weights(EvalArgs(**files, **arguments))
    (tmp_path / "example").mkdir()
    args = argparse.Namespace(**files, output_dir=str(tmp_path / "example"))
    example_config = example.data.Config("", image_size=config.image_size, batch_size=8, num_threads=1)
    example.evaluate(args, example_config, network)
    for name in ("app", "example"):
        yield tuple(
            json.loads((tmp_path / name / f"{k}.json").read_text()) for k in ("metrics", "detections")
        )


def assert_same_evaluation(results: tuple, expected: tuple) -> None:
    metrics, detections = results
    assert metrics["AP50"] > 0.001 and metrics["AR100"] > 0.01
    np.testing.assert_allclose(list(metrics.values()), [expected[0][name] for name in metrics], atol=1e-6)

    def rows_by_class(detections: list[dict]) -> dict[tuple, np.ndarray]:
        rows = collections.defaultdict(list)
        for d in detections:
            rows[d["image_id"], d["category_id"]].append([*d["bbox"], d["score"]])
        return {key: np.array(group) for key, group in rows.items()}

    # Rounding decides between nearly equal scores and at the limits of NMS.
    groups, expected_groups = rows_by_class(detections), rows_by_class(expected[1])
    partners = 0
    for key in groups.keys() & expected_groups.keys():
        distances = np.abs(groups[key][:, None] - expected_groups[key]).max(axis=-1)
        partners += np.count_nonzero(distances.min(axis=1) <= 0.011)
    assert abs(len(detections) - len(expected[1])) <= 5
    assert partners >= len(detections) - 5
