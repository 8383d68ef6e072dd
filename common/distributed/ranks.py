"""The processes and devices of one run: which process is which, and collective operations.

    ranks = distributed.start("horovod")

none          one process, one device
horovod       one process per device, started by horovodrun, mpirun or Slurm
mirrored      one process with all its devices: tf.distribute.MirroredStrategy (tf_distribute.py)
multi_worker  one process per host with all its devices: tf.distribute.MultiWorkerMirroredStrategy

Horovod and TensorFlow do the work; here they get one face, so that a training loop is written once. A rank is
a process, a replica a device that trains; with Horovod they are the same.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import msgspec
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_math_ops

from common.errors import OtherRankError, UserError

if TYPE_CHECKING:
    from common.training.run import Run

T = TypeVar("T")

_add_n = gen_math_ops.add_n


class Ranks:
    """One process on its own. The other strategies override what differs.

    Attributes:
        strategy: the value of --strategy.
        rank: index of this process; rank 0 writes.
        local_rank: index of this process among those of its host: which GPU is its own.
        local_size: number of processes of this host.
        world_size: number of processes.
        num_replicas: devices that train, of all processes together.
        local_replicas: indexes of this process' replicas among all: the shards of the data that it feeds.
        can_compile_updates: by XLA. Not under tf.distribute, where a loss-scale optimizer meets the others.
    """

    strategy = "none"
    rank = 0
    local_rank = 0
    local_size = 1
    world_size = 1
    num_replicas = 1
    local_replicas: Sequence[int] = (0,)
    can_compile_updates = True

    # --- where things are made, and run ---

    def gpu_number(self, replica: int) -> int:
        """Which GPU of this host belongs to a replica of this process, as CUDA and DALI number them."""
        return replica

    def scope(self) -> contextlib.AbstractContextManager:
        """The context in which to make the model, the optimizer and all variables that training changes."""
        return contextlib.nullcontext()

    def feed(self, batches: Sequence[T]) -> T:
        """One batch for each of `local_replicas`, as `run` hands them out."""
        (batch,) = batches
        return batch

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function` on every replica of this process, each with its own part of the arguments."""
        return function(*arguments)

    def local(self, value: T) -> list[T]:
        """What each replica of this process returned from `run`, or was fed."""
        return [value]

    def first(self, value: T) -> T:
        """The value of the first local replica."""
        return self.local(value)[0]

    # --- inside `run` ---

    def mean(self, scalars: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Float scalars averaged over all replicas, in one message."""
        if self.num_replicas == 1:
            return scalars
        names = sorted(scalars)
        message = tf.stack([tf.cast(scalars[name], tf.float32) for name in names])
        return dict(zip(names, tf.unstack(self._mean([message])[0]), strict=True))

    def average(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Gradients averaged over all replicas; `wrap_optimizer` keeps Keras from doing it again."""
        return self._mean(gradients)

    def wrap_optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """The optimizer for gradients that `average` returned; call it before the optimizer is built."""
        return optimizer

    # --- outside `run`: every rank calls these together ---

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Gives the variables the values that they have on rank 0."""

    def gather(self, value: T) -> list[T]:
        """What each rank gives, in the order of the ranks, on every rank.

        Values are dicts, lists, strings, bytes, numbers and None; tuples arrive as lists.
        """
        if self.world_size == 1:
            return [value]
        return [unpack(data) for data in self._gather_bytes(pack(value))]

    def broadcast_object(self, value: T) -> T:
        """What rank 0 gives, on every rank."""
        values: list[Any] = self.gather(value if self.rank == 0 else None)
        return values[0]

    def mean_over_ranks(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """The variables' values averaged over all replicas; the variables stay as they are."""
        if not variables:
            return []
        return self.first(self.run(lambda: self._mean([tf.identity(v) for v in variables])))

    def close(self) -> None:
        """Leaves the others in good order, at the end of the work."""

    # --- what gather and the means are made of ---

    def _gather_bytes(self, data: np.ndarray) -> list[np.ndarray]:
        """uint8 (N,) of each rank, N its own, on every rank."""
        return [data]

    def _mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Averaged over all replicas, inside `run`."""
        return tensors

    # --- built on these ---

    def describe(self) -> str:
        """ " on 4 replicas (horovod)", for a message; nothing for one device on its own."""
        return "" if self.strategy == "none" else f" on {self.num_replicas} replicas ({self.strategy})"

    def first_on_host(self, work: Callable[[], T]) -> T:
        """`work()` on every rank, but first on one of each host: the others then find its caches."""
        results: list[T] = []
        with self.raise_on_any_rank():
            if self.local_rank == 0:
                results.append(work())
        return results[0] if results else work()

    @contextlib.contextmanager
    def raise_on_any_rank(self) -> Iterator[None]:
        """A UserError on any rank ends all ranks; the first rank that has one reports it.

        Raises:
            UserError: on every rank, if any rank raised one inside; OtherRankError where another reports it.
        """
        own = None
        try:
            yield
        except UserError as error:
            own = error
        reports = own is not None and not isinstance(own, OtherRankError)
        for rank, problem in enumerate(self.gather(str(own) if reports else None)):
            if problem:
                raise own if own and rank == self.rank else OtherRankError(f"rank {rank}: {problem}")


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
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.world_size = self.num_replicas = hvd.size()
        self.local_replicas = (self.rank,)
        self._compression = hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none

    def gpu_number(self, replica: int) -> int:
        # Not by the local rank: Slurm can have given each its own, and in an elastic run ranks change.
        visible = tf.config.get_visible_devices("GPU")
        return int(visible[0].name.rpartition(":")[2]) if visible else 0

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


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callables that `train` and its `Run` call. Every rank calls them at the same place, in the same order.

    Attributes:
        on_step: (run, images, targets), called after each training step, when `run.state["step"]` is its
            number and before anything of it is saved. `run.ranks`, `run.model`, `run.optimizer` and
            `run.state` ("epoch": epochs done, "step", "step_in_epoch") stay valid to the end.
            `targets["image_ids"]` names the images (one value for each local replica under tf.distribute).
        on_epoch: called with the number of epochs done, after their checkpoint is written. What it raises
            ends `train`.
        expected_epochs: that the run is known to have done. A directory with fewer is refused.
        lost_ranks: what happens when another rank is lost (Watchdog's `on_loss`). exit: this process ends
            with code 1. report: the error of the collective operation propagates.
    """

    on_step: Callable[["Run", Any, Any], None] = lambda *_: None
    on_epoch: Callable[[int], None] = lambda _: None
    expected_epochs: int = 0
    lost_ranks: str = "exit"


def start(strategy: str = "none", compression: str = "none") -> Ranks:
    """Joins this process to its run, before TensorFlow runs anything.

    Args:
        strategy: none, horovod, mirrored or multi_worker.
        compression: of gradients on their way between ranks, none or fp16; Horovod only.

    Raises:
        UserError: Horovod is not installed; TF_CONFIG is missing or wrong.
    """
    share_gpu_memory()
    if strategy == "horovod":
        return HorovodRanks(compression)
    if strategy in ("mirrored", "multi_worker"):
        from common.distributed.tf_distribute import StrategyRanks

        return StrategyRanks(strategy)
    return Ranks()


def seed_per_rank(model: keras.Model, rank: int) -> None:
    """Gives each rank its own random numbers in dropout and stochastic depth; rank 0 keeps what it has."""
    for state in random_states(model):
        state.assign(state + tf.cast([rank, 0], state.dtype))


def random_states(model: keras.Model) -> list[tf.Variable]:
    """The (seed, counter) of each Keras seed generator: variables that are not weights."""
    weights = {id(weight) for weight in model.weights}
    return [variable.value for variable in model.variables if id(variable) not in weights]


# MessagePack, which cannot run code as pickle can.
def pack(value: Any) -> np.ndarray:
    """uint8 (bytes,) of a plain value; TypeError for anything else."""
    return np.frombuffer(msgspec.msgpack.encode(value), np.uint8)


def unpack(data: np.ndarray) -> Any:
    """The value that `pack` was given."""
    return msgspec.msgpack.decode(data.tobytes())


# --- settings of TensorFlow, before it runs anything ---


def reproducible() -> None:
    """Lets the same step on the same CPU give the same bits, independent of the load of the machine.

    In a step of these apps only sums of three or more tensors depend on timing; gradients are full of them.
    tensorflow/core/kernels/aggregate_ops.cc AddNOp starts with the first term that no other operator needs;
    and once a graph is thought to need more than 80% of its device's memory (of 256 MB, on a CPU),
    tensorflow/core/grappler/optimizers/memory_optimizer.cc SchedulingPass adds the terms as they arrive. A
    sum of two comes out the same either way round. So all longer ones are made of those, and the optimizer
    that would join them again (arithmetic_optimizer.cc, AddOpsRewriteStage) is off; the step is equally fast.

    Another number of threads, another kind of CPU and --xla can still change the last digits from one run to
    another. On a GPU other kernels, too, add in any order: tf.config.experimental.enable_op_determinism is
    TensorFlow's remedy, which costs time and has no kernel for some operations. There this does nothing.
    """
    if tf.config.list_physical_devices("GPU"):
        return
    gen_math_ops.add_n = _add_in_pairs  # GradientTape and tf.add_n both look it up there
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


def _add_in_pairs(inputs: Sequence[tf.Tensor], name: str | None = None) -> tf.Tensor:
    if len(inputs) <= 2:
        return _add_n(inputs, name)
    return functools.reduce(lambda total, term: _add_n([total, term]), inputs)


def share_gpu_memory() -> None:
    """Lets TensorFlow take GPU memory as it needs it: by default it takes all, and DALI finds none left."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
