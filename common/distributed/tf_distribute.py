"""Ranks by tf.distribute: all devices of a process train together, and so do all hosts of a cluster.

mirrored      MirroredStrategy over the GPUs of this process, or its logical CPU devices where there is no GPU
multi_worker  MultiWorkerMirroredStrategy: one such process per host (with one CPU device where there is no
              GPU), each told by TF_CONFIG who it is:

    TF_CONFIG='{"cluster": {"worker": ["a:12345", "b:12345"]}, "task": {"type": "worker", "index": 0}}'

Every replica has its own copy of each variable and, as with Horovod, changes it by itself: `average` has made
the gradients equal, so the weights and the optimizer stay equal, while what a replica learns from its own
images (moving statistics) stays its own. Outside `run` a variable is the copy of the process' first replica,
and assigning to it sets all copies of the process.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

from common import progress
from common.distributed import tf_config
from common.distributed.packing import pack, unpack
from common.distributed.ranks import Ranks
from common.errors import UserError

T = TypeVar("T")
START_SECONDS = 900.0  # until all workers have come: pods and Slurm steps can start minutes apart
HEARTBEAT_SECONDS = 30.0  # without a sign of life until a worker counts as dead

# What keras.Optimizer does across replicas (keras/src/backend/tensorflow/optimizer.py), and its base class
# for one device (keras/src/optimizers/base_optimizer.py).
_ACROSS_REPLICAS = ("_backend_update_step", "_apply_weight_decay", "_backend_increment_gradient_accumulators")


class StrategyRanks(Ranks):
    """This process' devices, with those of the other processes of the cluster.

    A single device, or a cluster of one worker, trains as one replica. Where not all workers have come after
    START_SECONDS, the others exit with 1.

    Args:
        strategy: mirrored or multi_worker. The latter waits until all workers are there.

    Raises:
        UserError: TF_CONFIG is missing, wrong or not the same on all workers, or its port is taken, or
            worker 0 does not answer.
        RuntimeError: TensorFlow was already at work before multi_worker.
    """

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        if strategy == "multi_worker":
            workers, self.rank = tf_config.read(os.environ.get("TF_CONFIG"))
            self._strategy = _multi_worker_strategy(workers, self.rank)
            hosts = [worker.rpartition(":")[0] for worker in workers]
            self.local_rank = hosts[: self.rank].count(hosts[self.rank])
            self.world_size = len(workers)
        else:
            devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
            self._strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
        self.num_replicas = self._strategy.num_replicas_in_sync
        own = self.num_replicas // self.world_size
        self.local_replicas = range(self.rank * own, (self.rank + 1) * own)
        if strategy == "multi_worker" and any(theirs != workers for theirs in self.gather(workers)):
            raise UserError("TF_CONFIG names other workers on some workers than on worker 0")

    def scope(self) -> contextlib.AbstractContextManager:
        return self._strategy.scope()

    def feed(self, batches: Sequence[T]) -> T:
        if len(batches) != len(self.local_replicas):
            raise ValueError(f"{len(batches)} batches for {len(self.local_replicas)} replicas")
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: batches[context.replica_id_in_sync_group - self.local_replicas[0]]
        )

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        def on_replicas():
            return self._strategy.run(function, args=arguments)

        if not tf.executing_eagerly():
            return on_replicas()
        # Without a graph the replicas would take turns. A call of tf.function itself would warn of retracing.
        return tf.function(on_replicas, autograph=False).get_concrete_function()()

    def local(self, value: T) -> list[T]:
        results = self._strategy.experimental_local_results
        count = len(self.local_replicas)
        return [tf.nest.map_structure(lambda part, i=i: results(part)[i], value) for i in range(count)]

    def mean(self, scalars: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        names = sorted(scalars)
        message = tf.stack([tf.cast(scalars[name], tf.float32) for name in names])
        means = tf.unstack(_all_reduce("MEAN", message))
        return dict(zip(names, means, strict=True))

    def average(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return _all_reduce("MEAN", gradients)

    def wrap_optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Gives the optimizer its base class' arithmetic for one device, which every replica then does.

        Keras' own would sum the gradients over the replicas once more, after they were clipped; and it
        cannot accumulate gradients in a graph (it merges replicas inside a tf.cond).
        """
        plain = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        (base,) = [c for c in type(plain).__mro__ if c.__name__ == "BaseOptimizer"]
        for name in _ACROSS_REPLICAS:
            setattr(plain, name, types.MethodType(getattr(base, name), plain))
        return optimizer

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        own = [tf.convert_to_tensor(variable).numpy() for variable in variables]
        contents = self.broadcast_object([value.tobytes() for value in own])
        for variable, value, content in zip(variables, own, contents, strict=True):
            variable.assign(np.frombuffer(content, value.dtype).reshape(value.shape))

    def broadcast_object(self, value: T) -> T:
        if self.world_size == 1:
            return value
        own = _pack(value if self.rank == 0 else None)
        length = int(self._sum(np.array([len(own) if self.rank == 0 else 0]))[0])
        return _unpack(self._sum(own if self.rank == 0 else np.zeros(length, np.int64)))

    def gather(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        own = _pack(value)
        lengths = np.zeros(self.world_size, np.int64)
        lengths[self.rank] = len(own)
        ends = np.cumsum(self._sum(lengths))
        together = np.zeros(ends[-1], np.int64)
        together[ends[self.rank] - len(own) : ends[self.rank]] = own
        return [_unpack(part) for part in np.split(self._sum(together), ends[:-1])]

    def mean_over_ranks(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        def mean():  # in one message
            return _all_reduce("MEAN", tf.concat([tf.reshape(v, [-1]) for v in variables], 0))

        if not variables:
            return []
        shapes = [variable.shape for variable in variables]
        parts = tf.split(self.first(self.run(mean)), [shape.num_elements() for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def close(self) -> None:
        self.gather(None)  # a worker that leaves early is an error for those still at work

    def _sum(self, values: np.ndarray) -> np.ndarray:
        """int64 (N,), N the same on every rank: the sum over the ranks."""
        return self._sum_in_graph(tf.constant(values)).numpy()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def _sum_in_graph(self, values):
        def sum_on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            speaks = tf.cast(replica == self.local_replicas[0], tf.int64)
            return _all_reduce("SUM", speaks * values)

        return self.first(self.run(sum_on_replica))


def _multi_worker_strategy(workers: Sequence[str], rank: int) -> tf.distribute.Strategy:
    """TensorFlow's server at this worker's address, and the strategy with all others.

    Raises:
        UserError: the port is taken, or worker 0 does not answer.
        RuntimeError: TensorFlow was already at work.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()  # Python allows handlers nowhere else
    handlers = {number: signal.getsignal(number) for number in numbers} if main_thread else {}
    deadline = time.monotonic() + START_SECONDS
    try:
        if len(workers) > 1:
            progress.log(f"waiting for all workers, at most {START_SECONDS:g} s: {', '.join(workers)}")
            if rank:
                _wait_for_leader(workers[0], deadline)
            _configure_coordination_service()
        # TensorFlow waits in C++ and holds Python's lock: neither a thread nor a handler of ours can run.
        faulthandler.dump_traceback_later(START_SECONDS, exit=True, file=2)
        if main_thread:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.OpError as error:  # "Could not start gRPC server", for example
        reason = error.message.partition("\n")[0]
        raise UserError(f"TF_CONFIG gives this worker {workers[rank]}: {reason}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():  # TensorFlow's notifier of preemptions swallows SIGTERM
            signal.signal(number, handler)


def _wait_for_leader(address: str, deadline: float) -> None:
    """Waits until worker 0 listens."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"TF_CONFIG: worker 0 does not answer at {address} ({error})") from error
        time.sleep(0.2)


def _configure_coordination_service() -> None:
    """As MultiWorkerMirroredStrategy does, but with time limits."""
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(cluster),
        cluster_register_timeout_in_ms=int(2000 * START_SECONDS),
        heartbeat_timeout_in_ms=int(1000 * HEARTBEAT_SECONDS),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=cluster.num_tasks(job))
            for job in cluster.jobs
        ],
    )


def _all_reduce(how: str, values: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce(how, values)


def _pack(value: Any) -> np.ndarray:
    """A plain value as int64 (N,): collectives know few types, and a GPU keeps int32 on its host."""
    data = pack(value)
    length = np.array([len(data)], np.int64).view(np.uint8)
    return np.concatenate([length, data, np.zeros(-len(data) % 8, np.uint8)]).view(np.int64)


def _unpack(packed: np.ndarray) -> Any:
    return unpack(packed[1:].view(np.uint8)[: packed[0]])
