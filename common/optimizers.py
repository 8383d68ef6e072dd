"""The optimizer that both apps build: SGD with momentum or Adam, clipped, accumulating, with loss scaling."""

import keras
import tensorflow as tf


def steps_taken(optimizer: keras.optimizers.Optimizer) -> int:
    """Batches that it was given, accumulated ones too: by them it asks for its learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return int(tf.convert_to_tensor(inner._iterations))  # `iterations` counts updates only


def make_optimizer(
    name: str,
    schedule: keras.optimizers.schedules.LearningRateSchedule,
    *,
    momentum: float,
    clip_norm: float,
    precision: str,
    accumulate_steps: int = 1,
    initial_loss_scale: float = 2.0**15,
) -> keras.optimizers.Optimizer:
    """SGD with momentum or Adam, inside a loss-scale optimizer for float16.

    Clipping sits in the inner optimizer, so it sees unscaled, accumulated gradients.

    Args:
        name: sgd or adam.
        schedule: learning rate by micro-step: Keras asks it for every batch, accumulated ones too.
        momentum: of SGD; Adam's beta_1.
        clip_norm: largest global norm of the gradients; 0 turns clipping off.
        precision: float32, mixed_bfloat16 or mixed_float16; the last gets the loss scale.
        accumulate_steps: batches whose gradients are averaged into one update.
        initial_loss_scale: of float16; it halves at every overflow and doubles after 2000 updates without.
    """
    common = {
        "learning_rate": schedule,
        "global_clipnorm": clip_norm or None,
        "gradient_accumulation_steps": accumulate_steps if accumulate_steps > 1 else None,
    }
    if name == "adam":
        optimizer = keras.optimizers.Adam(beta_1=momentum, **common)
    elif name == "sgd":
        optimizer = keras.optimizers.SGD(momentum=momentum, **common)
    else:
        raise ValueError(f"no optimizer {name!r}: sgd, adam")
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=initial_loss_scale)
    return optimizer
