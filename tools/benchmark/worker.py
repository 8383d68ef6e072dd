"""Runs one candidate of bench.py: what a process does that rounds.py has started."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from common.data.open import open_data
from common.distributed.ranks import Ranks
from common.distributed.start import reproducible, start
from common.training import step_guard
from common.training.checkpoints import RunState
from common.training.ema import AveragedWeights
from common.training.input_feed import InputFeed
from tools.benchmark import exports, stages
from tools.benchmark.options import BenchApp, BenchArgs


def work(app: BenchApp, role: str, a: BenchArgs) -> None:
    """Runs one candidate.

    Args:
        role: model, data:TYPE, both:TYPE, stages:TYPE, inference:TYPE or export:FORMAT:QUANTIZE. TYPE is a
            pipeline type. The first three run until the process is killed. The last three print `result`
            and JSON in one line.
    """
    what, _, kind = role.partition(":")
    a = dataclasses.replace(a, pipeline_type="synthetic" if what in ("model", "export") else kind)
    reproducible()
    ranks = start("none")
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(a.precision)
    config, loaders = app.make_config(a), app.module("loaders")
    data = open_data(a, ranks, config.max_instances, synthetic_classes=app.num_classes)
    if what == "inference":
        model = app.module("train").make_model(config, data.num_classes)
        network, to_detections = app.module("predict").make_halves(model, config)
        data = data._replace(evaluation=data.train)
        sizes = [dataclasses.replace(a, batch_size=size) for size in (1, a.batch_size)]
        opened = [loaders.open_loader(each, ranks, config, data, training=False) for each in sizes]
        times = [stages.measure_inference(each, network, to_detections, data.label_map, a) for each in opened]
        print(f"result {json.dumps(times)}", flush=True)
        return
    if what == "export":
        model = app.module("train").make_model(config, data.num_classes)
        print(
            f"result {json.dumps(exports.measure(app, kind, model, config, data.label_map, a))}", flush=True
        )
        return
    epoch_options = functools.partial(loaders.epoch_options, config, a.seed)
    open_loader = functools.partial(loaders.open_loader, a, ranks, config, data, training=True)
    loader = open_loader(**epoch_options(epochs_done=0))
    if what == "stages":
        costs = stages.measure(stages.cuts(loader, app.stages), a)
        print(f"result {json.dumps(stages.summarize(costs, a.batch_size))}", flush=True)
    elif what == "data":
        tell_steps(stages.load(loader), a.batch_size)
    else:
        model = app.module("train").make_model(config, data.num_classes)
        feed = InputFeed(ranks, open_loader, epoch_options, RunState(), loader.steps_per_epoch, num_epochs=1)
        tell_steps(_make_step(app, config, model, feed, ranks, a), a.batch_size)


def tell_steps(advance: Callable[[], object], batch_size: int) -> None:
    """Calls `advance` until the process is killed, and prints a line after each call; see rounds.py."""
    for _ in range(stages.WARM_UP):
        advance()
    print("ready", flush=True)
    while True:
        advance()
        print(f"step {batch_size}", flush=True)


def _make_step(
    app: BenchApp, config: Any, model: keras.Model, feed: InputFeed, ranks: Ranks, a: BenchArgs
) -> Callable[[], None]:
    schedule = app.module("optimization").make_schedule(config, a.batch_size, feed.steps_per_epoch)
    optimizer = app.module("optimization").make_optimizer(config, schedule, precision=a.precision)
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, config.ema_decay)
    step = app.module("train").make_train_step(
        ranks, model, config, optimizer, averaged, precision=a.precision, xla=a.xla
    )
    guard = step_guard.StepGuard(ranks, limit=0)
    stop_requested = tf.constant(0.0)
    numbers = itertools.count(1)

    def advance() -> None:
        images, targets = next(feed)
        guard.check(next(numbers), step(images, targets, stop_requested), targets)

    return advance
