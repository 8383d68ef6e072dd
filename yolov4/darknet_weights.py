"""Darknet's .weights files, exactly: AlexeyAB/darknet src/parser.c, load_weights_upto and save_weights_upto.

    python yolov4/darknet_weights.py --weights=yolov4.weights --model_name=yolov4 --output=yolov4.weights.h5
    python yolov4/darknet_weights.py --weights=runs/mine --output=mine.weights

The second command writes mine.cfg and mine.names beside it; AlexeyAB/darknet and OpenCV read all three. A
file is three int32 (major, minor and revision of its version), how many images training has seen, and for
every convolution in the order of the .cfg: batch norm's beta, gamma, mean and variance, or a bias where there
is no batch norm, then the kernel (output, input, height, width); float32, little endian.
"""

import math
import os
import pathlib
import re
import struct
import sys
from types import SimpleNamespace
from typing import NamedTuple

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import flags

from common import args as shared_flags
from common import errors, hparams
from common.errors import UserError
from common.files import write_bytes, write_file
from common.labels import NUM_COCO_CLASSES, LabelMap
from common.training import weights as weight_files
from yolov4.config import MODEL_NAMES, get_config
from yolov4.import_weights.darknet_cfg import cfg_text
from yolov4.import_weights.darknet_classes import read_label_map
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata
from yolov4.predict import load_trained

VERSION = (0, 2, 5)  # include/darknet.h: MAJOR_VERSION, MINOR_VERSION, PATCH_VERSION

_LAYER = re.compile(r"\w+\.layer_(\d+)\.conv")


FLAGS = {
    "weights": "A .weights file, or weights or a run directory of ours.",
    "output": "Ends in .weights.h5 (from Darknet) or .weights (to Darknet).",
    "model_name": f"From Darknet: one of {', '.join(MODEL_NAMES)}.",
    "image_size": "From Darknet: N or HxW in pixels. Default: the model's.",
}


class Contents(NamedTuple):
    """What a .weights file holds.

    Attributes:
        values: path of a variable of the model -> array in Keras' layout. Where the file has another class
            count, the last axis of the last convolutions' arrays differs from the variable's.
        convolutions: how many, from the first one on.
        num_classes: None where the file ends before the first head.
        seen: how many images training has seen.
    """

    values: dict[str, np.ndarray]
    convolutions: int
    num_classes: int | None
    seen: int


class Report(NamedTuple):
    """What `load_darknet` did."""

    taken: int  # convolutions
    total: int  # convolutions of the model
    num_classes: int | None  # of the file; None where it ends before the first head
    seen: int  # images, in training


def load_darknet(model: keras.Model, path: str | os.PathLike) -> Report:
    """Loads a .weights file, or one that ends early (yolov4.conv.137, yolov4-tiny.conv.29).

    A file of the same network with another class count is loaded up to the last convolution of each head,
    which keeps its values (init_from.py takes their rows one by one).

    Raises:
        UserError: see `read_darknet`; nothing was assigned then.
    """
    return _assign(model, read_darknet(path, model))


def save_darknet(model: keras.Model, path: str | os.PathLike, seen: int = 0) -> None:
    """Writes the weights of a model that `build_model` made, atomically.

    Args:
        model: the model.
        path: ends in `.weights` by custom.
        seen: images that training has seen. Darknet goes on from there when it trains further, so 0 starts
            its schedule anew.

    Raises:
        OSError: it could not be written; what stood at `path` still does.
    """

    def write(temporary: pathlib.Path) -> None:
        with temporary.open("wb") as file:
            file.write(struct.pack("<iiiQ", *VERSION, seen))
            for block in _blocks(model):
                for variable in block:
                    array = np.asarray(variable, "<f4")
                    file.write((array.transpose(3, 2, 0, 1) if array.ndim == 4 else array).tobytes())

    write_file(path, write)


