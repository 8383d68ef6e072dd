"""Takes ten training steps of a small model for each case of CASES, with one strategy, for test_ranks.py.

    PYTHONPATH=. python tests/distributed/steps_on_ranks.py mirrored DIR

Every rank writes {case: {name: value}} to DIR/<rank>.msgpack. The value of a variable is a list with one
entry for each replica of the rank.
"""

import contextlib
import itertools
import os
import pathlib
import signal
import sys
from unittest import mock

import keras
import msgspec
import numpy as np
import tensorflow as tf

from common import layers
from common.distributed.horovod import HorovodRanks
from common.distributed.start import start
from common.errors import UserError
from common.layers import BatchNormalization, Mish, Swish, moving_statistics
from common.training import step_guard
from common.training.checkpoints import RunState
from common.training.ema import AveragedWeights
from common.training.input_feed import InputFeed
from common.training.optimizers import FusedAdam, FusedSGD, apply_if
from common.training.watchdog import Watchdog

STEPS = 10
GLOBAL_BATCH = 8
BAD_STEP = 5  # in this step of the case "statistics", one image of the last replica is infinite

sgd, adam, scaled = FusedSGD, FusedAdam, keras.optimizers.LossScaleOptimizer
twice = {"gradient_accumulation_steps": 2}
CASES = {
    "adam": (lambda: adam(0.003, weight_decay=0.1), True),
    "accumulated": (lambda: scaled(sgd(0.1, 0.9, weight_decay=0.1, global_clipnorm=0.3, **twice)), True),
    "overflow": (lambda: scaled(sgd(0.1, momentum=0.9), initial_scale=3e38), True),
    "statistics": (lambda: sgd(0.02, momentum=0.9), False),
}
AS_ON_GPU = "accumulated_on_gpu", "statistics_on_gpu"
CASES |= {name: CASES[name.removesuffix("_on_gpu")] for name in AS_ON_GPU}


def copies(variables):
    """Returns one array for each variable: its values on all replicas of this process."""
    return [np.stack([np.asarray(v) for v in getattr(v, "values", [v])]) for v in variables]


def make_model(frozen):
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3)(inputs)
    x = BatchNormalization(momentum=0.9, trainable=not frozen)(x)
    x = keras.layers.Flatten()(Mish()(Swish()(x)))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def make_batches(ranks, step, case):
    """Each replica of this process gets its part of the global batch."""
    random = np.random.RandomState(100 + step)
    images = random.randn(GLOBAL_BATCH, 8, 8, 3).astype(np.float32)
    images *= np.linspace(0.5, 2.0, GLOBAL_BATCH, dtype=np.float32)[:, None, None, None]
    if case.startswith("statistics") and step == BAD_STEP:
        images[-1, 0, 0, 0] = np.inf
    truth = random.randn(GLOBAL_BATCH, 3).astype(np.float32)
    share = random.randint(1, 5, GLOBAL_BATCH).astype(np.float32)
    size = GLOBAL_BATCH // ranks.num_replicas
    parts = [slice(replica * size, (replica + 1) * size) for replica in ranks.local_replicas]
    return ranks.feed(
        [(tf.constant(images[p]), {"truth": tf.constant(truth[p]), "share": share[p]}) for p in parts]
    )


def run_case(ranks, case):
    make_optimizer, frozen = CASES[case]
    keras.utils.set_random_seed(1)
    with ranks.scope():
        model = make_model(frozen)
        optimizer = ranks.wrap_optimizer(make_optimizer())
        optimizer.build(model.trainable_variables)
        averaged = AveragedWeights(model, 0.9)
    weights = [v.value for v in model.trainable_variables]
    slots = [v.value for v in optimizer.variables]
    statistics = moving_statistics(model)

    def state():
        variables = {"weights": weights, "slots": slots, "statistics": statistics}
        variables["averages"] = averaged.averages_of(weights)
        variables["average_statistics"] = averaged.averages_of(statistics)
        return {name: copies(values) for name, values in variables.items()}

    def gradients_of(images, targets):
        normaliser = ranks.mean({"n": tf.reduce_sum(targets["share"])})["n"]
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((model(images, training=True) - targets["truth"]) ** 2, axis=-1)
            loss = tf.reduce_sum(targets["share"] * errors) / normaliser
            scaled_loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        return ranks.average_gradients(gradients), {"loss": loss}

    def update(gradients, condition):
        before = tf.convert_to_tensor(optimizer.iterations)
        apply_if(condition, optimizer, gradients, model.trainable_variables)
        averaged.update(moved=tf.convert_to_tensor(optimizer.iterations) > before)

    options = {
        "every_gradient": case != "overflow",
        "xla": True,
    }
    with mock.patch.object(step_guard, "is_cpu_only", lambda: case not in AS_ON_GPU):
        step = step_guard.guarded_step(ranks, gradients_of, update, model, **options)
    results = {"losses": [], "finite": []}
    for number in range(1 if case == "overflow" else STEPS):
        if number == BAD_STEP:
            results["before"] = state()
        images, targets = make_batches(ranks, number, case)
        result = step(images, targets, tf.constant(0.0))
        results["losses"].append(float(result.values["loss"]))
        results["finite"].append(bool(result.finite))
        if number == BAD_STEP:
            results["after"] = state()
    results |= state() | {
        "updates": int(tf.convert_to_tensor(optimizer.iterations)),
        "mean_statistics": [mean.numpy() for mean in ranks.mean_over_replicas(statistics)],
        "statistics_after_mean": copies(statistics),
    }
    with averaged.swapped_in(ranks):
        results["swapped_in"] = {"weights": copies(weights), "statistics": copies(statistics)}
    results["swapped_out"] = state()
    if isinstance(optimizer, scaled):
        results["loss_scale"] = copies([optimizer.dynamic_scale.value])[0]
    if ranks.rank == 0:  # a collective operation on only one rank would hang
        results["outputs"] = model(tf.ones((1, 8, 8, 3)), training=False).numpy()
    return results


