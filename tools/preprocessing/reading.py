"""Reads the images of a source, in a DALI graph (`fn`) or for the Dynamic API (`ndd`).

A graph uses one of DALI's readers, if this reader reads the source correctly. Otherwise Python reads the
images. Both ways return the same images and labels. Without shuffling, the order is also the same:

    images  uint8 (bytes,), an encoded image; or (H, W, C), uint8 or float32
    labels  int32 (), -1 for an image without a label

DALI shuffles images from LMDB only within a buffer.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import Pipeline, fn, types
from nvidia.dali.data_node import DataNode

from common.data import tfrecord
from common.data.sharding import buffer_order, check_shards, order, shard_range
from common.errors import UserError
from tools.preprocessing.formats.base import NO_LABEL, ImageSource


@dataclasses.dataclass(frozen=True)
class Part:
    """The shard of a source that one rank reads.

    Attributes:
        shard_id: number of the shard, the rank.
        num_shards: number of shards, the number of ranks.
        training: whether to shuffle the images.
        seed: seed of the shuffling, the same on all ranks; 0 is a valid seed.

    Raises:
        UserError: there are fewer images than shards, or training cannot shuffle an iterable.
    """

    source: ImageSource
    shard_id: int = 0
    num_shards: int = 1
    training: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_shards(self.source.size, self.num_shards)
        if self.training and not self.source.content.can_shuffle:
            raise UserError(
                "cannot shuffle the iterable of --input: give a sequence or a function that takes SampleInfo"
            )

    @property
    def begin(self) -> int:
        return shard_range(self.source.size, self.shard_id, self.num_shards)[0]

    @property
    def size(self) -> int:
        """Number of images of this shard in one epoch."""
        return shard_range(self.source.size, self.shard_id, self.num_shards)[1] - self.begin

    def in_graph(self, name: str = "reader") -> tuple[DataNode, DataNode]:
        """Adds an endless reader to the current DALI graph, and returns its images and labels.

        `name` is the name of the reader for `pipeline.epoch_size(name)`. It must be unique in the graph.
        """
        reader = self.source.reader
        if reader is None:
            batch_size = Pipeline.current().max_batch_size

            def sample(info: types.SampleInfo) -> tuple[np.ndarray, np.ndarray]:
                position = self._in_batches(batch_size, info.iteration, info.idx_in_batch)
                return self.source.load(position), np.array(self.source.labels[position])

            images, labels = fn.external_source(source=sample, num_outputs=2, batch=False)
        else:
            shard = {"shard_id": self.shard_id, "num_shards": self.num_shards}
            read = getattr(fn.readers, reader.operator)
            outputs: Any = read(name=name, **reader.arguments, **shard, **self._order(reader.operator))
            outputs = (outputs,) if isinstance(outputs, DataNode) else outputs
            images, labels = outputs[reader.image], types.Constant(np.int32(NO_LABEL), device="cpu")
            if reader.label is not None:
                label = outputs[reader.label]
                number = (
                    tfrecord.parse_integer(label) if reader.label_is_text else fn.squeeze(label, axes=[0])
                )
                labels = fn.cast(number, dtype=types.INT32)
        return fn.reshape(images, layout="HWC") if self.source.is_decoded else images, labels

    def _order(self, operator: str) -> dict[str, bool | int]:
        if self.training and operator.startswith("caffe"):
            return buffer_order(self.seed)
        return order(self.training, self.seed, in_container=operator not in ("file", "numpy"))

    def _in_batches(self, batch_size: int, batch: int, row: int) -> int:
        """Returns the position in the source of image `row` of batch `batch`.

        In evaluation, a shard repeats its last image until all shards have the same number of batches.
        """
        if self.training:
            return self._position(*divmod(batch * batch_size + row, self.size))
        num_batches = -(-self.source.size // (batch_size * self.num_shards))
        return self._position(0, min(batch % num_batches * batch_size + row, self.size - 1))

    def _position(self, epoch: int, place: int) -> int:
        place += self.begin
        return int(_permutation(self.source.size, self.seed, epoch)[place]) if self.training else place

    def in_dynamic(self, batch_size: int, *, epochs: int = 1) -> Iterator[tuple[ndd.Batch, ndd.Batch]]:
        for epoch in range(epochs):
            for first in range(0, self.size, batch_size):
                places = range(first, min(first + batch_size, self.size))
                positions = [self._position(epoch, place) for place in places]
                layout = "HWC" if self.source.is_decoded else None
                images = ndd.as_batch([self.source.load(position) for position in positions], layout=layout)
                yield images, ndd.as_batch(self.source.labels[positions])


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)
