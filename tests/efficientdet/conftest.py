"""Runs the app's entry points inside the test process with the flags that a user would type."""

import pathlib

import pytest
from absl import flags

from common import flags as shared_flags
from efficientdet import eval as eval_app
from efficientdet import infer as infer_app
from efficientdet import train as train_app

# The smallest network of the family that still has every part: seconds to trace instead of tens of seconds.
TINY = "fpn_cells=1,head_repeats=1,max_level=5"
ENTRIES = {
    "train": (train_app, train_app.train),
    "eval": (eval_app, eval_app.evaluate_weights),
    "infer": (infer_app, infer_app.infer),
}


@pytest.fixture(scope="session")
def command():
    """command("train", "--batch_size=2", ...) -> what the entry function returns; errors stay UserErrors."""

    def run(entry: str, *arguments: str):
        module, function = ENTRIES[entry]
        fv = flags.FlagValues()
        module.define_flags(fv)
        fv([entry, *arguments])
        return function(**shared_flags.values(fv, module.define_flags))

    return run


@pytest.fixture(scope="session")
def tiny_train(command):
    """Trains the tiny network on a COCO directory (images/ and instances.json)."""

    def run(data: pathlib.Path, output_dir: pathlib.Path, *more: str):
        defaults = {
            "model_name": "efficientdet-nano",
            "image_size": "64x96",
            "batch_size": "4",
            "epochs": "2",
            "pipeline_type": "dali_cpu",
            "hparams": TINY,
        }
        named = {flag.removeprefix("--").partition("=")[0] for flag in more}
        given = [f"--{name}={value}" for name, value in defaults.items() if name not in named]
        if not any("synthetic" in flag for flag in more):
            given += [f"--train_images={data}/images", f"--train_annotations={data}/instances.json"]
            given += [f"--eval_images={data}/images", f"--eval_annotations={data}/instances.json"]
        return command("train", *given, f"--output_dir={output_dir}", *more)

    return run


@pytest.fixture(scope="session")
def trained(tiny_train, drawn, tmp_path_factory) -> pathlib.Path:
    """The run directory of two epochs on the drawn images."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    tiny_train(drawn, directory)
    return directory
