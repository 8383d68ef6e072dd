"""Converts Darknet's .weights files to weights of this project, and back.

    python yolov4/darknet_weights.py --weights=yolov4.weights --model_name=yolov4 --output=yolov4.weights.h5
    python yolov4/darknet_weights.py --weights=runs/mine --output=mine.weights

The second command also writes mine.cfg and mine.names. AlexeyAB/darknet and OpenCV read all three files.
"""

import dataclasses
import os
import pathlib
import sys
from typing import TYPE_CHECKING

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors, hparams
from common.args import flag
from common.data.labels import LabelMap
from common.errors import UserError
from common.files import write_bytes
from common.progress import import_tensorflow
from common.weights import weight_files
from yolov4.config import MODEL_NAMES, get_config

if TYPE_CHECKING:
    import keras

    from yolov4.import_weights.darknet_files import DarknetWeights


@dataclasses.dataclass(frozen=True)
class Args:
    weights: str = flag(None, "Input: Darknet's .weights file, or this project's weights or run directory.")
    output: str = flag(None, "Output: a .weights.h5 file (from Darknet) or a .weights file (to Darknet).")
    model_name: str | None = flag(
        None, f"For Darknet's weights: name of the model, one of {', '.join(MODEL_NAMES)}."
    )
    image_size: str | None = flag(None, "For Darknet's weights: input size, N or HxW. Default: the model's.")
    hparams: str | None = flag(None, "For Darknet's weights: hyper-parameters, k=v,k=v or a YAML file.")


def load_darknet(model: "keras.Model", path: str | os.PathLike) -> "DarknetWeights":
    """Loads a complete .weights file, or a partial one (yolov4.conv.137, yolov4-tiny.conv.29), into a model.

    If the file has another number of classes, the last convolution of each head is not loaded.

    Raises:
        UserError: the file cannot be used. The model has not been changed.
    """
    from yolov4.import_weights.darknet_files import blocks_of, read_darknet

    contents = read_darknet(path, model)
    for block in blocks_of(model)[: contents.convolutions]:
        if all(contents.values[variable.path].shape == variable.shape for variable in block):
            for variable in block:
                variable.assign(contents.values[variable.path])
    return contents


def save_darknet(model: "keras.Model", path: str | os.PathLike, seen: int = 0) -> None:
    """Writes a .weights file; see `save_darknet` in import_weights/darknet_files.py."""
    from yolov4.import_weights import darknet_files

    darknet_files.save_darknet(model, path, seen)


def convert(a: Args) -> None:
    """Converts from Darknet or to Darknet, depending on the suffix of `output`.

    Raises:
        UserError: a flag or a file cannot be used, or the output exists.
    """
    if not a.weights or not a.output:
        raise UserError("--weights and --output are both needed: the file to read and the file to write")
    try:
        if a.output.endswith(".weights.h5"):
            _from_darknet(a)
        elif a.output.endswith(".weights"):
            _to_darknet(a)
        else:
            raise UserError(
                f"--output={a.output} must end in .weights.h5 (from Darknet) or .weights (to Darknet)"
            )
    except OSError as error:
        raise UserError(f"--output={a.output}: {weight_files.reason(error)}") from error


def _from_darknet(a: Args) -> None:
    if not a.model_name:
        raise UserError(f"--model_name is missing: choose one of {', '.join(MODEL_NAMES)} for {a.weights}")
    _refuse_existing(a.output)
    import_tensorflow()
    from common.weights.fine_tuning import NUM_COCO_CLASSES
    from yolov4.import_weights.darknet_files import blocks_of, read_darknet, read_label_map
    from yolov4.model import build_model
    from yolov4.model_metadata import make_metadata

    # Like Darknet, resize without antialiasing (src/image.c: resize_image).
    config = hparams.resolve(hparams.replace(get_config(a.model_name), {"antialias": False}), a)
    model = build_model(a.model_name, config=config)
    contents = read_darknet(a.weights, model)
    total, num_classes = len(blocks_of(model)), contents.num_classes
    if num_classes is None or contents.convolutions < total:
        raise UserError(
            f"weights {a.weights} have only {contents.convolutions} of {total} convolutions: use them with "
            "--init_from of train.py"
        )
    if num_classes != NUM_COCO_CLASSES:
        model = build_model(a.model_name, num_classes, config=config)
    label_map = read_label_map(a.weights, num_classes) or LabelMap.numbered(num_classes)
    load_darknet(model, a.weights)
    metadata = make_metadata(config, label_map, num_classes, recipe={"init_from": a.weights})
    weight_files.save(model, a.output, metadata)
    print(
        f"{a.output}: {total} convolutions, {num_classes} classes ({label_map.names[0]}, ...), trained on "
        f"{contents.seen:,} images"
    )


def _to_darknet(a: Args) -> None:
    if a.model_name or a.image_size or a.hparams:
        raise UserError(
            "--model_name, --image_size and --hparams have no effect on a conversion to Darknet: remove them"
        )
    file = pathlib.Path(a.output)
    cfg, names = file.with_suffix(".cfg"), file.with_suffix(".names")
    _refuse_existing(file, cfg, names)
    import_tensorflow()
    from yolov4.import_weights.darknet_cfg import cfg_text
    from yolov4.predict import load_trained

    model, config, label_map, _ = load_trained(a.weights)
    num_classes = model.outputs[0].shape[-1] - 5
    spare = [f"unused_{number}" for number in range(label_map.num_classes + 1, num_classes + 1)]
    write_bytes(cfg, cfg_text(config, num_classes).encode())
    write_bytes(names, "".join(f"{name}\n" for name in [*label_map.names, *spare]).encode())
    save_darknet(model, file)
    print(f"{file}, {cfg.name} and {names.name}: {num_classes} classes")


def _refuse_existing(*files: str | os.PathLike) -> None:
    for file in files:
        if os.path.exists(file):
            raise UserError(f"{file} exists: remove it, or choose another --output")


def define_flags(fv: flags.FlagValues) -> None:
    args.define(fv, Args)


def main() -> None:
    convert(Args(**args.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    args.install(define_flags)
    errors.run(main)
