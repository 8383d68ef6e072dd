"""Reads and writes Darknet's .weights files, and reads the .names files next to them.

A .weights file (AlexeyAB/darknet src/parser.c, load_weights_upto and save_weights_upto) starts with three
int32 (its version) and the number of images that training has seen. Then follow the convolutions, in the
order of the .cfg, in float32, little endian. A convolution has beta, gamma, mean and variance of its batch
norm (or a bias, without batch norm), then its kernel (output, input, height, width).
"""

import itertools
import math
import os
import pathlib
import re
import struct
from typing import NamedTuple

import keras
import numpy as np

from common.data.labels import LabelMap
from common.errors import UserError
from common.files import user_errors, write_file
from common.weights.fine_tuning import NUM_COCO_CLASSES, VOC_SPELLINGS, coco_label_map

VERSION = (0, 2, 5)  # include/darknet.h: MAJOR_VERSION, MINOR_VERSION, PATCH_VERSION

_CONVOLUTION = re.compile(r"\w+\.layer_(\d+)\.conv")


class DarknetWeights(NamedTuple):
    """The contents of a .weights file.

    Attributes:
        values: path of a variable of the model -> array in Keras' layout.
        convolutions: number of convolutions in the file. They are the first ones of the network.
        num_classes: number of classes; None if the file ends before the first head.
        seen: number of images that training has seen.
    """

    values: dict[str, np.ndarray]
    convolutions: int
    num_classes: int | None
    seen: int


def read_darknet(path: str | os.PathLike, model: keras.Model) -> DarknetWeights:
    """Reads a .weights file of `model`'s network. It may be partial, or have another number of classes.

    Raises:
        UserError: the file is missing or damaged, or belongs to another network.
    """
    with user_errors(f"weights {path}"):
        content = pathlib.Path(path).read_bytes()
    blocks = blocks_of(model)
    *_, anchors, numbers = model.outputs[0].shape
    header, seen = _read_header(content)
    floats, rest = divmod(len(content) - header, 4)
    lengths = None if rest else _fit(blocks, floats, anchors, numbers - 5)
    if lengths is None:
        raise UserError(
            f"weights {path} have {len(content):,} bytes, but {model.name} with {numbers - 5} classes has "
            f"{header + 4 * sum(map(_size, blocks)):,}: the file is cut off or belongs to another network"
        )
    convolutions, num_classes = lengths
    numbers_left = np.frombuffer(content, "<f4", offset=header)
    values, has_head = {}, False
    for block in blocks[:convolutions]:
        has_head |= _is_head(block)
        for variable in block:
            *axes, outputs = variable.shape
            outputs = anchors * (5 + num_classes) if _is_head(block) else outputs
            array, numbers_left = np.split(numbers_left, [math.prod(axes) * outputs])
            if not np.isfinite(array).all():
                raise UserError(f"weights {path}: {variable.path} is not finite, so the file is damaged")
            if variable.name == "moving_variance" and array.min() < 0:
                raise UserError(
                    f"weights {path}: {variable.path} is negative, so the file belongs to another network"
                )
            if axes:  # a kernel
                height, width, inputs = axes
                array = array.reshape(outputs, inputs, height, width).transpose(2, 3, 1, 0)
            values[variable.path] = np.asarray(array, np.float32)
    return DarknetWeights(values, convolutions, num_classes if has_head else None, seen)


def save_darknet(model: keras.Model, path: str | os.PathLike, seen: int = 0) -> None:
    """Writes the weights of a model atomically.

    Args:
        seen: number of images that training has seen. 0 restarts Darknet's schedule.

    Raises:
        OSError: the file could not be written; an older file at `path` is unchanged.
    """

    def write(temporary: pathlib.Path) -> None:
        with temporary.open("wb") as file:
            file.write(struct.pack("<iiiQ", *VERSION, seen))
            for variable in itertools.chain.from_iterable(blocks_of(model)):
                array = np.asarray(variable, "<f4")
                file.write((array.transpose(3, 2, 0, 1) if array.ndim == 4 else array).tobytes())

    write_file(path, write)


def blocks_of(model: keras.Model) -> list[list[keras.Variable]]:
    """Returns the variables of each convolution, in the order of the file."""
    layers = {layer.name: layer for layer in model.layers}
    numbered = sorted((int(match[1]), name) for name in layers if (match := _CONVOLUTION.fullmatch(name)))
    blocks = []
    for _, name in numbered:
        convolution, bn = layers[name], layers.get(name.removesuffix("conv") + "bn")
        before = [bn.beta, bn.gamma, bn.moving_mean, bn.moving_variance] if bn else [convolution.bias]
        blocks.append([*before, convolution.kernel])
    return blocks


def _is_head(block: list[keras.Variable]) -> bool:
    return len(block) == 2  # kernel and bias: only the heads' last convolutions have no batch norm


def _size(block: list[keras.Variable]) -> int:
    return sum(math.prod(variable.shape) for variable in block)


def _fit(
    blocks: list[list[keras.Variable]], floats: int, anchors: int, num_classes: int
) -> tuple[int, int] | None:
    """Returns the numbers of convolutions and classes in a file of `floats` values.

    Returns None if no such numbers fit the network.
    """
    per_output = sum(math.prod(v.shape[:-1]) for block in blocks if _is_head(block) for v in block)
    more_classes, rest = divmod(floats - sum(map(_size, blocks)), anchors * per_output)
    if not rest and num_classes + more_classes >= 1:
        return len(blocks), num_classes + more_classes
    totals = list(itertools.accumulate(map(_size, blocks)))
    return (totals.index(floats) + 1, num_classes) if floats in totals else None


def _read_header(content: bytes) -> tuple[int, int]:
    """Returns (bytes of the header, images seen)."""
    if len(content) < 20:
        return 20, 0
    major, minor, _, seen = struct.unpack_from("<iiiQ", content)
    if 10 * major + minor >= 2:
        return 20, seen
    return 16, struct.unpack_from("<I", content, 12)[0]


def read_label_map(weights: str | os.PathLike, num_classes: int) -> LabelMap | None:
    """Returns the classes of a .weights file, from the .names file next to it (one name per line).

    COCO's 80 classes, in COCO's or Darknet's spelling, get COCO's names and ids. Other classes get the ids
    1, 2, ... If there is no .names file, the result is COCO's classes for 80 classes, and None otherwise.

    Raises:
        UserError: the .names file cannot be read, has a class twice, or does not have `num_classes` names.
    """
    coco = coco_label_map()
    file = pathlib.Path(weights).with_suffix(".names")
    if not file.exists():
        return coco if num_classes == NUM_COCO_CLASSES else None
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"class names {file}: {error}") from error
    names = tuple(line for line in lines if line)
    if len(names) != num_classes:
        raise UserError(
            f"{file} has {len(names)} class names, but {weights} has {num_classes} classes: correct the "
            "names, or remove the file"
        )
    if names in (coco.names, tuple(VOC_SPELLINGS.get(name, name) for name in coco.names)):
        return coco
    try:
        return LabelMap.from_categories({"id": i, "name": name} for i, name in enumerate(names, 1))
    except UserError as error:
        raise UserError(f"class names {file}: {error}") from error
