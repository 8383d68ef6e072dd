"""One candidate of an app's bench.py, in a separate process: a loader, a training step, or both.

It keeps to the protocol of rounds.py, as a baseline's script does.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from common import args, devices, hparams
from common.datacheck.open_data import open_checked
from common.distributed import ranks as distributed
from common.distributed.ranks import Ranks
from common.loader import BaseLoader, placement
from common.sources import CocoSource, ImageListSource
from common.training import step_guard
from common.training.ema import AveragedWeights
from common.training.input_feed import open_data
from tools.benchmark import inference, stages
from tools.benchmark.protocol import own_stdout, tell_steps
from tools.benchmark.summary import Record


class App(NamedTuple):
    """What an app's bench.py measures.

    Attributes:
        name: its folder.
        model_name: default of --model_name.
        num_classes: of the published model, for a synthetic batch without data.
        stages: of its DALI graph; see stages.stage_nodes.
        fixed: fields of the config with other values than train.py's.
        config, loaders, optimization, predict, train: the app's modules of these names.
    """

    name: str
    model_name: str
    num_classes: int
    stages: Mapping[str, str]
    fixed: Mapping[str, Any]
    config: Any
    loaders: Any
    optimization: Any
    predict: Any
    train: Any

    def make_config(self, a: args.Args) -> Any:
        """The config that train.py makes of these flags, but for `self.fixed`."""
        return hparams.replace(hparams.resolve(self.config.get_config(a.model_name), a), self.fixed)


def work(app: App, a: Any, role: str) -> None:
    """Runs one candidate until it is killed, or measures stages or inference and prints one line of JSON.

    Args:
        app: whose bench.py this is.
        a: the flags, measuring.BenchArgs.
        role: model, data:TYPE, both:TYPE, stages:TYPE or inference:TYPE, with a pipeline type.
    """
    what, _, pipeline_type = role.partition(":")
    dali_device_id = a.dali_device_id if pipeline_type == "dali_gpu" else None
    a = dataclasses.replace(a, pipeline_type=pipeline_type or "synthetic", dali_device_id=dali_device_id)
    devices.reproducible()
    ranks = distributed.start("none")
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(a.precision)
    config = app.make_config(a)
    data = open_data(
        a, ranks, open_checked, max_instances=config.max_instances, synthetic_classes=app.num_classes
    )

    def open_loader(**options: Any) -> BaseLoader:
        like_train = {
            "source": data.train,
            "config": config,
            "batch_size": a.batch_size,
            "training": True,
            "num_threads": a.num_threads,
            "prefetch": a.prefetch,
            "count_lost": True,
            "name_images": True,
            "num_classes": data.num_classes,
            "dali_device_id": a.dali_device_id,
        }
        return app.loaders.make_loader(a.pipeline_type, **like_train | options)

    if what == "data":
        tell_steps(stages.load(open_loader()), a.batch_size)
    elif what == "stages":
        with own_stdout() as tell:
            tell(json.dumps(stages.measure(stages.cuts(open_loader(), app.stages, open_loader), a)))
    else:
        model = app.train.make_model(config, data.num_classes)
        if what == "inference":
            halves = app.predict.make_halves(model, config)
            with own_stdout() as tell:
                tell(json.dumps(_measure_inference(app, halves, data.train, open_loader, a)))
        else:
            tell_steps(_make_step(app, config, model, open_loader(), ranks, a), a.batch_size)


def _make_step(
    app: App, config: Any, model: keras.Model, loader: BaseLoader, ranks: Ranks, a: args.Args
) -> Callable[[], None]:
    """A function that takes a batch from the loader, and train.py's step of a new model with it."""
    schedule = app.optimization.make_schedule(config, a.batch_size, loader.steps_per_epoch)
    optimizer = app.optimization.make_optimizer(config, schedule, precision=a.precision)
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, config.ema_decay)
    step = app.train.make_train_step(
        ranks, model, config, optimizer, averaged, precision=a.precision, xla=a.xla
    )
    guard = step_guard.StepGuard(ranks, limit=0, save_batch=lambda *_: None)
    stop_requested = tf.constant(0.0)
    with placement(loader):
        batches = enumerate(loader.dataset(), start=1)

    def advance() -> None:
        number, (images, targets) = next(batches)
        guard.check(number, step(images, targets, stop_requested), images, targets)

    return advance


def _measure_inference(
    app: App,
    halves: inference.Halves,
    source: Any,
    open_loader: Callable[..., BaseLoader],
    a: Any,
) -> list[Record]:
    """Measures detecting, one image at a time and a batch at a time: inference.measure for each."""
    label_map, draw = source.label_map, None
    if isinstance(source, CocoSource):  # its files can be drawn on, as infer.py does
        files = [pathlib.Path(source.images_dir, name) for name in source.annotations.file_names]
        source, draw = ImageListSource(tuple(files)), inference.drawer(files, label_map)
    options = {"training": False, "with_targets": False, "count_lost": False, "name_images": False}
    found = []
    for batch_size in (1, a.batch_size):
        loader, decode = open_loader(source=source, batch_size=batch_size, **options), None
        if loader.pipeline_type != "tensorflow":
            nodes = stages.stage_nodes(loader.pipeline, app.stages)
            decode = stages.truncate_at(loader.pipeline, nodes["decode"])
        found.append(
            inference.measure(
                loader=loader,
                halves=halves,
                label_map=label_map,
                decode=decode,
                draw=draw,
                prefetch=a.prefetch,
                num_rounds=a.rounds,
            )
        )
    return found
