"""One interface to DALI's two APIs, for the operators of `--ops`.

GRAPH            the Pipeline API, nvidia.dali.fn: nodes of a graph that runs later, prefetched
Dynamic(seed)    the Dynamic API, nvidia.dali.experimental.dynamic: batches, computed at once
"""

import operator
from typing import Any

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import fn
from nvidia.dali import math as dali_math

from common import dali_ops
from common.dali_ops import Data


class Api(dali_ops.Api):
    """The Pipeline API. Random operators use the seed of the pipeline."""

    math: Any = dali_math

    def decoder_device(self, device: str) -> str:
        """Returns the decoders' name for the device "cpu" or "gpu"."""
        return "mixed" if device == "gpu" else "cpu"

    def size(self, images: Data) -> Data:
        """Returns (height, width) of each image (H, W, C), int64 (2,)."""
        shape = images.shape()
        return fn.stack(shape[0], shape[1])

    def draw(self, name: str, *images: Data, **arguments: Any) -> Data:
        """Calls a random operator by its name, such as "random.uniform"."""
        return operator.attrgetter(name)(fn)(*images, **arguments)


class Dynamic(Api):
    """The Dynamic API. The caller must set `batch_size` to the size of the current batch."""

    ops = ndd
    math = ndd.math

    def __init__(self, seed: int) -> None:
        self.batch_size = 1
        self._random = ndd.random.RNG(seed=seed)

    def part(self, data: ndd.Batch, index: int | slice) -> ndd.Batch:
        return data.slice[index]

    def decoder_device(self, device: str) -> str:
        return device

    def size(self, images: ndd.Batch) -> ndd.Batch:
        return ndd.as_batch([np.array(shape[:2]) for shape in images.shape])

    def draw(self, name: str, *images: ndd.Batch, **arguments: Any) -> ndd.Batch:
        if not images:
            arguments["batch_size"] = self.batch_size
        return operator.attrgetter(name)(ndd)(*images, rng=self._random, **arguments)


GRAPH = Api()
