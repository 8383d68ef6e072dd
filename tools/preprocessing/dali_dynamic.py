"""The Dynamic API of DALI behind the face of dali_api.py; a module of its own because few need its import."""

from collections.abc import Callable
from typing import Any

import numpy as np
import nvidia.dali.experimental.dynamic as ndd


class Dynamic:
    """For one batch after the other; `batch_size` follows the batch at hand (the last may be shorter)."""

    name = "dynamic"
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

    def draw(self, operator: Callable[..., ndd.Batch], images: ndd.Batch, **arguments: Any) -> ndd.Batch:
        return operator(images, rng=self._rng, **arguments)

    def decoder_device(self, device: str) -> str:
        return device
