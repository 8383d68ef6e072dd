"""DALI's two APIs with one interface, for the operators of `--ops`.

GRAPH                 the Pipeline API, nvidia.dali.fn: nodes of a graph that runs later, prefetched
Dynamic(n, seed)      the Dynamic API, nvidia.dali.experimental.dynamic: batches of n images, at once

Operators have the same names and arguments in both. The methods are what differs: random numbers, and
a part of a small array (a node of a graph is indexed per sample, a batch is not).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import dali_ops
from common.dali_ops import Data


class Api(dali_ops.Api):
    """The Pipeline API. Seeds are the pipeline's.

    Attributes:
        math: min, max, floor and the like.
    """

    math: Any = dali_math

    def size(self, images: DataNode, layout: str = "HWC") -> DataNode:
        """int64 (2,): (height, width) of each image."""
        shape = images.shape()
        return fn.stack(shape[layout.index("H")], shape[layout.index("W")])

    def constant(self, value: float) -> DataNode:
        """The same float32 number for each sample."""
        return types.Constant(np.float32(value), device="cpu")

    def uniform(self, low: float, high: float) -> DataNode:
        """A float32 number for each sample, from [low, high)."""
        return fn.random.uniform(range=(low, high))

    def coin(self, probability: float) -> DataNode:
        """int32 1 or 0 for each sample."""
        return fn.random.coin_flip(probability=probability)

    def draw(self, operator: Callable[..., Data], images: DataNode, **arguments: Any) -> DataNode:
        """Calls an operator that draws random numbers."""
        return operator(images, **arguments)

    def decoder_device(self, device: str) -> str:
        """What a decoder calls "cpu" or "gpu"."""
        return "mixed" if device == "gpu" else "cpu"


class Dynamic(Api):
    """The Dynamic API, for one batch after the other; `batch_size` is set to that of the current batch."""

    ops = ndd
    math = ndd.math

    def __init__(self, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self._rng = ndd.random.RNG(seed=seed)

    def part(self, data: ndd.Batch, index: int | slice) -> ndd.Batch:
        return data.slice[index]

    def size(self, images: ndd.Batch, layout: str = "HWC") -> ndd.Batch:
        axes = layout.index("H"), layout.index("W")
        return ndd.as_batch([np.array([shape[axis] for axis in axes]) for shape in images.shape])

    def constant(self, value: float) -> ndd.Batch:
        return ndd.as_batch([np.float32(value)] * self.batch_size)

    def uniform(self, low: float, high: float) -> ndd.Batch:
        return ndd.random.uniform(range=(low, high), batch_size=self.batch_size, rng=self._rng)

    def coin(self, probability: float) -> ndd.Batch:
        return ndd.random.coin_flip(probability=probability, batch_size=self.batch_size, rng=self._rng)

    def draw(self, operator: Callable[..., Data], images: ndd.Batch, **arguments: Any) -> ndd.Batch:
        return operator(images, rng=self._rng, **arguments)

    def decoder_device(self, device: str) -> str:
        return device


GRAPH = Api()
