"""Small settings of both apps, and their flags as the commands parse them."""

import contextlib
import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import flags

from common import args

IMAGES = 12
TINY = {
    "efficientdet": "fpn_cells=1,head_repeats=1,max_level=5,optimizer=sgd",
    "yolov4": "width=0.25,optimizer=sgd",
}


def flag_values(program: str, *arguments: str) -> tuple[types.ModuleType, dict[str, Any]]:
    """Imports `program`, for example "yolov4.eval". Returns the module and the values of its flags."""
    module = importlib.import_module(program)
    fv = flags.FlagValues()
    module.define_flags(fv)
    fv([program, *arguments])
    return module, args.values(fv, module.define_flags)


def parsed(app: str, *arguments: str) -> tuple[types.ModuleType, args.Args]:
    """Returns the app's train.py as a module, and its Args."""
    module, values = flag_values(f"{app}.train", *arguments)
    return module, module.Args(**values)


def training_flags(app: str, data: object, output_dir: object, strategy: str, batch_size: int) -> list[str]:
    model = [f"--model_name={app}-nano", f"--hparams={TINY[app]}", "--image_size=64x96"]
    data_flags = [f"--train_images={data}/images", f"--train_annotations={data}/instances.json"]
    loader = ["--pipeline_type=dali_cpu", "--num_threads=1", f"--batch_size={batch_size}"]
    return [*model, *data_flags, *loader, f"--output_dir={output_dir}", f"--strategy={strategy}"]


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """A few eager steps take less time than tracing a graph."""
    tf.config.run_functions_eagerly(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Even though the")
            yield
    finally:
        tf.config.run_functions_eagerly(False)
