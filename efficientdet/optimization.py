"""Learning rate and optimizer of the EfficientDet and RetinaNet recipes.

Sources: google/automl tf2/train_lib.py; NVIDIA/retinanet-examples odtk/train.py.
"""

import dataclasses
import math
from typing import Any

import keras
from keras import ops

from common.training import optimizers
from efficientdet.config import EfficientDetConfig


@dataclasses.dataclass(eq=False)
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A linear warm-up, followed by a cosine or by milestones.

    The cosine falls from `peak` to zero. It starts when the warm-up ends. In automl, it starts at step 0, so
    the rate jumps when the warm-up ends. With milestones, the rate is constant between them, as in
    odtk/train.py (schedule).

    Args:
        peak: learning rate at the end of the warm-up.
        start: learning rate at step 0.
        total_steps: the step at which the cosine reaches 0.
        milestones: steps at which the rate is multiplied by `factor`; None: the rate follows the cosine.
    """

    peak: float
    start: float
    warmup_steps: int
    total_steps: int
    milestones: list[int] | None = None
    factor: float = 1.0

    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32")
        warm = self.start + (self.peak - self.start) * step / max(self.warmup_steps, 1)
        if self.milestones is None:
            progress = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
            rate = 0.5 * self.peak * (1.0 + ops.cos(math.pi * ops.clip(progress, 0.0, 1.0)))
        else:
            rate = ops.ones_like(step) * self.peak
            for milestone in self.milestones:
                rate = ops.where(step < milestone, rate, rate * self.factor)
        return ops.where(step < self.warmup_steps, warm, rate)

    def get_config(self) -> dict:
        return dataclasses.asdict(self)


def num_epochs(
    config: EfficientDetConfig, effective_batch: int, steps_per_epoch: int, accumulate_steps: int = 1
) -> int:
    """Returns `config.epochs`. If this is 0, returns the number of epochs nearest to `config.iterations`."""
    if config.epochs:
        return config.epochs
    steps = config.iterations * config.reference_batch / effective_batch * accumulate_steps
    return max(round(steps / steps_per_epoch), 1)


def make_schedule(config: EfficientDetConfig, effective_batch: int, steps_per_epoch: int) -> Warmup:
    """Returns the recipe's schedule, with rates scaled linearly to `effective_batch` images per update.

    A step of the schedule is one batch, even with gradient accumulation.
    """
    scale = effective_batch / config.reference_batch
    peak = config.learning_rate * scale
    start = min(config.warmup_learning_rate * scale, peak)
    total_steps = num_epochs(config, effective_batch, steps_per_epoch) * steps_per_epoch
    warmup_steps = config.warmup_epochs * steps_per_epoch
    if config.warmup_iterations:
        warmup_steps = total_steps * config.warmup_iterations / config.iterations
    warmup_steps = min(round(warmup_steps), total_steps)
    if config.lr_schedule == "cosine":
        return Warmup(peak, start, warmup_steps, total_steps)
    if config.lr_schedule != "milestones":
        raise NotImplementedError(f"lr_schedule={config.lr_schedule}")
    milestones = [round(total_steps * milestone / config.iterations) for milestone in config.milestones]
    return Warmup(peak, start, warmup_steps, total_steps, milestones, config.lr_step_factor)


def make_optimizer(
    config: EfficientDetConfig, schedule: keras.optimizers.schedules.LearningRateSchedule, **options: Any
) -> keras.optimizers.Optimizer:
    """Returns SGD with momentum, as in the recipe, or Adam. `options`: see common/training/optimizers.py."""
    options |= {"momentum": config.momentum, "clip_norm": config.clip_norm}
    return optimizers.make_optimizer(config.optimizer, schedule, **options)
