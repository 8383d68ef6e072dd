"""Repeats the training step of a skipped batch and prints where its numbers stop being finite.

    python tools/replay_step.py runs/mine/skipped/step_00000123.npz

When training skips a step, common/training/results.py writes this file. No other file is needed.
"""

import functools
import importlib
import json
import os
import pathlib
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np

from common import errors, hparams
from common.errors import UserError
from common.progress import import_tensorflow, log

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

APPS = ("efficientdet", "yolov4")
SHOWN = 8
LossValues = Callable[["tf.Tensor", dict[str, "tf.Tensor"]], dict[str, "tf.Tensor"]]


class SkippedStep(NamedTuple):
    """The contents of the file of a skipped step.

    Attributes:
        metadata: the metadata that the run's weights files contain, plus "step" and "rank".
        images: (B, H, W, 3), as the loader returned them.
        weights: values of `model.variables`, in their order.
    """

    metadata: dict[str, Any]
    images: np.ndarray
    targets: dict[str, np.ndarray]
    weights: list[np.ndarray]


def read(path: str | os.PathLike) -> SkippedStep:
    """Reads a file that Results.save_skipped wrote. Does not run code in it. May raise UserError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return SkippedStep(
            json.loads(str(arrays.pop("metadata"))),
            arrays.pop("images"),
            {name.removeprefix("target/"): a for name, a in arrays.items() if name.startswith("target/")},
            [arrays[name] for name in sorted(arrays) if name.startswith("weight/")],
        )
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no readable file of a skipped step: give skipped/step_*.npz") from error


def replay(skipped: SkippedStep, model: "keras.Model", loss_values: LossValues) -> str:
    """Runs the step again, without an update, and finds where numbers stop being finite.

    Args:
        model: the model, built as in the run. It gets the weights of the file.
        loss_values: function (images, targets) -> the model's scalars in training, including "loss".

    Returns:
        The report: the scalars, and the inputs, weights, layers and gradients that are not finite.

    Raises:
        UserError: the weights are those of another model.
    """
    import keras
    import tensorflow as tf

    try:
        for variable, weight in zip(model.variables, skipped.weights, strict=True):
            variable.assign(weight)
    except ValueError as error:
        raise UserError(
            "the weights in the file do not fit the model: use the version of this code that wrote the file"
        ) from error
    images = tf.constant(skipped.images)
    targets = {name: tf.constant(value) for name, value in skipped.targets.items()}
    about, ids = skipped.metadata, np.ravel(skipped.targets["image_ids"])
    lines = [f"step {about['step']} of rank {about['rank']}, image ids {', '.join(map(str, ids.tolist()))}"]
    lines += _not_finite("input", {"images": images, **targets})
    lines += _not_finite("weight", {v.path: v.value for v in model.variables})
    with tf.GradientTape() as tape:
        values = loss_values(images, targets)
    gradients = tape.gradient(values["loss"], model.trainable_variables)
    found = {v.path: g for v, g in zip(model.trainable_variables, gradients, strict=True) if g is not None}
    outputs = keras.Model(model.inputs, [layer.output for layer in model.layers])(images, training=True)
    layers = zip(model.layers, outputs, strict=True)
    lines += _not_finite("output of layer", {layer.name: tf.nest.flatten(y)[0] for layer, y in layers})
    lines += [f"{name} = {float(value):.6g}" for name, value in values.items()]
    lines += _not_finite("gradient of", found)
    if all(np.isfinite(float(value)) for value in values.values()):
        norm = float(tf.linalg.global_norm(list(found.values())))
        lines.append(f"the loss is finite here; the norm of the gradients is {norm:.6g}")
    return "\n".join(lines)


def _not_finite(kind: str, tensors: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, tensor in tensors.items():
        finite = np.isfinite(np.asarray(tensor, np.float32))
        if not finite.all():
            lines.append(f"{kind} {name}: {(~finite).sum()} of {finite.size} numbers are not finite")
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def main(*files: str) -> None:
    if len(files) != 1:
        raise UserError(f"give one file, not {len(files)}: python tools/replay_step.py FILE")
    skipped = read(files[0])
    import_tensorflow()
    import keras

    from common.weights.fine_tuning import freeze, freeze_batch_norms

    metadata = skipped.metadata
    app = metadata.get("app")
    if app not in APPS:
        raise UserError(f"{files[0]} is of the app {app!r}, not of {' or '.join(APPS)}")
    train, table = importlib.import_module(f"{app}.train"), importlib.import_module(f"{app}.config")
    row = table.get_config(metadata["config"]["model_name"])
    config = hparams.from_json(type(row), metadata["config"])
    keras.mixed_precision.set_global_policy(metadata["recipe"]["precision"])
    model = train.make_model(config, metadata["num_classes"])
    if metadata["recipe"].get("freeze_batch_norm"):
        freeze_batch_norms(model)
    if metadata["recipe"].get("freeze"):
        log(freeze(model, metadata["recipe"]["freeze"]))
    print(replay(skipped, model, functools.partial(train.loss_values, model, config)))


if __name__ == "__main__":
    errors.run(main, positional=True)
