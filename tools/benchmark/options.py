"""The flags of each app's bench.py, and a description of the app."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from common import args as shared_flags
from common import errors, hparams
from common.args import flag
from common.progress import import_tensorflow

WHAT = ("data", "model", "both", "stages", "inference")
TYPES = ("dali_gpu", "dali_cpu", "tensorflow")  # pipeline types that read data
_OF_TRAINING = (
    *("image_size", "num_classes", "hparams", "precision", "xla"),
    *("input_type", "label_map", "train_images", "train_annotations", "train_file_pattern"),
    *shared_flags.BATCH_FLAGS,
    *shared_flags.DECODER_FLAGS,
)


class App(NamedTuple):
    """Describes an app to its bench.py.

    Attributes:
        name: directory of the app.
        num_classes: number of classes of the published model.
        stages: the stages of the app's DALI graph; see stages.stage_nodes.
        fixed: values of config fields that differ from train.py's config.
    """

    name: str
    num_classes: int
    stages: Mapping[str, str]
    fixed: Mapping[str, Any]

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")

    def make_config(self, a: shared_flags.Args) -> Any:
        """Returns the config that train.py makes, with the values of `fixed`."""
        row = self.module("config").get_config(a.model_name)
        return hparams.replace(hparams.resolve(row, a), self.fixed)


@dataclasses.dataclass(frozen=True)
class BenchArgs(shared_flags.Args):
    """The flags of bench.py."""

    what: str = flag("data,model,both,stages", f"What to measure, comma-separated, from {','.join(WHAT)}.")
    pipeline_types: str | None = flag(
        None, f"Loaders to measure, comma-separated, from {','.join(TYPES)}. Default: all that run here."
    )
    rounds: int = flag(5, "Number of rounds. Each round measures everything once.", low=1)
    seconds: float = flag(5.0, "Minimum duration of each measurement in seconds.", low=0.01)
    synthetic_images: int = flag(256, "Number of synthetic images to draw if no data are given.", low=1)
    json: str | None = flag(None, "JSON file to write with all results.")
    baseline: Sequence[str] = ()
    role: str | None = flag(None, "Internal, not for users: the candidate that this process runs.")


def flags_of(app: App) -> Callable[[flags.FlagValues], None]:
    def define(fv: flags.FlagValues) -> None:
        names = app.module("config").MODEL_NAMES
        shared_flags.define_flag(fv, "model_name", str, shared_flags.model_name_flag(names, names[0]))
        own = ("what", "pipeline_types", "rounds", "seconds", "synthetic_images", "json", "role")
        shared_flags.define(fv, BenchArgs, [*_OF_TRAINING, *own])
        help_text = (
            "NAME=COMMAND: another program to measure; may be repeated. The program must print `ready`, then "
            "`step N` after every N images, until it is killed."
        )
        flags.DEFINE_multi_string("baseline", [], help_text, flag_values=fv)

    return define


def main(app: App) -> None:
    define = flags_of(app)
    shared_flags.install(define)

    def measure() -> None:
        import_tensorflow()
        from tools.benchmark import measuring

        measuring.start(app, BenchArgs(**shared_flags.values(flags.FLAGS, define)))

    errors.run(measure)
