r"""How fast EfficientDet loads and trains on this machine, what each stage costs, and who waits for whom.

    python efficientdet/bench.py --model_name=efficientdet-d0 --batch_size=8 \
        --train_images=my/images --train_annotations=my/instances.json --json=runs/bench/d0.json

Without data it draws some. How it measures: tools/benchmark/measuring.py.
Two --json files side by side: python tools/bench.py OLD.json NEW.json
"""

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
from efficientdet import predict
from efficientdet.config import MODEL_NAMES, EfficientDetConfig
from efficientdet.loaders import make_loader
from efficientdet.model import build_model
from efficientdet.optimization import make_optimizer, make_schedule
from efficientdet.pipeline import EfficientDetPipeline
from efficientdet.train import make_train_step
from tools.benchmark import measuring, stages, worker
from tools.benchmark.steps import Step
from tools.dry_run import real_config


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_model_flags(fv, MODEL_NAMES, default="efficientdet-d0")
    measuring.define_flags(fv)


def make_config(given: dict[str, Any]) -> EfficientDetConfig:
    """The config that train.py would use."""
    return real_config("efficientdet", given)


def make_step(
    config: EfficientDetConfig, num_classes: int, steps_per_epoch: int, given: dict[str, Any]
) -> Step:
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


def make_halves(config: EfficientDetConfig, num_classes: int) -> tuple[Callable, Callable]:
    """What infer.py does to a batch, with random weights."""
    return predict.make_halves(build_model(config.model_name, num_classes, config=config), config)


def cuts(loader: EfficientDetPipeline, open_loader: Callable[..., Loader]) -> list[stages.Cut]:
    """The loader's graph cut after each stage, and what TensorFlow gets of it.

    On a CPU `.dataset()` encodes boxes after the graph, which `.pipeline` does within it.
    """
    marks = list(marked(loader.pipeline))
    found = [stages.of_graph(stage, loader.cut(stage)) for stage in marks]
    if loader.pipeline_type == "dali_gpu":
        return [*found, stages.of_graph("encode", loader.pipeline), stages.of_dataset("hand-over", loader)]
    return [
        *found,
        stages.of_dataset("hand-over", open_loader(with_targets=False)),
        stages.of_dataset("encode", loader),
        stages.of_graph("fn.box_encoder", loader.pipeline, instead=marks[-1]),
    ]


APP = worker.App("efficientdet", 90, make_config, make_loader, make_step, make_halves, cuts)


def main() -> None:
    measuring.start(APP, shared_flags.values(flags.FLAGS, define_flags), flags.FLAGS.role)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    measuring.define_role_flag(flags.FLAGS)
    errors.run(main)
