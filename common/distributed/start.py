"""Connects a process to the other ranks of its run, and sets options of TensorFlow before it runs anything.

reproducible()
ranks = start("horovod")
"""

import functools
import os
from collections.abc import Sequence

import keras
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_math_ops

from common.distributed.horovod import HorovodRanks
from common.distributed.ranks import Ranks
from common.distributed.tf_distribute import StrategyRanks
from common.errors import UserError
from common.layers import random_states

_add_n = gen_math_ops.add_n


def start(strategy: str = "none", compression: str = "none") -> Ranks:
    """Connects this process to the other ranks of its run. Call it before TensorFlow runs anything.

    Args:
        strategy: none, horovod, mirrored or multi_worker.
        compression: compression of the gradients that ranks send, none or fp16; Horovod only.

    Raises:
        UserError: Horovod is not installed; TF_CONFIG is missing or wrong; or horovodrun started several
            processes, but the strategy is not Horovod's.
    """
    processes = int(os.environ.get("HOROVOD_SIZE", "1"))  # set by horovodrun
    if strategy != "horovod" and processes > 1:
        raise UserError(f"horovodrun started {processes} processes: add --strategy=horovod")
    share_gpu_memory()
    if strategy == "horovod":
        return HorovodRanks(compression)
    if strategy in ("mirrored", "multi_worker"):
        return StrategyRanks(strategy)
    return Ranks()


def synchronize(ranks: Ranks, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives all ranks the variables of rank 0, and each rank its own random numbers."""
    ranks.broadcast([variable.value for variable in [*model.weights, *optimizer.variables]])
    seed_per_rank(model, ranks.rank)


def seed_per_rank(model: keras.Model, rank: int) -> None:
    """Gives each rank other random numbers for dropout and stochastic depth."""
    for state in random_states(model):
        state.assign(state + tf.cast([rank, 0], state.dtype))


def reproducible() -> None:
    """Makes repeated training on one CPU bit-identical, whatever the load of the machine.

    TensorFlow adds three or more tensors in the order in which they arrive
    (tensorflow/core/kernels/aggregate_ops.cc, tensorflow/core/grappler/optimizers/memory_optimizer.cc).
    This function adds only two tensors at a time. It turns off the graph optimizer that joins sums again
    (arithmetic_optimizer.cc, AddOpsRewriteStage).

    `optimize_graphs_once` did not change the losses either.

    A different number of threads, another type of CPU and --xla can still change the last digits. On a GPU,
    this function does nothing.
    """
    if tf.config.list_physical_devices("GPU"):
        return
    gen_math_ops.add_n = _add_in_pairs  # GradientTape and tf.add_n call gen_math_ops.add_n
    optimize_graphs_once()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


def optimize_graphs_once() -> None:
    """Makes the first step or batch on a CPU come sooner (docs/dev/performance_notes.md).

    TensorFlow's graph optimizer makes one pass instead of two, and its optimizers of memory, layout and loops
    are off. None of these changed the later speed. On a GPU, this function does nothing.
    """
    if tf.config.list_physical_devices("GPU"):
        return
    # `tf.config.optimizer` has no names for these two options. It makes TensorFlow read all options again.
    options = rewriter_config_pb2.RewriterConfig(
        meta_optimizer_iterations=rewriter_config_pb2.RewriterConfig.ONE,
        memory_optimization=rewriter_config_pb2.RewriterConfig.NO_MEM_OPT,
    )
    graph_options = config_pb2.GraphOptions(rewrite_options=options)
    context.context()._config = config_pb2.ConfigProto(graph_options=graph_options)
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False, "loop_optimization": False})


def _add_in_pairs(inputs: Sequence[tf.Tensor], name: str | None = None) -> tf.Tensor:
    if len(inputs) <= 2:
        return _add_n(inputs, name)
    return functools.reduce(lambda total, term: _add_n([total, term]), inputs)


def share_gpu_memory() -> None:
    """Makes TensorFlow allocate GPU memory on demand, which leaves memory for DALI."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
