r"""Converts google/automl's EfficientDet weights, d0 to d7x: checkpoints of TensorFlow 1 or 2, and .h5 files.

    python efficientdet/automl_weights.py --model_name=efficientdet-d0 --weights=efficientdet-d0.h5 \
        --output=d0.weights.h5

automl's COCO models have 90 class outputs, one for each category id. The converted model has only COCO's 80
classes. For models of other data, --label_map gives the names of the classes. eval.py, infer.py and export.py
read the converted file. Do not use AdvProp checkpoints: they need images with another normalisation.
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
from common.progress import import_tensorflow
from common.weights import weight_files
from efficientdet.config import get_config

if TYPE_CHECKING:
    import keras

    from common.weights.fine_tuning import Report


@dataclasses.dataclass(frozen=True)
class Args:
    weights: str | None = flag(None, "Weights of automl: a .h5 file, a checkpoint or its directory.")
    output: str | None = flag(None, "The file to write; must end in .weights.h5.")
    model_name: str | None = flag(None, "Model: one of efficientdet-d0 .. d7x.")
    image_size: str | None = flag(None, "Network input in pixels, N or HxW. Default: the model's size.")
    label_map: str | None = flag(
        None, "File of class names and ids; id n is class output n. Default for 90 outputs: COCO's classes."
    )
    hparams: str | None = flag(None, "Hyper-parameters, k=v,k=v or a YAML file.")


def load_automl(model: "keras.Model", path: str | os.PathLike) -> "Report":
    """Loads a checkpoint of google/automl into a model of the same size. Returns a report.

    If model and file have the same number of classes, all class outputs are copied in the same order. If the
    model has 80 classes and the file has 90, the outputs of COCO's 80 classes are copied. Otherwise the last
    layer of the class head keeps its values.

    Args:
        path: a .h5 file, a checkpoint's prefix (`efficientdet-d0/model`), or a directory with one checkpoint.

    Raises:
        UserError: the file is damaged or belongs to another model. The model has not been changed.
    """
    from common.weights.fine_tuning import NUM_COCO_CLASSES, coco_label_map
    from efficientdet.import_weights.automl import class_names, read_automl
    from efficientdet.import_weights.tf_files import open_weights
    from efficientdet.init_from import assign
    from efficientdet.model import anchors_of

    contents = read_automl(open_weights(path), model)
    num_classes = model.get_layer("class_net.predict").bias.shape[0] // anchors_of(model)
    names = class_names(contents.num_classes)
    label_map = coco_label_map() if num_classes == NUM_COCO_CLASSES else LabelMap.numbered(num_classes)
    if num_classes == contents.num_classes:
        names = label_map.names
    return assign(model, contents, label_map, names, f"weights {os.fspath(path)}")


def convert(a: Args) -> None:
    """Converts a checkpoint of automl to a weights file of this project.

    Raises:
        UserError: a flag or a file cannot be used, or the output exists.
    """
    if not a.weights or not a.output or not a.model_name:
        raise UserError("set --weights (file to read), --output (file to write) and --model_name")
    if not a.output.endswith(".weights.h5"):
        raise UserError(f"--output={a.output} must end in .weights.h5")
    if os.path.exists(a.output):
        raise UserError(f"{a.output} exists: remove it, or choose another --output")
    import_tensorflow()
    from efficientdet.import_weights.automl import class_names, count_outputs, read_automl
    from efficientdet.import_weights.tf_files import open_weights
    from efficientdet.init_from import assign
    from efficientdet.model import build_model
    from efficientdet.model_metadata import make_metadata

    # Like automl's loader, resize without antialiasing (efficientdet/dataloader.py: tf.image.resize).
    config = hparams.resolve(hparams.replace(get_config(a.model_name), {"antialias": False}), a)
    file = open_weights(a.weights)
    num_classes, _ = count_outputs(file)
    names = class_names(num_classes, _read_label_map(a.label_map, num_classes))
    if not any(names):
        names = LabelMap.numbered(num_classes).names
    ids = [category_id for category_id, name in enumerate(names, 1) if name]
    classes = LabelMap(tuple(ids), tuple(filter(None, names)))
    model = build_model(config.model_name, classes.num_classes, config=config)
    report = assign(model, read_automl(file, model), classes, names, f"weights {a.weights}")
    metadata = make_metadata(config, classes, classes.num_classes, recipe={"init_from": a.weights})
    try:
        weight_files.save(model, a.output, metadata)
    except OSError as error:
        raise UserError(f"cannot write --output={a.output}: {weight_files.reason(error)}") from error
    print(f"{a.output}: {report}")


def _read_label_map(path: str | None, num_classes: int) -> LabelMap | None:
    if not path:
        return None
    label_map = LabelMap.load(path)
    first, last = label_map.category_ids[0], label_map.category_ids[-1]
    if not 1 <= first <= last <= num_classes:
        raise UserError(
            f"--label_map={path} has class ids from {first} to {last}, but the file of --weights has only "
            f"class ids from 1 to {num_classes}: choose the label map of these weights"
        )
    return label_map


def define_flags(fv: flags.FlagValues) -> None:
    args.define(fv, Args)


def main() -> None:
    convert(Args(**args.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    args.install(define_flags)
    errors.run(main)
