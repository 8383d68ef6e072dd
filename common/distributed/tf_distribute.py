"""Ranks for tf.distribute: all devices of a process, and all hosts of a cluster, train together.

mirrored      MirroredStrategy: one process uses all its GPUs. Without a GPU, it uses its logical CPU devices.
multi_worker  MultiWorkerMirroredStrategy: one process per host uses all its GPUs. Without a GPU, it uses one
              CPU device. TF_CONFIG identifies each process:

    TF_CONFIG='{"cluster": {"worker": ["a:12345", "b:12345"]}, "task": {"type": "worker", "index": 0}}'

Every replica updates its own copy of each variable. Only the moving statistics differ between replicas.
Outside `run`, a variable has the value of this process' first replica. An assignment there changes the copies
of all replicas of this process.
"""

import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
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
from common.distributed.ranks import Ranks
from common.errors import UserError

T = TypeVar("T")
START_SECONDS = 900.0  # time for all workers to start
EXAMPLE = '{"cluster": {"worker": ["a:12345", "b:12345"]}, "task": {"type": "worker", "index": 0}}'
HEARTBEAT_SECONDS = 30.0  # a worker without a heartbeat for this time counts as dead

# In keras.Optimizer, these methods work across replicas. In the base class of
# keras.Optimizer, they work on one device.
_ACROSS_REPLICAS = ("_backend_update_step", "_apply_weight_decay", "_backend_increment_gradient_accumulators")


