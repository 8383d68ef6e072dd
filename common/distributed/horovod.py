"""Ranks by Horovod: one process per device, gradients averaged by all-reduce.

Horovod's own Keras 2 wrappers (DistributedOptimizer, DistributedGradientTape, broadcast callbacks) do not
know Keras 3's variables, and they hide where ranks matter. Its operations work as they are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from common.distributed.ranks import Ranks, share_gpu_memory
from common.errors import UserError


def initialize() -> Any:
    """Joins this process to its ranks and limits TensorFlow to the process' own GPU; horovod.tensorflow.

    TensorFlow allows these settings only before it runs anything. Under Horovod Elastic a process keeps its
    GPU when the ranks change.

    Raises:
        UserError: Horovod is not installed.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise UserError(
            f"--strategy=horovod needs Horovod, which is not installed ({error}): run `make horovod`"
        ) from error
    hvd.init()
    share_gpu_memory()
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1 and len(tf.config.get_visible_devices("GPU")) > 1:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    return hvd


class HorovodRanks(Ranks):
    """This process among those that horovodrun (or mpirun, Slurm) started; on its own without a launcher.

    Args:
        compression: none or fp16, of gradients on their way.

    Raises:
        UserError: see `initialize`.
    """

    strategy = "horovod"

    def __init__(self, compression: str = "none") -> None:
        self._hvd = hvd = initialize()
        self.rank = hvd.rank()
        self.local_rank = hvd.local_rank()
        self.world_size = self.num_replicas = hvd.size()
        self.local_replicas = (self.rank,)
        self._compression = hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none

    def gpu_number(self, replica: int) -> int:
        count = len(tf.config.list_physical_devices("GPU"))  # a launcher (Slurm) can have given each its own
        return self.local_rank % max(count, 1)

    def average(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._hvd.grouped_allreduce(gradients, op=self._hvd.Average, compression=self._compression)

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        self._hvd.broadcast_variables(list(variables), root_rank=0)

    # Horovod's own allgather_object counts bytes in int32, which ends at 2 GiB of all ranks together, makes a
    # tensor of them element by element (a second for 60 MB), and uses pickles.
    def _gather_bytes(self, data: np.ndarray) -> list[np.ndarray]:
        with tf.device("CPU"):
            sizes = self._hvd.allgather(tf.constant([data.size], tf.int64)).numpy()
            joined = self._hvd.allgather(tf.constant(data)).numpy()
        return np.split(joined, np.cumsum(sizes)[:-1])

    def _mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._hvd.grouped_allreduce(tensors, op=self._hvd.Average)

    def close(self) -> None:
        self._hvd.shutdown()
