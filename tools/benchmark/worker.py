"""Runs one candidate of bench.py: what a process does that rounds.py has started."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from common.data.loader import BaseLoader
from common.data.open import open_data
from common.distributed.ranks import Ranks
from common.distributed.start import reproducible, start
from common.training import step_guard
from common.training.ema import AveragedWeights
from tools.benchmark import stages
from tools.benchmark.options import BenchApp, BenchArgs


def work(app: BenchApp, role: str, a: BenchArgs) -> None:
    """Runs one candidate.

    Args:
        role: model, data:TYPE, both:TYPE, stages:TYPE or inference:TYPE. TYPE is a pipeline type. The first
            three run until the process is killed. The last two print `result` and JSON in one line.
    """
    what, _, pipeline_type = role.partition(":")
    a = dataclasses.replace(a, pipeline_type=pipeline_type or "synthetic")
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
    epoch = loaders.epoch_options(config, a.seed, epochs_done=0)
    loader = loaders.open_loader(a, ranks, config, data, training=True, **epoch)
    if what == "stages":
        costs = stages.measure(stages.cuts(loader, app.stages), a)
        print(f"result {json.dumps(stages.summarize(costs, a.batch_size))}", flush=True)
    elif what == "data":
        tell_steps(stages.load(loader), a.batch_size)
    else:
        model = app.module("train").make_model(config, data.num_classes)
        tell_steps(_make_step(app, config, model, loader, ranks, a), a.batch_size)


def tell_steps(advance: Callable[[], object], batch_size: int) -> None:
    """Calls `advance` until the process is killed, and prints a line after each call; see rounds.py."""
    for _ in range(stages.WARM_UP):
        advance()
    print("ready", flush=True)
    while True:
        advance()
        print(f"step {batch_size}", flush=True)


def _make_step(
    app: BenchApp, config: Any, model: keras.Model, loader: BaseLoader, ranks: Ranks, a: BenchArgs
) -> Callable[[], None]:
    schedule = app.module("optimization").make_schedule(config, a.batch_size, loader.steps_per_epoch)
    optimizer = app.module("optimization").make_optimizer(config, schedule, precision=a.precision)
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, config.ema_decay)
    step = app.module("train").make_train_step(
        ranks, model, config, optimizer, averaged, precision=a.precision, xla=a.xla
    )
    guard = step_guard.StepGuard(ranks, limit=0)
    stop_requested = tf.constant(0.0)
    batches, numbers, thread = loader.iterator(), itertools.count(1), ThreadPoolExecutor(1)
    ahead = [] if loader.saveable else [thread.submit(next, batches)]

    def advance() -> None:
        images, targets = ahead.pop().result() if ahead else next(batches)
        if not loader.saveable:
            ahead.append(thread.submit(next, batches))
        guard.check(next(numbers), step(images, targets, stop_requested), targets)

    return advance
