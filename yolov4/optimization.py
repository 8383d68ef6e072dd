"""Learning rate and optimizer of the YOLOv4 recipe: AlexeyAB/darknet src/network.c, get_current_rate.

Keras multiplies the gradient by the learning rate before it enters the velocity, Darknet the velocity
afterwards (src/convolutional_layer.c, update_convolutional_layer): under a constant rate the two are one;
where the rate falls, Keras still moves at the old rate for about 1 / (1 - momentum) updates.
"""

import dataclasses
import math
from typing import Any

import keras
from keras import ops

from common.training import optimizers
from yolov4.config import YOLOv4Config

# The loss is a sum over all predictions of an image: under Keras' 2**15 the first updates of a run overflow
# float16, at 416 by more than seven halvings.
INITIAL_LOSS_SCALE = 32.0


@dataclasses.dataclass(eq=False)
class BurnIn(keras.optimizers.schedules.LearningRateSchedule):
    """A power of the update's number up to the peak, then steps down or half a cosine to zero.

    As in Darknet, the first update is number 1: it counts its own images before it asks for the rate
    (train_network_datum). So no update is lost at a rate of zero, and number `burn_in` has the full rate.

    Args:
        peak: learning rate once the burn-in is over.
        burn_in: number of the update that has the full rate; may be 0.
        power: of the burn-in.
        total: number of the last update.
        boundaries: numbers of the updates from which on the rate is multiplied by `factor`, once for each;
            None: a cosine from the end of the burn-in to 0 at `total`.
        factor: see `boundaries`.
        accumulate_steps: micro-steps of one update. The schedule is called with micro-steps, counted from 0:
            Keras counts those.
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
    """The recipe's schedule with its learning rate scaled linearly to `effective_batch` images an update.

    `steps_per_epoch` counts batches, `accumulate_steps` of which make an update; the burn-in counts updates,
    and takes no more than a tenth of the run.
    """
    total = max(config.epochs * steps_per_epoch // accumulate_steps, 1)
    steps = config.lr_schedule == "steps"
    return BurnIn(
        peak=config.learning_rate * effective_batch / config.reference_batch,
        burn_in=min(config.burn_in_steps, total // 10),
        power=config.burn_in_power,
        total=total,
        boundaries=[round(share * total) for share in config.lr_steps] if steps else None,
        factor=config.lr_step_factor,
        accumulate_steps=accumulate_steps,
    )


def make_optimizer(
    config: YOLOv4Config, schedule: keras.optimizers.schedules.LearningRateSchedule, **options: Any
) -> keras.optimizers.Optimizer:
    """SGD with momentum (the recipe) or Adam; `options` are those of common/training/optimizers.py."""
    options |= {"momentum": config.momentum, "clip_norm": config.clip_norm}
    return optimizers.make_optimizer(
        config.optimizer, schedule, **options, initial_loss_scale=INITIAL_LOSS_SCALE
    )
