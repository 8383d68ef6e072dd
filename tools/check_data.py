r"""Checks a data set before a long run, and reports its errors and its contents.

    python tools/check_data.py --images=coco/train2017 \
        --annotations=coco/annotations/instances_train2017.json --decode --report=report.html

For TFRecords or WebDataset, give --file_pattern='records/train-*.tfrecord' instead. --eval_images and
--eval_annotations (or --eval_file_pattern) also check evaluation data. In a recipe (--flagfile),
--train_images and so on name the data to check, unless the command has its own. If training would go wrong,
the command lists all errors and ends with exit code 1. Otherwise it prints statistics. --report writes an
HTML page with figures, images and all errors, and adds how well anchors fit the boxes.
--model_name=yolov4-tiny, or a recipe such as --flagfile=yolov4/flags/finetune.txt, selects the model whose
anchors are judged.

--decode decodes every image completely: only this finds damage in the middle of a file. Training starts with
the same check, but does not decode.
"""

import collections
import contextlib
import dataclasses
import pathlib
import re
import sys
import types
from typing import TYPE_CHECKING

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors, hparams
from common.args import ImagePolicy
from common.data.annotations import Annotations
from common.data.check.images import files_to_check, inspect_files
from common.data.check.issues import DataError
from common.data.coco import CocoSource
from common.data.open import DataFlags, open_pair
from common.data.sources import Source
from common.errors import UserError
from common.progress import import_tensorflow, log
from efficientdet import config as efficientdet
from tools.report import anchor_shapes, page, statistics
from yolov4 import config as yolov4

if TYPE_CHECKING:
    from tools.report.anchors import AnchorReport  # imports TensorFlow and DALI

Config = efficientdet.EfficientDetConfig | yolov4.YOLOv4Config

MODEL_NAMES = (*efficientdet.MODEL_NAMES, *yolov4.MODEL_NAMES)
ANCHOR_FLAGS = (
    *("hparams", "image_size", "letterbox", "max_instances"),
    *("anchor_scale", "aspect_ratios", "num_scales", "min_level", "max_level"),
)
# The flags of both apps' train.py, which imports TensorFlow.
TRAINING_FLAGS = {field.name for field in dataclasses.fields(shared_flags.Args)}
TRAINING_FLAGS |= {"letterbox", "close_mosaic"}  # of yolov4/train.py


def define_flags(fv: flags.FlagValues) -> None:
    for prefix, which in (("", "Data to check"), ("eval_", "Evaluation data, checked as well")):
        flags.DEFINE_string(f"{prefix}images", None, f"{which}: directory of images.", flag_values=fv)
        flags.DEFINE_string(f"{prefix}annotations", None, f"{which}: COCO json.", flag_values=fv)
        flags.DEFINE_string(
            f"{prefix}file_pattern", None, f"{which}: glob of TFRecords or WebDataset shards.", flag_values=fv
        )
    flags.DEFINE_string("label_map", None, "Categories of TFRecords: json or .pbtxt file.", flag_values=fv)
    shared_flags.define(fv, shared_flags.Args, (*shared_flags.IMAGE_FLAGS, "coco_pixels", "check"))
    flags.DEFINE_bool("decode", False, "Decode every image completely to find damage.", flag_values=fv)
    flags.DEFINE_string("report", None, "Report to write, an .html file.", flag_values=fv)
    flags.DEFINE_string(
        "model_name",
        "efficientdet-d0",
        f"Model of the anchors: one of {', '.join(MODEL_NAMES)}.",
        flag_values=fv,
    )
    shared_flags.define(fv, shared_flags.Args, ("hparams", "image_size"))
    default = "Default: the model's."
    flags.DEFINE_bool("letterbox", None, f"YOLOv4: letterbox images, not stretch. {default}", flag_values=fv)
    flags.DEFINE_float(
        "anchor_scale", None, f"Min. anchor side, in strides. {default}", lower_bound=0.1, flag_values=fv
    )
    flags.DEFINE_list("aspect_ratios", None, f"Width / height of the anchors. {default}", flag_values=fv)
    for name, text, low in (
        ("num_scales", "Anchor scales per octave.", 1),
        ("min_level", "Lowest pyramid level with anchors.", 0),
        ("max_level", "Highest pyramid level with anchors.", 0),
        ("max_instances", "Max. boxes kept per image.", 1),
    ):
        flags.DEFINE_integer(name, None, f"{text} {default}", lower_bound=low, flag_values=fv)


def model_config(model_name: str, **values: object) -> Config:
    """Returns the config of a model of one of the apps, changed by the flags `values`. Raises UserError."""
    if model_name not in MODEL_NAMES:
        raise errors.unknown("model", model_name, MODEL_NAMES)
    app = yolov4 if model_name in yolov4.MODEL_NAMES else efficientdet
    config: Config = app.get_config(model_name)
    for name in set(values) - {"hparams"}:
        if values[name] is not None and not hasattr(config, name):
            raise UserError(f"--{name} has no effect on the anchors of {model_name}: remove it")
    return hparams.resolve(config, types.SimpleNamespace(**{"hparams": None} | values))


