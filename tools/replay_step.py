"""The batch of a step that was skipped, with the weights it met, in one file: `--replay=FILE` runs it again.

    python efficientdet/train.py --replay=runs/mine/skipped/step_00000123.npz

Nothing else is needed: the file holds images, targets, weights and the model's configuration. It is an .npz
without pickled objects, so a file from somebody else can be opened, too.
"""

import io
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from common import progress
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import write_bytes

KEPT = 2  # files in a run directory: the newest
_SHOWN = 8


class SkippedStep(NamedTuple):
    """What a replay file holds.

    Attributes:
        metadata: of the run's weights files, with "step" and "rank".
        images: (B, H, W, 3), as the loader gave them.
        targets: by name.
        weights: values of `model.variables`, in their order.
    """

    metadata: dict[str, Any]
    images: np.ndarray
    targets: dict[str, np.ndarray]
    weights: list[np.ndarray]


def save_batch(
    ranks: Ranks,
    directory: pathlib.Path | None,
    model: keras.Model,
    metadata: Mapping[str, Any],
    step: int,
    images: Any,
    targets: Any,
) -> str | None:
    """Writes the batch of the one rank that has images here; all ranks call it together.

    Args:
        ranks: of the run.
        directory: the run directory, on rank 0.
        model: with the weights that the batch met. (On a GPU a step is looked at one step late: if that one
            was taken, the weights are one update further.)
        metadata: what the run's weights files say about themselves (app, config, classes), and its precision.
        step: its number.
        images, targets: of one replica in this step; None on ranks whose batch is not the one.

    Returns:
        The file, on rank 0; None elsewhere, and where it could not be written.
    """
    content = None
    if images is not None:
        content = _to_bytes(model, {**metadata, "step": step, "rank": ranks.rank}, images, targets)
    content = next((found for found in ranks.gather(content) if found is not None), None)
    if directory is None or content is None:
        return None
    path = directory / "skipped" / f"step_{step:08d}.npz"
    try:
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, content)
        for old in sorted(path.parent.glob("step_*.npz"))[:-KEPT]:
            old.unlink()
    except OSError as error:
        progress.log(f"warning: {path} cannot be written: {error.strerror}; training goes on")
        return None
    return str(path)


def read_batch(path: str | os.PathLike, app: str) -> SkippedStep:
    """Reads a file of `save_batch`.

    Raises:
        UserError: it is missing, damaged, or of another app.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        metadata = json.loads(str(arrays.pop("metadata")))
        found = SkippedStep(
            metadata,
            arrays.pop("images"),
            {name.removeprefix("target/"): a for name, a in arrays.items() if name.startswith("target/")},
            [arrays[name] for name in sorted(arrays) if name.startswith("weight/")],
        )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"--replay={path} is no file of a skipped step: {error}") from error
    if metadata.get("app") != app:
        raise UserError(f"--replay={path} is of {metadata.get('app')!r}, not of {app}")
    return found


def run(
    skipped: SkippedStep,
    model: keras.Model,
    loss_values: Callable[[tf.Tensor, dict[str, tf.Tensor]], dict[str, tf.Tensor]],
) -> str:
    """Runs the step again, without an update, and finds out where numbers stop being finite.

    Args:
        skipped: what `read_batch` returned.
        model: as it was built for that run; it gets the weights of the file.
        loss_values: (images, targets) -> scalars, "loss" among them, of the model in training.

    Returns:
        Lines: the input, the scalars, the first layers and the gradients that are not finite.

    Raises:
        UserError: the weights are of another model.
    """
    shapes = [tuple(variable.shape) for variable in model.variables]
    if shapes != [weight.shape for weight in skipped.weights]:
        raise UserError("the file's weights do not fit the model: it was written by another version")
    for variable, weight in zip(model.variables, skipped.weights, strict=True):
        variable.assign(weight)
    images = tf.constant(skipped.images)
    targets = {name: tf.constant(value) for name, value in skipped.targets.items()}
    metadata = skipped.metadata
    ids = ", ".join(str(int(i)) for i in np.ravel(skipped.targets["image_ids"]))
    lines = [f"step {metadata['step']} of rank {metadata['rank']}, image ids {ids}"]
    lines += _of_tensors("input", {"images": skipped.images, **skipped.targets})
    lines += _of_tensors("weight", {v.path: v.numpy() for v in model.variables})
    outputs = [layer.output for layer in model.layers]
    activations = keras.Model(model.inputs, outputs)(images, training=True)
    layers = {layer.name: value for layer, value in zip(model.layers, activations, strict=True)}
    lines += _of_tensors(
        "output of layer", {name: tf.nest.flatten(value)[0] for name, value in layers.items()}
    )
    for variable, weight in zip(model.variables, skipped.weights, strict=True):
        variable.assign(weight)  # the forward pass moved the statistics
    with tf.GradientTape() as tape:
        values = loss_values(images, targets)
    gradients = tape.gradient(values["loss"], model.trainable_variables)
    lines += [f"{name} = {float(value):.6g}" for name, value in values.items()]
    named = zip(model.trainable_variables, gradients, strict=True)
    lines += _of_tensors("gradient of", {v.path: g for v, g in named if g is not None})
    if all(np.isfinite(float(value)) for value in values.values()):
        norm = float(tf.linalg.global_norm([gradient for gradient in gradients if gradient is not None]))
        lines.append(f"the loss is finite here; the norm of the gradients is {norm:.6g}")
    return "\n".join(lines)


def _of_tensors(kind: str, tensors: Mapping[str, Any]) -> list[str]:
    """Lines about those that are not finite, the first few."""
    lines = []
    for name, tensor in tensors.items():
        array = np.asarray(tf.cast(tensor, tf.float32)) if not isinstance(tensor, np.ndarray) else tensor
        if not np.issubdtype(array.dtype, np.floating):
            continue
        bad = int((~np.isfinite(array)).sum())
        if bad:
            lines.append(f"{kind} {name}: {bad} of {array.size} numbers are not finite")
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + more


def _to_bytes(
    model: keras.Model, metadata: Mapping[str, Any], images: tf.Tensor, targets: Mapping[str, tf.Tensor]
) -> bytes:
    arrays = {f"target/{name}": np.asarray(t) for name, t in targets.items()}
    arrays |= {
        f"weight/{i:05d}": tf.convert_to_tensor(v.value).numpy() for i, v in enumerate(model.variables)
    }
    stream = io.BytesIO()
    np.savez(stream, metadata=json.dumps(metadata), images=np.asarray(images), **arrays)
    return stream.getvalue()
