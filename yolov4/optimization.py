"""Learning rate and optimizer of the YOLOv4 recipe: AlexeyAB/darknet src/network.c, get_current_rate.

One difference: Darknet multiplies the velocity by the learning rate (src/convolutional_layer.c,
update_convolutional_layer). Keras multiplies the gradient by it.
"""

import dataclasses
import math
from typing import Any

import keras
from keras import ops

from common.training import optimizers
from yolov4.config import YOLOv4Config

# With Keras' default, 2**15, the first updates would overflow, because the loss is a sum over all
# predictions.
INITIAL_LOSS_SCALE = 32.0


@dataclasses.dataclass(eq=False)
class BurnIn(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises in the burn-in, and then falls in steps or along a cosine.

    In the burn-in, the rate is peak * (number of the update / burn_in) ** power. The first update has number
    1, as in Darknet (train_network_datum), so its rate is above zero.

    Args:
        peak: learning rate after the burn-in.
        burn_in: number of the first update with the full rate; may be 0.
        power: exponent of the burn-in.
        total: number of the last update.
        boundaries: numbers of the updates at which the rate is multiplied by `factor`; None: the rate follows
            a cosine from the end of the burn-in to 0 at `total`.
        accumulate_steps: number of batches per update. Keras calls the schedule with the number of batches.
    """

    peak: float
    burn_in: int
    power: float
    total: int
    boundaries: list[int] | None
    factor: float
    accumulate_steps: int = 1

    def __call__(self, step: Any) -> Any:
        number = ops.floor((ops.cast(step, "float32") + 0.5) / self.accumulate_steps) + 1.0
        warm = self.peak * ops.power(number / max(self.burn_in, 1), self.power)
        if self.boundaries is None:
            progress = (number - self.burn_in) / max(self.total - self.burn_in, 1)
            after = 0.5 * self.peak * (1.0 + ops.cos(math.pi * ops.clip(progress, 0.0, 1.0)))
        else:
            after = ops.ones_like(number) * self.peak
            for boundary in self.boundaries:
                after = ops.where(number < boundary, after, after * self.factor)
        return ops.where(number < self.burn_in, warm, after)

    def get_config(self) -> dict:
        return dataclasses.asdict(self)


def make_schedule(
    config: YOLOv4Config, effective_batch: int, steps_per_epoch: int, accumulate_steps: int = 1
) -> BurnIn:
    """Returns the recipe's schedule, with its rate scaled linearly to `effective_batch` images per update.

    The burn-in has config.burn_in_steps updates, but at most a tenth of all updates.
    """
    total = max(config.epochs * steps_per_epoch // accumulate_steps, 1)
    if config.lr_schedule not in ("steps", "cosine"):
        raise NotImplementedError(f"lr_schedule={config.lr_schedule}")
    has_steps = config.lr_schedule == "steps"
    return BurnIn(
        peak=config.learning_rate * effective_batch / config.reference_batch,
        burn_in=min(config.burn_in_steps, total // 10),
        power=config.burn_in_power,
        total=total,
        boundaries=[round(share * total) for share in config.lr_steps] if has_steps else None,
        factor=config.lr_step_factor,
        accumulate_steps=accumulate_steps,
    )


def make_optimizer(
    config: YOLOv4Config, schedule: keras.optimizers.schedules.LearningRateSchedule, **options: Any
) -> keras.optimizers.Optimizer:
    """Returns SGD with momentum, as in the recipe, or Adam. `options`: see common/training/optimizers.py."""
    options |= {"momentum": config.momentum, "clip_norm": config.clip_norm}
    return optimizers.make_optimizer(
        config.optimizer, schedule, **options, initial_loss_scale=INITIAL_LOSS_SCALE
    )
