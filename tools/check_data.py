r"""Checks a data set before a long run, and reports its errors and its contents.

    python tools/check_data.py --images=coco/train2017 \
        --annotations=coco/annotations/instances_train2017.json --decode --report=report.html

For TFRecords, give --file_pattern='records/train-*.tfrecord' instead. --eval_images and --eval_annotations
(or --eval_file_pattern) also check evaluation data. If training would go wrong, the command lists all errors
and ends with exit code 1. Otherwise it prints statistics. --report writes an HTML page with figures, images
and all errors, and adds how well EfficientDet's anchors fit the boxes.

--decode decodes every image completely: only this finds damage in the middle of a file. Training starts with
the same check, but does not decode.
"""

import collections
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors, hparams
from common.anchors import MAX_INSTANCES, Anchors
from common.args import ImagePolicy
from common.data.check.images import inspect_files
from common.data.check.issues import DataError
from common.data.open import DataFlags, open_pair
from common.data.sources import CocoSource, Source
from common.errors import UserError
from common.progress import import_tensorflow
from tools.report import page, statistics

ANCHOR_FLAGS = (
    *("image_size", "anchor_scale", "aspect_ratios", "num_scales", "min_level", "max_level"),
    "max_instances",
)


def define_flags(fv: flags.FlagValues) -> None:
    for prefix, which in (("", "Data to check"), ("eval_", "Evaluation data, checked as well")):
        flags.DEFINE_string(f"{prefix}images", None, f"{which}: directory of images.", flag_values=fv)
        flags.DEFINE_string(f"{prefix}annotations", None, f"{which}: COCO json.", flag_values=fv)
        flags.DEFINE_string(f"{prefix}file_pattern", None, f"{which}: glob of TFRecords.", flag_values=fv)
    flags.DEFINE_string("label_map", None, "Categories of TFRecords: json or .pbtxt file.", flag_values=fv)
    shared_flags.define(fv, shared_flags.Args, (*shared_flags.IMAGE_FLAGS, "coco_pixels"))
    flags.DEFINE_bool("decode", False, "Decode every image completely to find damage.", flag_values=fv)
    flags.DEFINE_string("report", None, "Report to write, an .html file.", flag_values=fv)
    flags.DEFINE_string(
        "image_size", "512", "Network input size for the anchors, N or HxW in pixels.", flag_values=fv
    )
    flags.DEFINE_float("anchor_scale", 4.0, "Min. anchor side, in strides.", lower_bound=0.1, flag_values=fv)
    # The default is the value of aspect_ratios in google/automl efficientdet/hparams_config.py.
    flags.DEFINE_list("aspect_ratios", ["1", "2", "0.5"], "Width / height of the anchors.", flag_values=fv)
    flags.DEFINE_integer("num_scales", 3, "Anchor scales per octave.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer("min_level", 3, "Lowest pyramid level with anchors.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer("max_level", 7, "Highest pyramid level with anchors.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer("max_instances", 100, "Max. boxes kept per image.", lower_bound=1, flag_values=fv)


def check(
    data: DataFlags,
    evaluation: DataFlags,
    anchors: Anchors,
    policy: ImagePolicy,
    *,
    label_map: str | None = None,
    report: str | None = None,
    max_instances: int = MAX_INSTANCES,
) -> str:
    """Checks data, prints a summary, and returns it. Also writes an HTML page if `report` is given.

    Args:
        data: paths of the data set.
        evaluation: paths of evaluation data to check together with `data`; they may be None.
        label_map: path of the file with the class names of TFRecords.
        report: path of the HTML page. Evaluation data get a second page, with `_eval` in its name.
        max_instances: largest number of boxes kept per image.

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
        if report:
            import_tensorflow()  # slow to import; only the anchors need it
            from tools.report import pictures
            from tools.report.anchors import examine

            path = pathlib.Path(report)
            path = path.with_stem(f"{path.stem}_eval") if number else path
            anchor_report = examine(annotations, anchors, max_instances=max_instances)
            images = pictures.draw(data_statistics, anchor_report, annotations, source.encoded)
            sections = page.sections(data_statistics, annotations.issues, anchor_report, images)
            page.write(path, sections)
            parts += [page.format_text(sections), f"report: {path}"]
        else:
            parts.append(page.format_text(page.sections(data_statistics, annotations.issues)))
    text = "\n\n".join(parts)
    print(text)
    return text


def _formats(source: Source, policy: ImagePolicy) -> dict[str, int]:
    if isinstance(source, CocoSource):
        facts = inspect_files(source.images_dir, source.annotations.file_names, policy)
        return collections.Counter(fact.image_format for fact in facts)
    return source.formats  # type: ignore[attr-defined]  # a TFRecordSource


def main() -> None:
    fv = flags.FLAGS
    for name in ANCHOR_FLAGS:
        if fv[name].present and not fv.report:
            raise UserError(f"--{name} has no effect without --report=FILE.html: add it")
    try:
        ratios, image_size = tuple(map(float, fv.aspect_ratios)), hparams.parse_image_size(fv.image_size)
        anchors = Anchors(fv.min_level, fv.max_level, fv.num_scales, ratios, fv.anchor_scale, image_size)
    except ValueError as error:
        raise UserError(f"the anchors cannot be made: {error}") from error
    check(
        DataFlags(fv.images, fv.annotations, fv.file_pattern),
        DataFlags(fv.eval_images, fv.eval_annotations, fv.eval_file_pattern),
        anchors,
        ImagePolicy(fv.on_bad_image, fv.max_megapixels, fv.decode, fv.coco_pixels),
        label_map=fv.label_map,
        report=fv.report,
        max_instances=fv.max_instances,
    )


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
