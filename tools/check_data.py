r"""Checks a data set before a long run: what is wrong with it, and what is in it.

    python tools/check_data.py --images=coco/train2017 \
        --annotations=coco/annotations/instances_train2017.json --decode --report=report.html

or --file_pattern='records/train-*.tfrecord'. With --eval_images and --eval_annotations (or
--eval_file_pattern) it also checks a second set, and that both mean the same categories. It ends with exit
code 1 and a list of everything that would make training wrong; or it prints what there is, what training
mends, and how well the anchors of an EfficientDet at --image_size fit.

Every training does the same check, without --decode, and remembers the result for unchanged files. --decode
checks every pixel, which alone finds damage in the middle of an image; its result is remembered, too.
"""

import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors, hparams
from common.anchors import Anchors
from common.args import ImagePolicy
from common.datasets import DataFlags
from common.errors import UserError
from tools.report import check_and_report


def define_flags(fv: flags.FlagValues) -> None:
    """The flags of this command."""
    for prefix, which in (("", "Data to check"), ("eval_", "Evaluation data to check with it")):
        flags.DEFINE_string(f"{prefix}images", None, f"{which}: directory of images.", flag_values=fv)
        flags.DEFINE_string(f"{prefix}annotations", None, f"{which}: COCO json.", flag_values=fv)
        flags.DEFINE_string(f"{prefix}file_pattern", None, f"{which}: glob of TFRecords.", flag_values=fv)
    flags.DEFINE_string("label_map", None, "Class names for TFRecords.", flag_values=fv)
    shared_flags.define(fv, shared_flags.Args, shared_flags.IMAGE_FLAGS)
    flags.DEFINE_bool("decode", False, "Check every pixel of every image.", flag_values=fv)
    flags.DEFINE_string("report", None, "Page to write, .html.", flag_values=fv)
    flags.DEFINE_string(
        "image_size", "512", "Network input for the anchors, N or HxW in pixels.", flag_values=fv
    )
    flags.DEFINE_float("anchor_scale", 4.0, "Scale of the anchors.", lower_bound=0.1, flag_values=fv)
    # google/automl efficientdet/hparams_config.py: aspect_ratios
    flags.DEFINE_list("aspect_ratios", ["1", "2", "0.5"], "Width / height of the anchors.", flag_values=fv)
    flags.DEFINE_integer("num_scales", 3, "Anchor scales per octave.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer("min_level", 3, "First level of the anchors.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer("max_level", 7, "Last level of the anchors.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer("max_instances", 100, "Boxes kept per image.", lower_bound=1, flag_values=fv)


def main() -> None:
    """The command."""
    fv = flags.FLAGS
    try:
        ratios, image_size = tuple(map(float, fv.aspect_ratios)), hparams.parse_image_size(fv.image_size)
        anchors = Anchors(fv.min_level, fv.max_level, fv.num_scales, ratios, fv.anchor_scale, image_size)
    except ValueError as error:
        raise UserError(f"the anchors cannot be made: {error}") from error
    check_and_report.check(
        DataFlags(fv.images, fv.annotations, fv.file_pattern),
        DataFlags(fv.eval_images, fv.eval_annotations, fv.eval_file_pattern),
        anchors,
        ImagePolicy(fv.on_bad_image, fv.max_megapixels, fv.decode),
        label_map=fv.label_map,
        report=fv.report,
        max_instances=fv.max_instances,
    )


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
