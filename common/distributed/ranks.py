"""The processes and devices of a run: the rank of each process, and collective operations.

    ranks = start("horovod")  # start.py

none          one process, one device: the class `Ranks`
horovod       one process per device, started by horovodrun, mpirun or Slurm (horovod.py)
mirrored      one process with all its devices: tf.distribute.MirroredStrategy (tf_distribute.py)
multi_worker  one process per host with all its devices: tf.distribute.MultiWorkerMirroredStrategy

A rank is a process; a replica is a device that trains. Horovod has one replica per rank.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import msgspec
import numpy as np
import tensorflow as tf

from common.errors import OtherRankError, UserError

T = TypeVar("T")


class Ranks:
    """Implements --strategy=none: a single process. Subclasses implement the other strategies.

    Attributes:
        strategy: the value of --strategy.
        rank: index of this process; rank 0 writes the files of the run.
        local_rank: index of this process among the processes of its host.
        local_size: number of processes on this host.
        world_size: number of processes.
        num_replicas: number of devices that train, in all processes together.
        local_replicas: global indexes of this process' replicas. Replica i loads shard i.
        can_compile_updates: whether XLA can compile weight updates.
    """

    strategy = "none"
    rank = 0
    local_rank = 0
    local_size = 1
    world_size = 1
    num_replicas = 1
    local_replicas: Sequence[int] = (0,)
    can_compile_updates = True

    # --- making and running a model on replicas ---

    def gpu_number(self, replica: int) -> int:
        """Returns the device number that CUDA and DALI use for the GPU of a local replica."""
        return replica

    def scope(self) -> contextlib.AbstractContextManager:
        """Returns the context in which to make all variables of the training."""
        return contextlib.nullcontext()

    def feed(self, batches: Sequence[T]) -> T:
        """Combines one batch for each of `local_replicas` into one argument for `run`."""
        (batch,) = batches
        return batch

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls `function` on every replica of this process, with its part of the arguments.

        Outside a tf.function, always pass the same function object: tf_distribute.py keeps a graph of each.
        """
        return function(*arguments)

    def local(self, value: T) -> list[T]:
        """Splits a result of `run` or `feed` into one value for each local replica."""
        return [value]

    def first(self, value: T) -> T:
        """Returns the value of the first local replica."""
        return self.local(value)[0]

    # --- inside `run` ---

    def mean(self, scalars: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Averages float scalars over all replicas, with one collective operation."""
        if self.num_replicas == 1:
            return scalars
        names = sorted(scalars)
        message = tf.stack([tf.cast(scalars[name], tf.float32) for name in names])
        return dict(zip(names, tf.unstack(self._mean([message])[0]), strict=True))

    def average_gradients(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Averages gradients over all replicas."""
        return self._mean(gradients)

    def wrap_optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Adapts an optimizer to averaged gradients. Call this before the optimizer is built."""
        return optimizer

    # --- outside `run`: all ranks must call these together ---

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Sets the variables to their values on rank 0."""

    def gather(self, value: T) -> list[T]:
        """Returns a list of every rank's `value`, in the order of the ranks, on every rank.

        Values can be dicts, lists, strings, bytes, numbers and None; tuples become lists.
        """
        if self.world_size == 1:
            return [value]
        return [unpack(data) for data in self._gather_bytes(pack(value))]

    def broadcast_object(self, value: T) -> T:
        """Returns rank 0's `value`, on every rank."""
        values: list[Any] = self.gather(value if self.rank == 0 else None)
        return values[0]

    def mean_over_replicas(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Returns the variables' values averaged over all replicas."""
        if not variables:
            return []
        key = tuple(map(id, variables))
        mean = self._means.setdefault(key, lambda: self._mean([tf.identity(v) for v in variables]))
        return self.first(self.run(mean))

    @functools.cached_property
    def _means(self) -> dict[tuple[int, ...], Callable[[], list[tf.Tensor]]]:
        return {}

    def close(self) -> None:
        """Disconnects from the other ranks."""

    def _gather_bytes(self, data: np.ndarray) -> list[np.ndarray]:
        """Returns every rank's data, uint8 (N,). N can differ between ranks."""
        return [data]

    def _mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Averages tensors over all replicas, inside `run`."""
        return tensors

    def describe(self) -> str:
        """Returns a text such as " on 4 replicas (horovod)"; "" for the strategy none."""
        return "" if self.strategy == "none" else f" on {self.num_replicas} replicas ({self.strategy})"

    def first_on_host(self, work: Callable[[], T]) -> T:
        """Calls `work()` on one rank per host, then on the others. They can use the files that it cached."""
        results: list[T] = []
        with self.raise_on_any_rank():
            if self.local_rank == 0:
                results.append(work())
        return results[0] if results else work()

    @contextlib.contextmanager
    def raise_on_any_rank(self) -> Iterator[None]:
        """Makes a UserError on any rank end all ranks. The first rank with an error reports it.

        Raises:
            UserError: any rank raised one in the `with` block. The other ranks get OtherRankError.
        """
        local_error = None
        try:
            yield
        except UserError as error:
            local_error = error
        reports = local_error is not None and not isinstance(local_error, OtherRankError)
        for rank, problem in enumerate(self.gather(str(local_error) if reports else None)):
            if problem and local_error and rank == self.rank:
                raise local_error
            if problem:
                raise OtherRankError(f"rank {rank}: {problem}")


def pack(value: Any) -> np.ndarray:
    """Encodes a plain value as uint8 (bytes,); TypeError for anything else."""
    return np.frombuffer(msgspec.msgpack.encode(value), np.uint8)


def unpack(data: np.ndarray) -> Any:
    """Returns the value that `pack` encoded."""
    return msgspec.msgpack.decode(data.tobytes())