def read_darknet(path: str | os.PathLike, model: keras.Model) -> Contents:
    """Reads a .weights file of `model`'s network: a whole one, of any class count, or one that ends early.

    Args:
        path: the file.
        model: what `build_model` made; it is not changed.

    Raises:
        UserError: the file is missing; its size is neither that of the whole network with any class count
            nor that of its first convolutions; it holds NaN, infinity or negative variances.
    """
    blocks = _blocks(model)
    *_, anchors, numbers = model.outputs[0].shape
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, seen = _header(file.read(20))
            floats, rest = divmod(size - header, 4)
            found = None if rest or floats <= 0 else _fit(blocks, floats, anchors, numbers - 5)
            if found is None:
                expected = header + 4 * _num_floats(blocks)
                raise UserError(
                    f"weights {path} have {size:,} bytes, but {model.name} with {numbers - 5} classes has "
                    f"{expected:,}: the file is cut short, or of another network"
                )
            file.seek(header)
            content = np.fromfile(file, "<f4", floats)
    except OSError as error:
        raise UserError(f"weights {path}: {error.strerror}") from error

    convolutions, num_classes = found
    values, has_head = {}, False
    for block in blocks[:convolutions]:
        has_head |= _is_head(block)
        for variable in block:
            shape = _shape(variable, block, anchors, num_classes)
            array, content = np.split(content, [math.prod(shape)])
            if not np.isfinite(array).all():
                raise UserError(f"weights {path}: {variable.path} is not finite: the file is damaged")
            if variable.name == "moving_variance" and array.min() < 0:
                raise UserError(
                    f"weights {path}: {variable.path} is negative: the file is of another network"
                )
            if len(shape) == 4:
                height, width, inputs, outputs = shape
                array = array.reshape(outputs, inputs, height, width).transpose(2, 3, 1, 0)
            values[variable.path] = np.asarray(array, np.float32)
    return Contents(values, convolutions, num_classes if has_head else None, seen)


def _assign(model: keras.Model, contents: Contents) -> Report:
    taken, blocks = 0, _blocks(model)
    for block in blocks[: contents.convolutions]:
        if all(contents.values[variable.path].shape == variable.shape for variable in block):
            for variable in block:
                variable.assign(contents.values[variable.path])
            taken += 1
    return Report(taken, len(blocks), contents.num_classes, contents.seen)


def _blocks(model: keras.Model) -> list[list[keras.Variable]]:
    """The variables of each convolution, in the order of the file."""
    layers = {layer.name: layer for layer in model.layers}
    numbered = sorted((int(match[1]), name) for name in layers if (match := _LAYER.fullmatch(name)))
    blocks = []
    for _, name in numbered:
        convolution, bn = layers[name], layers.get(name.removesuffix("conv") + "bn")
        before = [bn.beta, bn.gamma, bn.moving_mean, bn.moving_variance] if bn else [convolution.bias]
        blocks.append([*before, convolution.kernel])
    return blocks


def _is_head(block: list[keras.Variable]) -> bool:
    return len(block) == 2  # the only convolutions without batch norm


def _shape(
    variable: keras.Variable, block: list[keras.Variable], anchors: int, num_classes: int
) -> tuple[int, ...]:
    """In Keras' layout, where the outputs are the last axis."""
    return (*variable.shape[:-1], anchors * (5 + num_classes)) if _is_head(block) else variable.shape


def _num_floats(blocks: list[list[keras.Variable]]) -> int:
    return sum(math.prod(variable.shape) for block in blocks for variable in block)


def _fit(
    blocks: list[list[keras.Variable]], floats: int, anchors: int, num_classes: int
) -> tuple[int, int] | None:
    """(convolutions, class count) of a file with so many numbers; None: it is not of this network."""
    per_output = sum(math.prod(v.shape[:-1]) for block in blocks if _is_head(block) for v in block)
    more_classes, rest = divmod(floats - _num_floats(blocks), anchors * per_output)
    if not rest and num_classes + more_classes >= 1:
        return len(blocks), num_classes + more_classes
    for convolutions in range(1, len(blocks)):
        if _num_floats(blocks[:convolutions]) == floats:
            return convolutions, num_classes
    return None


