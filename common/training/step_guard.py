"""Skips training steps with NaN or infinity, so that they do not change the weights.

    step = guarded_step(ranks, gradients_of, update, model, xla=False, every_gradient=True)
    guard = StepGuard(ranks, limit=10)
    for ...:
        result = step(images, targets, stop_requested)
        guard.check(number, result, targets)

A skipped step changes nothing, and its image ids are logged. Too many skipped steps in a row end the run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from common import progress
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.layers import is_cpu_only, moving_statistics

MIN_LOSS_SCALE = 2.0**-8  # a lower one does not help
SHOWN_IDS = 16
LOOK_EVERY = 5  # steps that are checked together on a GPU


class StepResult(NamedTuple):
    """The result of one step, still on its device.

    Attributes:
        values: name -> float32 scalar, averaged over the replicas; 0 if the step was skipped.
        finite: whether the step was taken; the same on all ranks.
        local_finite: bool (R,), whether the loss was finite on each of this rank's R replicas.
        stop: whether any rank asked for a stop.
    """

    values: dict[str, tf.Tensor]
    finite: tf.Tensor
    local_finite: tf.Tensor
    stop: tf.Tensor


def guarded_step(
    ranks: Ranks,
    gradients_of: Callable[[Any, Any], tuple[list[tf.Tensor], dict[str, tf.Tensor]]],
    update: Callable[[list[tf.Tensor], tf.Tensor | None], None],
    model: keras.Model,
    *,
    xla: bool,
    every_gradient: bool,
) -> Callable[[Any, Any, tf.Tensor], StepResult]:
    """Returns the compiled training step, which applies its gradients only if everything is finite.

    Args:
        gradients_of: (images, targets) -> the gradients, averaged over the replicas, and float scalars of
            this replica, including "loss". It runs on every replica.
        update: (gradients, condition) -> applies the gradients, on every replica. The condition is a bool
            tensor: if it is false, `update` must change nothing, without a branch. None: it always applies.
        model: the model, whose moving statistics a skipped step does not change.
        xla: whether to compile the update on a GPU with XLA.
        every_gradient: whether to check also the norm of the gradients. False for float16, where the loss
            scale optimizer must see gradients that overflow.

    Returns:
        step(images, targets, stop_requested) -> StepResult; the last argument is Run.stop_requested. With
        one replica in the process, on a CPU or under tf.distribute, it is a Python function that calls
        compiled ones, so it cannot be used in a tf.function.
    """
    statistics = moving_statistics(model)

    def forward(images: Any, targets: Any, stop_requested: tf.Tensor) -> tuple[list, dict, tf.Tensor]:
        gradients, values = gradients_of(images, targets)
        local_finite = tf.math.is_finite(values["loss"])
        means = ranks.mean(values | {"stop": stop_requested})  # one collective call
        return gradients, {name: means[name] for name in (*values, "stop")}, local_finite

    def forward_on_replicas(
        images: Any, targets: Any, stop_requested: tf.Tensor
    ) -> tuple[list, list, dict[str, tf.Tensor], tf.Tensor]:
        before = ranks.run(lambda: [tf.convert_to_tensor(variable) for variable in statistics])
        gradients, values, local_finite = ranks.run(forward, images, targets, stop_requested)
        # If a value is not finite on one replica, its average is not finite either.
        return gradients, before, ranks.first(values), tf.stack(ranks.local(local_finite))

    def make_result(values: dict[str, tf.Tensor], finite: tf.Tensor, local_finite: tf.Tensor) -> StepResult:
        shown = {name: tf.where(finite, value, tf.zeros_like(value)) for name, value in values.items()}
        del shown["stop"]
        return StepResult(shown, finite, local_finite, values["stop"] > 0.0)

    # On a GPU, the host would wait for the condition of a branch. So there is none: the update is undone.
    @tf.function(jit_compile=xla, autograph=False)
    def update_or_restore(gradients: list, finite: tf.Tensor, before: list) -> tf.Tensor:
        if every_gradient:
            finite &= tf.math.is_finite(tf.linalg.global_norm(gradients))
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(tf.where(finite, variable.read_value(), value))
        update(gradients, finite)  # after the statistics, because it averages them, too
        return finite

    @tf.function(reduce_retracing=True, autograph=False)
    def step_without_branch(images: Any, targets: Any, stop_requested: tf.Tensor) -> StepResult:
        gradients, before, values, local_finite = forward_on_replicas(images, targets, stop_requested)
        finite = update_or_restore(gradients, tf.math.is_finite(values["loss"]), before)
        return make_result(values, finite, local_finite)

    def checked_forward(
        images: Any, targets: Any, stop_requested: tf.Tensor
    ) -> tuple[list, list, StepResult]:
        gradients, before, values, local_finite = forward_on_replicas(images, targets, stop_requested)
        finite = tf.math.is_finite(values["loss"])
        if every_gradient:
            finite &= tf.math.is_finite(tf.linalg.global_norm(ranks.first(gradients)))
        return gradients, before, make_result(values, finite, local_finite)

    def always_update(gradients: list[tf.Tensor]) -> None:
        update(gradients, None)

    def restore_statistics(before: list[tf.Tensor]) -> None:
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)

    def on_replicas(function: Callable[[Any], None], argument: Any) -> tf.Tensor:
        ranks.run(function, argument)
        return tf.zeros([])  # both branches of a tf.cond must return the same types

    update_all = functools.partial(on_replicas, always_update)
    restore_all = functools.partial(on_replicas, restore_statistics)

    @tf.function(reduce_retracing=True, autograph=False)
    def step_with_branch(images: Any, targets: Any, stop_requested: tf.Tensor) -> StepResult:
        gradients, before, result = checked_forward(images, targets, stop_requested)
        tf.cond(result.finite, lambda: update_all(gradients), lambda: restore_all(before))
        return result

    if not is_cpu_only() and ranks.can_compile_updates:
        return step_without_branch
    if len(ranks.local_replicas) > 1:  # the values of several replicas are slow to hand over
        return step_with_branch
    # This starts sooner: a tf.cond has an input for each variable in both branches.
    return _choose_on_host(checked_forward, update_all, restore_all)


def _choose_on_host(
    checked_forward: Callable[[Any, Any, tf.Tensor], tuple[list, list, StepResult]],
    update: Callable[[list], tf.Tensor],
    restore: Callable[[list], tf.Tensor],
) -> Callable[[Any, Any, tf.Tensor], StepResult]:
    """Returns a step of three compiled parts. Between them, the host chooses `update` or `restore`."""
    compiled_forward = tf.function(checked_forward, reduce_retracing=True, autograph=False)
    compiled_update = tf.function(update, autograph=False)
    compiled_restore = tf.function(restore, autograph=False)
    traced_update: list[Callable[[list], Any]] = []

    def step(images: Any, targets: Any, stop_requested: tf.Tensor) -> StepResult:
        gradients, before, result = compiled_forward(images, targets, stop_requested)
        if not result.finite:
            compiled_restore(before)
            return result
        if not traced_update:  # calling `compiled_update` would compare the types of all gradients each time
            traced_update.append(compiled_update.get_concrete_function(gradients))
        traced_update[0](gradients)
        return result

    return step


class StepGuard:
    """Checks each step's result on the host, and counts the steps that were skipped.

    A check waits for the device. So on a GPU, LOOK_EVERY steps are checked together.

    Args:
        limit: number of consecutive steps that may be skipped; one more ends the run.

    Attributes:
        stop: whether a rank asked for a stop.
    """

    def __init__(self, ranks: Ranks, *, limit: int) -> None:
        self.stop = False
        self._ranks, self._limit = ranks, limit
        self._in_a_row = 0  # consecutive skipped steps
        self._look_every = 1 if is_cpu_only() else LOOK_EVERY
        self._waiting: list[tuple[int, StepResult, Any]] = []

    def check(self, step: int, result: StepResult, targets: Any) -> None:
        """Checks the result of a step. On a GPU, checks LOOK_EVERY results together.

        Args:
            step: number of the step.
            targets: the step's targets, whose "image_ids" are logged if the step was skipped.

        Raises:
            UserError: more than `limit` steps in a row were skipped.
        """
        self._waiting.append((step, result, targets))
        if len(self._waiting) == self._look_every:
            self._look()

    def check_weights(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, step: int) -> None:
        """Raises UserError on all ranks if any rank has a non-finite weight or a tiny loss scale."""
        self._look()
        with self._ranks.raise_on_any_rank():
            scale = getattr(optimizer, "dynamic_scale", None)  # only a LossScaleOptimizer has it
            if scale is not None and float(tf.convert_to_tensor(scale)) < MIN_LOSS_SCALE:
                raise UserError(
                    f"the loss scale has fallen below {MIN_LOSS_SCALE:g}, and the gradients still "
                    "overflow in float16: use --precision=mixed_bfloat16 or float32, or lower "
                    "--learning_rate"
                )
            for weight in model.weights:
                if not bool(tf.reduce_all(tf.math.is_finite(tf.cast(weight.value, tf.float32)))):
                    raise UserError(
                        f"after step {step} the weight {weight.path} is not finite: lower --learning_rate; "
                        "the checkpoints before this step are intact"
                    )

    def _look(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step, result, targets in waiting:
            self.stop = self.stop or bool(result.stop)
            if bool(result.finite):
                self._in_a_row = 0
            else:
                self._in_a_row += 1
                self._report(step, result, targets)

    def _report(self, step: int, result: StepResult, targets: Any) -> None:
        local_ids = [part["image_ids"].numpy().tolist() for part in self._ranks.local(targets)]
        local_replicas = list(zip(result.local_finite.numpy().tolist(), local_ids, strict=True))
        replicas = [
            (rank, finite, ids)
            for rank, replicas_of_rank in enumerate(self._ranks.gather(local_replicas))
            for finite, ids in replicas_of_rank
        ]
        bad = [replica for replica in replicas if not replica[1]]
        reason = "the loss is not finite" if bad else "a gradient is not finite"
        # Gradients are averaged, so the images of any replica may be the cause.
        images = "; ".join(f"{_shorten(ids)} (rank {rank})" for rank, _, ids in bad or replicas)
        progress.log(f"\nstep {step} is skipped: {reason}; image ids {images}")
        if self._in_a_row > self._limit:
            raise UserError(
                f"{self._in_a_row} steps in a row were skipped, the last is step {step}: {reason}. They have "
                "not changed weights or checkpoints. Lower --learning_rate, or check the images that are "
                "named above"
            )


def _shorten(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(map(str, ids[:SHOWN_IDS])) + more
