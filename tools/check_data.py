r"""Looks at a data set before a long run, and says in words what is wrong with it and what is in it.

    python tools/check_data.py --images=coco/train2017 \
        --annotations=coco/annotations/instances_train2017.json --decode --report=report.html

or --file_pattern='records/train-*.tfrecord'. With --eval_images and --eval_annotations (or
--eval_file_pattern) a second set is checked with it, and that both mean the same categories. Either exit code
1 and a list of everything that would make training wrong; or tables of what there is and what training mends,
and of how well the anchors of an EfficientDet at --image_size fit.

Every training does the same check, without --decode, and remembers what it saw of unchanged files. --decode
looks at every pixel, which alone finds damage in the middle of an image; it is remembered, too.
"""

import collections
import os
import pathlib
import sys
from collections.abc import Sequence

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import args as shared_flags
from common import errors, hparams
from common.anchors import Anchors
from common.box_encoder import MAX_INSTANCES
from common.datacheck.images import ImagePolicy, inspect_files
from common.datacheck.open_data import DataFlags, open_source, open_splits
from common.errors import UserError
from common.issues import DataError
from common.sources import CocoSource, Source
from tools.report import anchor_report, data_report, data_statistics, sample_sheet

ASPECT_RATIOS = ("1", "2", "0.5")  # google/automl efficientdet/hparams_config.py: aspect_ratios


def define_flags(fv: flags.FlagValues) -> None:
    for prefix, which in (("", "Data to check"), ("eval_", "Evaluation data to check with it")):
        flags.DEFINE_string(f"{prefix}images", None, f"{which}: directory of images.", flag_values=fv)
        flags.DEFINE_string(f"{prefix}annotations", None, f"{which}: COCO json.", flag_values=fv)
        flags.DEFINE_string(f"{prefix}file_pattern", None, f"{which}: glob of TFRecords.", flag_values=fv)
    flags.DEFINE_string("label_map", None, "Class names for TFRecords.", flag_values=fv)
    shared_flags.define_image_flags(fv)
    flags.DEFINE_bool("decode", False, "Look at every pixel of every image.", flag_values=fv)
    flags.DEFINE_string("report", None, "Write a page (.html) or a picture (.png).", flag_values=fv)
    flags.DEFINE_string("image_size", "512", "N or HxW: of the network, for the anchors.", flag_values=fv)
    flags.DEFINE_float("anchor_scale", 4.0, "Of the anchors.", lower_bound=0.1, flag_values=fv)
    flags.DEFINE_list("aspect_ratios", list(ASPECT_RATIOS), "Of the anchors.", flag_values=fv)
    flags.DEFINE_integer("num_scales", 3, "Of the anchors, per octave.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer("min_level", 3, "First level of the anchors.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer("max_level", 7, "Last level of the anchors.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer(
        "max_instances", MAX_INSTANCES, "Boxes kept per image.", lower_bound=1, flag_values=fv
    )


def check(
    *,
    images: str | None = None,
    annotations: str | None = None,
    file_pattern: str | None = None,
    eval_images: str | None = None,
    eval_annotations: str | None = None,
    eval_file_pattern: str | None = None,
    label_map: str | None = None,
    on_bad_image: str = "stop",
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS,
    decode: bool = False,
    report: str | None = None,
    image_size: str = "512",
    anchor_scale: float = 4.0,
    aspect_ratios: Sequence[str] = ASPECT_RATIOS,
    num_scales: int = 3,
    min_level: int = 3,
    max_level: int = 7,
    max_instances: int = MAX_INSTANCES,
) -> str:
    """Checks one data set, or two that belong together; prints, writes --report, and returns the text.

    See the flags of the same names.

    Raises:
        DataError: everything that would make training wrong; the report is written before.
        UserError: flags that cannot be used.
    """
    if report and pathlib.Path(report).suffix.lower() not in data_report.SUFFIXES:
        raise UserError(f"--report={report}: its name must end in {' or '.join(data_report.SUFFIXES)}")
    anchors = _anchors(image_size, anchor_scale, aspect_ratios, num_scales, min_level, max_level)
    policy = ImagePolicy(on_bad_image, max_megapixels, decode)
    given = DataFlags(images, annotations, file_pattern)
    evaluation = DataFlags(eval_images, eval_annotations, eval_file_pattern)
    sources: list[Source] = []
    try:
        if any(evaluation):
            sources += open_splits(given, evaluation, label_map=label_map, policy=policy, names=("", "eval"))
        else:
            sources.append(open_source(*given, label_map=label_map, policy=policy, split=""))
    except DataError as error:
        if report:
            data_report.write_faults(report, error.findings)
        raise
    parts = []
    for number, source in enumerate(sources):
        found = source.annotations
        statistics = data_statistics.describe(found, _formats(source, policy))
        fit = anchor_report.examine(found, anchors, max_instances=max_instances)
        parts.append(data_report.format_text(statistics, fit, found.findings))
        if report:
            path = pathlib.Path(report)
            path = path.with_stem(f"{path.stem}_eval") if number else path
            samples = sample_sheet.read(sample_sheet.choose(found), source.encoded)
            data_report.write(path, statistics, fit, found.findings, found, sample_images=samples)
            parts.append(f"report: {path}")
    text = "\n\n".join(parts)
    print(text)
    return text


def _anchors(
    image_size: str,
    anchor_scale: float,
    aspect_ratios: Sequence[str],
    num_scales: int,
    min_level: int,
    max_level: int,
) -> Anchors:
    try:
        ratios = [float(ratio) for ratio in aspect_ratios]
        return Anchors(
            min_level, max_level, num_scales, ratios, anchor_scale, hparams.parse_image_size(image_size)
        )
    except ValueError as error:
        raise UserError(f"the anchors cannot be made: {error}") from error


def _formats(source: Source, policy: ImagePolicy) -> dict[str, int]:
    """How many images are in which format, by what the check has just seen and remembered."""
    if not isinstance(source, CocoSource):
        return source.records.formats
    names = source.annotations.file_names
    facts = inspect_files(source.images_dir, names, max_megapixels=policy.max_megapixels)
    return dict(collections.Counter(fact.image_format for fact in facts).most_common())


def main() -> None:
    check(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