def _header(content: bytes) -> tuple[int, int]:
    """(bytes, images seen). Versions before 0.2 counted the images in 32 bits."""
    if len(content) < 20:
        return 20, 0
    major, minor, _, seen = struct.unpack("<iiiQ", content)
    if 10 * major + minor >= 2:
        return 20, seen
    return 16, struct.unpack_from("<I", content, 12)[0]


def define_flags(fv: flags.FlagValues) -> None:
    for name, text in FLAGS.items():
        flags.DEFINE_string(name, None, text, flag_values=fv)
    shared_flags.define(fv, shared_flags.Args, ["hparams"])


def convert(
    *,
    weights: str | None = None,
    output: str | None = None,
    model_name: str | None = None,
    image_size: str | None = None,
    hparams: str | None = None,
) -> None:
    """Converts from Darknet or to Darknet, by what `output` ends in; see the flags of the same names.

    Raises:
        UserError: anything that the user gave and that cannot be used; a file in the way.
    """
    if not weights or not output:
        raise UserError("--weights and --output are both needed: the file to read and the file to write")
    try:
        if output.endswith(".weights.h5"):
            _from_darknet(weights, output, model_name, image_size, hparams)
        elif output.endswith(".weights"):
            if model_name or image_size or hparams:
                raise UserError(
                    "our weights know their model: leave out --model_name, --image_size and --hparams"
                )
            _to_darknet(weights, output)
        else:
            raise UserError(f"--output={output} must end in .weights.h5 (ours) or .weights (Darknet's)")
    except OSError as error:
        raise UserError(f"--output={output}: {weight_files.reason(error)}") from error


def _from_darknet(
    weights: str, output: str, model_name: str | None, image_size: str | None, hparams_spec: str | None
) -> None:
    if not model_name:
        raise UserError(f"--model_name is missing: {weights} is of which of {', '.join(MODEL_NAMES)}?")
    _refuse_existing(pathlib.Path(output))
    # Darknet resizes without antialiasing (src/image.c: resize_image)
    config = hparams.replace(get_config(model_name), {"antialias": False})
    config = hparams.resolve(config, SimpleNamespace(hparams=hparams_spec, image_size=image_size))
    model = build_model(model_name, config=config)
    contents = read_darknet(weights, model)
    if contents.convolutions < len(_blocks(model)):
        raise UserError(
            f"weights {weights} end after {contents.convolutions} of {len(_blocks(model))} convolutions: "
            "start a training from them with --init_from"
        )
    if contents.num_classes != NUM_COCO_CLASSES:
        model = build_model(model_name, contents.num_classes, config=config)
    label_map = read_label_map(weights, contents.num_classes) or LabelMap.numbered(contents.num_classes)
    report = _assign(model, contents)
    metadata = make_metadata(config, label_map, contents.num_classes, recipe={"init_from": weights})
    weight_files.save(model, output, metadata)
    names = ", ".join([*label_map.names[:3], *(["..."] if label_map.num_classes > 3 else [])])
    seen = f", trained on {report.seen:,} images" if report.seen else ""
    print(f"{output}: {report.taken} convolutions, {report.num_classes} classes ({names}){seen}")


def _to_darknet(weights: str, output: str) -> None:
    file = pathlib.Path(output)
    companions = {suffix: file.with_suffix(suffix) for suffix in (".cfg", ".names")}
    _refuse_existing(file, *companions.values())
    model, config, label_map, _ = load_trained(weights)
    num_classes = model.outputs[0].shape[-1] - 5
    spare = [f"unused_{number}" for number in range(label_map.num_classes + 1, num_classes + 1)]
    write_bytes(companions[".cfg"], cfg_text(config, num_classes).encode())
    write_bytes(companions[".names"], "".join(f"{n}\n" for n in [*label_map.names, *spare]).encode())
    save_darknet(model, file)
    print(
        f"{file}, {companions['.cfg'].name} and {companions['.names'].name}: {num_classes} classes; "
        "max_batches and steps of the .cfg are for COCO train2017: change them to train on other data"
    )


def _refuse_existing(*files: pathlib.Path) -> None:
    for file in files:
        if file.exists():
            raise UserError(f"{file} exists: remove it, or choose another --output")


def main() -> None:
    convert(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