def without_training_flags(argv: list[str]) -> list[str]:
    """Replaces --flagfile by its flags, except those that only train.py has.

    --train_images becomes --images, and so on. If `argv` names the data to check, logs that the training data
    of the recipe are not checked.
    """
    fv = flags.FlagValues()
    define_flags(fv)
    only_training = TRAINING_FLAGS - set(fv)
    result, data_flags = [], [argument for argument in argv if _flag_name(argument) in DataFlags._fields]
    for argument in fv.read_flags_from_files(argv):
        name = _flag_name(argument)
        if argument in argv or not {name, name.removeprefix("no")} & only_training:
            result.append(argument)
        elif name.removeprefix("train_") in DataFlags._fields and not data_flags:
            result.append(argument.replace("train_", "", 1))
        elif name.removeprefix("train_") in DataFlags._fields:
            log(f"{argument} is not checked, because {data_flags[0]} is given")
    return result


def _flag_name(argument: str) -> str:
    return re.sub("^--?|=.*", "", argument)


def check(
    data: DataFlags,
    evaluation: DataFlags,
    config: Config | None,
    policy: ImagePolicy,
    *,
    label_map: str | None = None,
    report: str | None = None,
) -> str:
    """Checks data, prints a summary, and returns it. Also writes an HTML page if `report` is given.

    Args:
        data: paths of the data set.
        evaluation: paths of evaluation data to check together with `data`; they may be None.
        config: the model whose anchors are judged; None: do not judge anchors.
        label_map: path of the file with the class names of TFRecords.
        report: path of the HTML page. Evaluation data get a second page, with `_eval` in its name.

    Raises:
        DataError: the data cannot be used for training. The HTML page lists all errors.
        UserError: flags cannot be used.
    """
    if report:
        page.check_suffix(report)
    try:
        sources = open_pair(data, evaluation, label_map=label_map, policy=policy, names=("", "eval"))
    except DataError as error:
        if report:
            page.write(report, [page.Section(each.origin, page.issue_items(each)) for each in error.issues])
        raise
    parts = []
    for number, source in enumerate(filter(None, sources)):
        annotations = source.annotations
        data_statistics = statistics.describe(annotations, _formats(source, policy))
        anchors = examine_anchors(annotations, config) if config else None
        images = []
        if report:
            import_tensorflow()  # slow to import; only anchors and figures need it
            from tools.report import pictures

            images = pictures.draw(data_statistics, anchors, annotations, source.encoded)
        items = page.anchor_items(anchors) if anchors else ()
        sections = page.sections(data_statistics, annotations.issues, items, images)
        parts.append(page.format_text(sections))
        if report:
            path = pathlib.Path(report)
            path = path.with_stem(f"{path.stem}_eval") if number else path
            page.write(path, sections)
            parts.append(f"report: {path}")
    text = "\n\n".join(parts)
    print(text)
    return text


def examine_anchors(
    annotations: Annotations, config: Config
) -> "AnchorReport | anchor_shapes.ShapeReport | str":
    """Returns how well a model's anchors fit the boxes, or a sentence if their IoU does not matter."""
    if isinstance(config, yolov4.YOLOv4Config):
        return anchor_shapes.examine(annotations, config)
    if config.assignment != "max_iou":
        return (
            f"{config.model_name} assigns each box to the anchors that predict it best "
            f"(assignment={config.assignment}), not by the IoU of anchors, so the anchors are not judged."
        )
    import_tensorflow()
    from tools.report.anchors import examine

    return examine(
        annotations,
        config.anchors,
        max_instances=config.max_instances,
        min_box_size=config.min_box_size,
    )


def _formats(source: Source, policy: ImagePolicy) -> dict[str, int]:
    if isinstance(source, CocoSource):
        names = files_to_check(source.annotations.file_names, policy)
        facts = inspect_files(source.images_dir, names, policy)
        return collections.Counter(fact.image_format for fact in facts)
    return source.formats  # type: ignore[attr-defined]  # a TFRecordSource


def main() -> None:
    fv = flags.FLAGS
    judges_anchors = fv.report or fv["model_name"].present
    for name in ANCHOR_FLAGS:
        if fv[name].present and not judges_anchors:
            raise UserError(f"--{name} has no effect without --report=FILE.html or --model_name: add one")
    values = {name: fv[name].value for name in ANCHOR_FLAGS}
    if fv.aspect_ratios is not None:
        try:
            values["aspect_ratios"] = tuple(map(float, fv.aspect_ratios))
        except ValueError as error:
            raise UserError(f"--aspect_ratios={','.join(fv.aspect_ratios)}: give numbers") from error
    config = model_config(fv.model_name, **values)
    if fv.check != "all" and not (fv.annotations or fv.eval_annotations):
        raise UserError(f"--check={fv.check} has no effect without a COCO json: omit the flag")
    if fv.check == "none" and fv.decode:
        raise UserError("--decode has no effect with --check=none: omit one of the two")
    check(
        DataFlags(fv.images, fv.annotations, fv.file_pattern),
        DataFlags(fv.eval_images, fv.eval_annotations, fv.eval_file_pattern),
        config if judges_anchors else None,
        ImagePolicy(fv.on_bad_image, fv.max_megapixels, fv.decode, fv.coco_pixels, fv.check),
        label_map=fv.label_map,
        report=fv.report,
    )


if __name__ == "__main__":
    shared_flags.install(define_flags)
    with contextlib.suppress(flags.Error):  # the parser reports a flagfile that cannot be read
        sys.argv = without_training_flags(sys.argv)
    errors.run(main)
