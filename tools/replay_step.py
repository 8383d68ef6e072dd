"""The batch of a step that was skipped, with the weights it met, in one file: `--replay=FILE` runs it again.

    python efficientdet/train.py --replay=runs/mine/skipped/step_00000123.npz

Nothing else is needed: the file holds images, targets, weights and the model's configuration. It is an .npz
without pickled objects, so a file from somebody else can be opened, too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from common.errors import UserError
from common.training.skipped_batch import SkippedStep

_SHOWN = 8


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
