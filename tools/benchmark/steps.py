"""One step of a candidate, over and over: a batch from a loader, or a training step with it."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from common.distributed import ranks
from common.loading import Loader, placement
from common.training import step_guard

Step = Callable[[Any, Any, tf.Tensor], step_guard.StepResult]  # guards.guarded_step


def load(loader: Loader) -> Callable[[], object]:
    """Takes a batch from the loader, and leaves it."""
    batches = _iterate(loader)

    def advance() -> object:
        batch = next(batches)
        if loader.pipeline_type == "dali_gpu":
            tf.test.experimental.sync_devices()  # the batch is promised before it is there
        return batch

    return advance


def train(loader: Loader, step: Step) -> Callable[[], object]:
    """Takes a batch from the loader, and a training step with it, as train.py's loop does."""
    batches = _iterate(loader)
    guard = step_guard.StepGuard(ranks.Ranks(), limit=0, save_batch=lambda *_: None)
    asked = tf.constant(0.0)
    number = 0

    def advance() -> None:
        nonlocal number
        number += 1
        images, targets = next(batches)
        guard.check(number, step(images, targets, asked), images, targets)

    return advance


def _iterate(loader: Loader) -> Any:
    with placement(loader):
        return iter(loader.dataset())
