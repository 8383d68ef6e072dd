"""Ranks for Horovod: one process per device, which horovodrun, mpirun or Slurm starts on all hosts."""

import ctypes
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.errors import UserError
from common.progress import log


class HorovodRanks(Ranks):
    """A process that horovodrun, mpirun or Slurm started; without a launcher, a single process.

    Make it before TensorFlow runs anything. TensorFlow then sees only the GPU of this process.

    Args:
        compression: compression of the gradients that are sent, none or fp16.

    Raises:
        UserError: Horovod is not installed, this host has more ranks than GPUs, or ranks share a GPU.
    """

    strategy = "horovod"

    def __init__(self, compression: str = "none") -> None:
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise UserError(f"--strategy=horovod needs Horovod ({error}): run `make horovod`") from error
        self._hvd = hvd
        hvd.init()
        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) > 1 and len(tf.config.get_visible_devices("GPU")) > 1:
            if hvd.local_size() > len(gpus):
                raise UserError(
                    f"{hvd.local_size()} ranks on this host, but {len(gpus)} GPUs: start one rank per GPU"
                )
            tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        self.rank = hvd.rank()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.world_size = self.num_replicas = hvd.size()
        self.local_replicas = (self.rank,)
        self._compression = hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none
        if self.world_size > 1 and hvd.nccl_built():
            self._require_different_gpus()

    def _require_different_gpus(self) -> None:
        """Raises UserError on all ranks if two ranks use the same GPU, which NCCL does not allow."""
        address = ""
        if tf.config.get_visible_devices("GPU"):
            address = _pci_address(self.gpu_number(0))
            if not address:
                log("CUDA's driver does not tell which GPU this is: ranks that share a GPU are not detected")
        place = [pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(), address]  # host and GPU
        same = [rank for rank, other in enumerate(self.gather(place)) if address and other == place]
        with self.raise_on_any_rank():
            if len(same) > 1:
                raise UserError(
                    f"the ranks {', '.join(map(str, same))} use the same GPU {address}: start one "
                    "rank per GPU, or set CUDA_VISIBLE_DEVICES= to use no GPU"
                )

    def gpu_number(self, replica: int) -> int:
        # The local rank can differ from the GPU number, because Slurm may hide GPUs.
        visible = tf.config.get_visible_devices("GPU")
        return int(visible[0].name.rpartition(":")[2]) if visible else 0

    def average_gradients(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._hvd.grouped_allreduce(gradients, op=self._hvd.Average, compression=self._compression)

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        self._hvd.broadcast_variables(list(variables), root_rank=0)

    # Does not use Horovod's allgather_object, which is slow and limited to 2 GiB.
    def _gather_bytes(self, data: np.ndarray) -> list[np.ndarray]:
        with tf.device("CPU"):
            sizes = self._hvd.allgather(tf.constant([data.size], tf.int64)).numpy()
            joined = self._hvd.allgather(tf.constant(data)).numpy()
        return np.split(joined, np.cumsum(sizes)[:-1])

    def _mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._hvd.grouped_allreduce(tensors, op=self._hvd.Average)

    def close(self) -> None:
        self._hvd.shutdown()


def _pci_address(gpu_number: int) -> str:
    """Returns the address of a GPU on its host, "" if unknown. It differs even if ranks see only GPU 0."""
    device, text = ctypes.c_int(), ctypes.create_string_buffer(16)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    error = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), gpu_number)
        or driver.cuDeviceGetPCIBusId(text, len(text), device)
    )
    return "" if error else text.value.decode()
