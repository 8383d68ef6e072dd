"""TensorFlow and the devices: settings for the whole process, to be made before it does anything else."""

import functools
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.ops import gen_math_ops

_add_n = gen_math_ops.add_n


def reproducible() -> None:
    """Lets the same step on the same CPU give the same bits, whatever else the machine is doing.

    In a step of these apps only sums of three or more tensors depend on timing; gradients are full of them.
    tensorflow/core/kernels/aggregate_ops.cc AddNOp starts with the first term that nobody else still needs;
    and once a graph is thought to need more than 80% of its device's memory (of 256 MB, on a CPU),
    tensorflow/core/grappler/optimizers/memory_optimizer.cc SchedulingPass adds the terms as they arrive. A
    sum of two comes out the same either way round. So all longer ones are made of those, and the optimizer
    that would join them again (arithmetic_optimizer.cc, AddOpsRewriteStage) is off; the step is no slower.

    Another number of threads, another kind of CPU and --xla can still change the last digits from one run to
    another. On a GPU other kernels, too, add in any order: tf.config.experimental.enable_op_determinism is
    TensorFlow's remedy, which costs time and has no kernel for some operations.
    """
    gen_math_ops.add_n = _add_in_pairs  # GradientTape and tf.add_n both look it up there
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


def _add_in_pairs(inputs: Sequence[tf.Tensor], name: str | None = None) -> tf.Tensor:
    if len(inputs) <= 2:
        return _add_n(inputs, name)
    return functools.reduce(lambda total, term: _add_n([total, term]), inputs)


def is_cpu_only() -> bool:
    """Whether TensorFlow sees no GPU. Then XLA always works; on a GPU it needs parts of CUDA of its own."""
    return not tf.config.list_physical_devices("GPU")


def share_gpu_memory() -> None:
    """Lets TensorFlow take GPU memory as it needs it: by default it takes all, and DALI finds none left."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