class StrategyRanks(Ranks):
    """Implements --strategy=mirrored and multi_worker.

    If a worker has not started after START_SECONDS, the other workers exit with code 1.

    Args:
        strategy: mirrored or multi_worker. multi_worker waits until all workers have started.

    Raises:
        UserError: TF_CONFIG is missing, wrong or not the same on all workers, or its port is in use, or
            worker 0 does not answer.
        RuntimeError: for multi_worker, if TensorFlow has already run something.
    """

    can_compile_updates = False

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        if strategy == "multi_worker":
            workers, self.rank = read_tf_config(os.environ.get("TF_CONFIG"))
            self._strategy = _multi_worker_strategy(workers, self.rank)
            hosts = [worker.rpartition(":")[0] for worker in workers]
            self.local_rank = hosts[: self.rank].count(hosts[self.rank])
            self.world_size = len(workers)
        else:
            devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
            self._strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
        self._graphs: dict[Callable, Callable] = {}
        self.num_replicas = self._strategy.num_replicas_in_sync
        count = self.num_replicas // self.world_size
        self.local_replicas = range(self.rank * count, (self.rank + 1) * count)
        if strategy == "multi_worker" and any(other != workers for other in self.gather(workers)):
            raise UserError("TF_CONFIG must have the same list of workers, in the same order, on all hosts")

    def scope(self) -> contextlib.AbstractContextManager:
        return self._strategy.scope()

    def feed(self, batches: Sequence[T]) -> T:
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: batches[context.replica_id_in_sync_group - self.local_replicas[0]]
        )

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        if not tf.executing_eagerly():
            return self._strategy.run(function, args=arguments)
        # In eager mode, TensorFlow would run the replicas one after the other. It never frees a graph.
        if function not in self._graphs:
            on_replicas = functools.partial(self._strategy.run, function)
            self._graphs[function] = tf.function(lambda *values: on_replicas(args=values), autograph=False)
        return self._graphs[function](*arguments)

    def local(self, value: T) -> list[T]:
        results = self._strategy.experimental_local_results
        count = len(self.local_replicas)
        return [tf.nest.map_structure(lambda part, i=i: results(part)[i], value) for i in range(count)]

    def wrap_optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Makes every replica update its own weights.

        The gradients are already averaged over the replicas and clipped. Keras' own methods sum
        them over the replicas once more.
        """
        plain = getattr(optimizer, "inner_optimizer", optimizer)  # unwraps a LossScaleOptimizer
        (base,) = [c for c in type(plain).__mro__ if c.__name__ == "BaseOptimizer"]
        for name in _ACROSS_REPLICAS:
            setattr(plain, name, types.MethodType(getattr(base, name), plain))
        return optimizer

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        values = [tf.convert_to_tensor(variable).numpy() for variable in variables]
        contents = self.broadcast_object([value.tobytes() for value in values])
        for variable, value, content in zip(variables, values, contents, strict=True):
            variable.assign(np.frombuffer(content, value.dtype).reshape(value.shape))

    def close(self) -> None:
        self.gather(None)  # waits for all: if a worker ends early, the others get an error

    def _mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tf.distribute.get_replica_context().all_reduce("MEAN", tensors)

    def _gather_bytes(self, data: np.ndarray) -> list[np.ndarray]:
        """Sums arrays that are 0 outside their rank's part."""
        sizes = np.zeros(self.world_size, np.int64)
        sizes[self.rank] = data.size
        sizes = self._sum_over_ranks(sizes).numpy()
        place = np.cumsum(sizes)[self.rank] - data.size
        words = np.zeros(-(-sizes.sum() // 8), np.int64)
        words.view(np.uint8)[place : place + data.size] = data
        joined = self._sum_over_ranks(words).numpy().view(np.uint8)[: sizes.sum()]
        return np.split(joined, np.cumsum(sizes)[:-1])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def _sum_over_ranks(self, values: tf.Tensor) -> tf.Tensor:
        def sum_on_replica() -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            is_first = tf.cast(replica.replica_id_in_sync_group == self.local_replicas[0], tf.int64)
            return replica.all_reduce("SUM", is_first * values)

        return self.first(self.run(sum_on_replica))


def read_tf_config(text: str | None) -> tuple[list[str], int]:
    """Parses `text`, the value of TF_CONFIG. `text` is None if TF_CONFIG is not set.

    Returns:
        The addresses of all workers ("host:port", the chief first), and this process' index in this list.

    Raises:
        UserError: TF_CONFIG is missing or wrong.
    """
    if not text:
        raise UserError(f"--strategy=multi_worker needs TF_CONFIG, with each worker's own index: {EXAMPLE}")
    try:
        config = json.loads(text)
        cluster, task, index = config["cluster"], config["task"], config["task"]["index"]
        chiefs = list(cluster.get("chief", []))
        addresses = [*chiefs, *cluster.get("worker", [])]
        hosts_and_ports = [address.rpartition(":")[::2] for address in addresses]
        is_valid = (
            set(cluster) <= {"chief", "worker"}
            and type(index) is int
            and 0 <= index < len(cluster[task["type"]])
            and all(host and 0 < int(port) < 65536 for host, port in hosts_and_ports)
            and len(set(addresses)) == len(addresses)
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise UserError(
            f"TF_CONFIG={text} is not valid: give each worker its own address host:port, and set the index "
            f"of this process, which counts from 0. Example: {EXAMPLE}"
        )
    return addresses, index + (len(chiefs) if task["type"] == "worker" else 0)


def _multi_worker_strategy(workers: Sequence[str], rank: int) -> tf.distribute.Strategy:
    """Starts TensorFlow's server at this worker's address and returns the strategy with all workers.

    Raises:
        UserError: the port is in use, or worker 0 does not answer.
        RuntimeError: TensorFlow has already run something.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if len(workers) > 1:
            progress.log(f"waiting for all workers, at most {START_SECONDS:g} s: {', '.join(workers)}")
            if rank:
                _wait_for_leader(workers[0])
            # Configures the coordination service as MultiWorkerMirroredStrategy does, but with time limits.
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
        # TensorFlow waits in C++ and holds the GIL. So no Python code can stop the wait or handle Ctrl-C.
        faulthandler.dump_traceback_later(START_SECONDS, exit=True, file=2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.OpError as error:  # "Could not start gRPC server", for example
        reason = error.message.partition("\n")[0]
        raise UserError(f"this worker cannot start at {workers[rank]} ({reason}): check TF_CONFIG") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():  # TensorFlow's preemption notifier has replaced SIGTERM's
            signal.signal(number, handler)


def _wait_for_leader(address: str) -> None:
    """Waits until worker 0 listens."""
    deadline = time.monotonic() + START_SECONDS
    host, _, port = address.rpartition(":")
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"no answer at {address} ({error}): start worker 0 of TF_CONFIG") from error
        time.sleep(0.2)
