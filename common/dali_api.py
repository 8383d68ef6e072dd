"""DALI's two APIs behind one face, so that a stage is written once and runs in both.

GRAPH                         the Pipeline API, nvidia.dali.fn: nodes of a graph that runs later, prefetched
dali_dynamic.Dynamic(n, seed) the Dynamic API, nvidia.dali.experimental.dynamic: batches of n images, at once

Operators have the same names and arguments in both. What differs is here: random numbers, and looking at a
part of a small array (a graph's node is indexed per sample, a batch is not).
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

Data = Any  # nvidia.dali.data_node.DataNode in a graph, nvidia.dali.experimental.dynamic.Batch otherwise


class Api(Protocol):
    """What a stage needs of DALI.

    Attributes:
        name: "pipeline" or "dynamic".
        ops: the module of the operators; `ops.decoders`, `ops.transforms` and so on below it.
        math: min, max, floor and the like.
    """

    name: str
    ops: Any
    math: Any

    def part(self, data: Data, index: int | slice) -> Data:
        """`data[index]` along the first axis of each sample."""
        ...

    def size(self, images: Data, layout: str = "HWC") -> Data:
        """int64 (2,): (height, width) of each image."""
        ...

    def constant(self, value: float) -> Data:
        """The same float32 number for each sample."""
        ...

    def uniform(self, low: float, high: float) -> Data:
        """A float32 number for each sample, from [low, high)."""
        ...

    def coin(self, probability: float) -> Data:
        """int32 1 or 0 for each sample."""
        ...

    def draw(self, operator: Callable[..., Data], images: Data, **arguments: Any) -> Data:
        """Calls an operator that draws random numbers of its own."""
        ...

    def decoder_device(self, device: str) -> str:
        """What a decoder calls "cpu" or "gpu"."""
        ...


class _Graph:
    """Seeds are the pipeline's."""

    name = "pipeline"
    ops = fn
    math = dali_math

    def part(self, data: DataNode, index: int | slice) -> DataNode:
        return data[index]

    def size(self, images: DataNode, layout: str = "HWC") -> DataNode:
        shape = images.shape()
        return fn.stack(shape[layout.index("H")], shape[layout.index("W")])

    def constant(self, value: float) -> DataNode:
        return types.Constant(np.float32(value), device="cpu")

    def uniform(self, low: float, high: float) -> DataNode:
        return fn.random.uniform(range=(low, high))

    def coin(self, probability: float) -> DataNode:
        return fn.random.coin_flip(probability=probability)

    def draw(self, operator: Callable[..., DataNode], images: DataNode, **arguments: Any) -> DataNode:
        return operator(images, **arguments)

    def decoder_device(self, device: str) -> str:
        return "mixed" if device == "gpu" else "cpu"


GRAPH: Api = _Graph()
