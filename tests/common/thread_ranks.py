"""Runs ranks as threads of one process, so that tests of several ranks need no launcher.

results = run_on_ranks(2, lambda ranks: ranks.gather(ranks.rank))
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from common.distributed.ranks import Ranks, pack, unpack

T = TypeVar("T")
TIMEOUT = 60


class ThreadRanks(Ranks):
    """A rank that runs as a thread. Values are serialised as for separate processes."""

    strategy = "horovod"

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank = self.local_rank = rank
        self.world_size = self.num_replicas = len(table)
        self.local_replicas = (rank,)
        self._barrier = barrier
        self._table = table

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = pack(value)
        self._barrier.wait(TIMEOUT)
        values = [unpack(packed) for packed in self._table]
        self._barrier.wait(TIMEOUT)
        return values

    def broadcast_object(self, value: T) -> T:
        first, *_ = self.gather(value if self.rank == 0 else None)
        return value if self.rank == 0 else first

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        values, *_ = self.gather([variable.numpy().tobytes() for variable in variables])
        for variable, value in zip(variables, values, strict=True):
            array = np.frombuffer(value, variable.dtype.as_numpy_dtype)
            variable.assign(array.reshape(variable.shape))

    def mean_over_replicas(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        gathered = self.gather([variable.numpy().tobytes() for variable in variables])
        return [
            tf.reshape(np.mean([np.frombuffer(value, np.float32) for value in values], 0), variable.shape)
            for variable, values in zip(variables, zip(*gathered, strict=True), strict=True)
        ]


def run_on_ranks(world_size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Calls `work(ranks)` on one thread per rank; returns all results. An error ends all threads."""
    barrier = threading.Barrier(world_size)
    table: list[Any] = [None] * world_size

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, barrier, table))
        except BaseException:
            barrier.abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]
