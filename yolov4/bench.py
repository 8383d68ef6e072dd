r"""How fast YOLOv4 loads and trains on this machine, what each stage costs, and who waits for whom.

    python yolov4/bench.py --model_name=yolov4 --image_size=416 --batch_size=4 \
        --train_images=my/images --train_annotations=my/instances.json --json=runs/bench/yolov4.json

Without data it draws some. How it measures: tools/benchmark/measuring.py.
Two --json files side by side: python tools/bench.py OLD.json NEW.json
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import args as shared_flags
from common import errors
from common.dali_ops import marked
from common.distributed import ranks as distributed
from common.loading import Loader
from common.training.ema import AveragedWeights
from tools.benchmark import measuring, stages, worker
from tools.benchmark.steps import Step
from tools.dry_run import real_config
from yolov4 import predict
from yolov4.config import MODEL_NAMES, YOLOv4Config
from yolov4.loaders import make_loader
from yolov4.model import build_model
from yolov4.optimization import make_optimizer, make_schedule
from yolov4.pipeline import YOLOv4Pipeline
from yolov4.train import make_train_step


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_model_flags(fv, MODEL_NAMES, default="yolov4")
    measuring.define_flags(fv)


def make_config(given: dict[str, Any]) -> YOLOv4Config:
    """The config that train.py would use, but for one size: the rate of many would need long windows."""
    return dataclasses.replace(real_config("yolov4", given), multi_scale=1.0)


def make_step(config: YOLOv4Config, num_classes: int, steps_per_epoch: int, given: dict[str, Any]) -> Step:
    """train.py's step of a new model, one rank."""
    ranks = distributed.start("none")
    model = build_model(config.model_name, num_classes, config=config)
    schedule = make_schedule(config, given["batch_size"], steps_per_epoch)
    optimizer = make_optimizer(config, schedule, precision=given["precision"])
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, config.ema_decay)
    return make_train_step(
        ranks, model, config, optimizer, averaged, precision=given["precision"], xla=given["xla"]
    )


def make_halves(config: YOLOv4Config, num_classes: int) -> tuple[Callable, Callable]:
    """What infer.py does to a batch, with random weights."""
    return predict.make_halves(build_model(config.model_name, num_classes, config=config), config)


def cuts(loader: YOLOv4Pipeline, open_loader: Callable[..., Loader]) -> list[stages.Cut]:
    """The loader's graph cut after each stage, and what TensorFlow gets of it."""
    found = [stages.of_graph(stage, loader.cut(stage)) for stage in marked(loader.pipeline)]
    last = stages.of_graph("boxes", loader.pipeline)
    return [*found, last, stages.of_dataset("hand-over", loader)]


APP = worker.App("yolov4", 80, make_config, make_loader, make_step, make_halves, cuts)


def main() -> None:
    measuring.start(APP, shared_flags.values(flags.FLAGS, define_flags), flags.FLAGS.role)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    measuring.define_role_flag(flags.FLAGS)
    errors.run(main)
