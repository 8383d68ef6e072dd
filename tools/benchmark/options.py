"""The apps that tools/bench.py measures, and its flags."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from common import args, errors, hparams
from common.args import flag

WHAT = ("data", "model", "both", "stages", "inference")
TYPES = ("dali_gpu", "dali_cpu", "tensorflow")  # pipeline types that read data
_OF_TRAINING = (
    *("model_name", "image_size", "num_classes", "hparams", "precision", "xla"),
    *("input_type", "label_map", "train_images", "train_annotations", "train_file_pattern"),
    *args.BATCH_FLAGS,
    *args.DECODER_FLAGS,
)


@dataclasses.dataclass(frozen=True)
class BenchArgs(args.Args):
    """The flags of bench.py. Of the flags of train.py, it has those that change the speed."""

    model_name: str = flag("", "Model. Default: efficientdet-d0 or yolov4.")
    what: str = flag("data,model,both,stages", f"What to measure, comma-separated, from {','.join(WHAT)}.")
    pipeline_types: str | None = flag(
        None, f"Loaders to measure, comma-separated, from {','.join(TYPES)}. Default: all that run here."
    )
    rounds: int = flag(5, "Number of rounds. Each round measures everything once.", low=1)
    seconds: float = flag(5.0, "Minimum duration of each measurement in seconds.", low=0.01)
    synthetic_images: int = flag(256, "Number of synthetic images to draw if no data are given.", low=1)
    json: str | None = flag(None, "JSON file to write with all results.")
    baseline: Sequence[str] = ()


_OF_BENCH = ("what", "pipeline_types", "rounds", "seconds", "synthetic_images", "json")


def define_flags(fv: flags.FlagValues) -> None:
    args.define(fv, BenchArgs, [*_OF_TRAINING, *_OF_BENCH])
    help_text = (
        "NAME=COMMAND: another program to measure; may be repeated. The program must print `ready`, then "
        "`step N` after every N images, until it is killed."
    )
    flags.DEFINE_multi_string("baseline", [], help_text, flag_values=fv)


@dataclasses.dataclass(frozen=True)
class BenchApp:
    """An app, as bench.py needs it.

    Attributes:
        name: directory of the app.
        model_name: the model that is measured by default.
        num_classes: number of classes of the published model.
        stages: name of a stage of the app's DALI graph -> its last operators; see stages.stage_nodes.
        fixed: values of config fields that differ from train.py's config.
    """

    name: str
    model_name: str
    num_classes: int
    stages: Mapping[str, str]
    fixed: Mapping[str, Any]

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")

    def make_config(self, a: args.Args) -> Any:
        """Returns the config that train.py makes, with the values of `fixed`."""
        row = self.module("config").get_config(a.model_name)
        return hparams.replace(hparams.resolve(row, a), self.fixed)


_APPS = (
    BenchApp(
        name="efficientdet",
        model_name="efficientdet-d0",
        num_classes=90,
        stages={
            "read": "reader",
            "decode": "Image|ImageSlice",
            "resize": "Resize",
            "augment": "Flip|GridMask|ColorTwist",
            "normalize": "CropMirrorNormalize",
        },
        fixed={},
    ),
    BenchApp(
        name="yolov4",
        model_name="yolov4",
        num_classes=80,
        stages={
            "read": "reader",
            "decode": "Image|ImageSlice",
            "resize": "Resize",
            "color": "Hsv",
            "place": "Slice",
            "mosaic": "MultiPaste",
        },
        fixed={"multi_scale": 1.0},  # one image size: with many sizes, a measurement would take long
    ),
)
APPS = {app.name: app for app in _APPS}


def chosen(kind: str, text: str, known: Sequence[str]) -> list[str]:
    """Splits a comma-separated list. Raises UserError for an unknown name."""
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise errors.unknown(kind, name, known)
    return list(names)