def exit_code_after_sigterm():
    """Returns the exit code of a child process that sends itself SIGTERM. A child inherits all handlers."""
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def error_of(function):
    """Returns type and text of the UserError that the function raises, or None."""
    try:
        function()
    except UserError as error:
        return type(error).__name__, str(error)


class Loader:
    """A loader of empty batches. Rank 1 cannot open the loader of the second epoch."""

    saveable, source, steps_per_epoch = True, None, 1

    def __init__(self, rank, epoch=0):
        self._rank, self._epoch = rank, epoch

    def iterator(self):
        if (self._rank, self._epoch) == (1, 1):
            raise UserError("image.jpg is gone")
        return itertools.repeat(())


def second_epoch_of(ranks):
    """Returns the function that opens the loaders of the second epoch."""

    def open_loader(device_index=0, **options):
        return Loader(ranks.rank, **options)

    state = RunState()
    feed = InputFeed(
        ranks, open_loader, lambda epoch: {"epoch": epoch}, state, steps_per_epoch=1, num_epochs=2
    )
    feed.begin_epoch()
    state.epoch = 1
    return feed.begin_epoch


def run_messages(ranks, directory):
    message = {"rank": ranks.rank, "bytes": bytes([ranks.rank]) * (5 + 1_000_003 * ranks.rank)}
    with ranks.scope():
        variables = [tf.Variable(tf.fill([2, 3], 1.0)), tf.Variable(7, dtype=tf.int64)]
    ranks.run(lambda: [v.assign(v + 10 * tf.cast(ranks.rank + 1, v.dtype)) for v in variables])
    if len(ranks.local_replicas) > 1:  # replicas of one process may differ, too
        variables[0].values[1].assign(tf.fill([2, 3], 5.0))
    before = copies(variables)
    ranks.broadcast(variables)

    def list_and_add_traces():
        names = sorted(path.name for path in directory.glob("trace*"))
        (directory / f"trace{ranks.rank}").touch()
        return names

    def fail_on_rank_1():
        with ranks.raise_on_any_rank():
            if ranks.rank == 1:
                raise UserError("--batch_size=0 is none")

    with ranks.raise_on_any_rank():
        pass
    return {
        "gathered": ranks.gather(message),
        "gathered_texts": ranks.gather({"blue": "\N{WHALE}", "b": [1.5]} if ranks.rank else None),
        "broadcast_object": ranks.broadcast_object(message["rank"]),
        "before_broadcast": before,
        "after_broadcast": copies(variables),
        "no_variables": ranks.mean_over_replicas([]),
        "first_on_host": ranks.first_on_host(list_and_add_traces),
        "error": error_of(fail_on_rank_1),
        "opening_error": error_of(second_epoch_of(ranks)),
        "exit_code_after_sigterm": exit_code_after_sigterm(),
        "place": (ranks.rank, ranks.local_rank, ranks.world_size, ranks.num_replicas, *ranks.local_replicas),
        "strategy": ranks.strategy,
    }


def run_compression(ranks):
    """Averages gradients of two ranks, at full precision and as float16."""
    gradients = [tf.fill((2, 3), (ranks.rank + 2) / 3), tf.constant([ranks.rank, -1.0, 1e-3])]
    compressed = HorovodRanks("fp16").average_gradients(gradients)
    return {
        "plain": [value.numpy() for value in ranks.average_gradients(gradients)],
        "compressed": [value.numpy() for value in compressed],
        "dtypes": [value.dtype.name for value in compressed],
    }


def run(strategy, directory):
    ranks = start(strategy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(layers, "FUSE_FROM", 1))
        if strategy == "horovod":
            stack.enter_context(Watchdog(ranks, step_timeout=100)).beat("training")
        cases = [case for case in CASES if ranks.can_compile_updates or case != "accumulated_on_gpu"]
        results = {case: run_case(ranks, case) for case in cases}
        results["messages"] = run_messages(ranks, directory)
        if strategy == "horovod":
            results["compression"] = run_compression(ranks)
    ranks.close()
    return results


def main(strategy, directory):
    directory = pathlib.Path(directory)
    results = run(strategy, directory)
    data = msgspec.msgpack.encode(results, enc_hook=np.ndarray.tolist)
    (directory / f"{results['messages']['place'][0]}.msgpack").write_bytes(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
