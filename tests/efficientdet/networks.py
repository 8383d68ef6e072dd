"""Computes outputs of a network with weights that are the same on every machine."""

import zlib

import keras
import numpy as np


def pseudo_random(shape, seed):
    """Returns float64 numbers in (-0.5, 0.5), the same on every machine."""
    index = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + seed
    return np.modf(np.abs(np.sin(index)) * 43758.5453)[0] - 0.5


def summarize_outputs(model: keras.Model, training: bool) -> np.ndarray:
    """Returns an array (4, levels).

    Rows 0 and 1 are the mean absolute value and one element of the class outputs. Rows 2 and 3 are the same
    for the box outputs. `pseudo_random` computes the images and all weights.
    """
    for weight in model.weights:
        value = pseudo_random(weight.shape, zlib.crc32(weight.path.encode()))
        if "kernel" in weight.name:
            is_depthwise = weight.shape[-1] == 1
            value *= 3 / np.sqrt(9 if is_depthwise else np.prod(weight.shape[:-1]))
        elif weight.name in ("gamma", "moving_variance", "fusion_weights"):
            value += 1
        weight.assign(value)
    heads = model(4 * pseudo_random((2, *model.input_shape[1:]), 0), training=training)
    rows = []
    for levels in heads:
        rows += [[np.abs(output).mean() for output in levels], [output[1, -1, -1, 5] for output in levels]]
    return np.array(rows)
