"""Random numbers for loaders in plain tf.data: each a function of a seed, nothing else."""

import tensorflow as tf


class Random:
    """Random numbers, new ones at every call, all determined by the seed.

    The calls are counted in Python, while a graph is traced: one inside a loop of the graph gives the same
    numbers every time round.

    Args:
        seed: int32 or int64 (2,), of the thing that the numbers are for: fold its index into a seed.
    """

    def __init__(self, seed: tf.Tensor) -> None:
        self._seed = seed
        self._drawn = 0

    def uniform(
        self, low: float | tf.Tensor, high: float | tf.Tensor, shape: tuple[int, ...] = ()
    ) -> tf.Tensor:
        """float32, low <= x < high."""
        return tf.random.stateless_uniform(shape, self._next_seed(), low, high)

    def permutation(self, count: int) -> tf.Tensor:
        """int32 (count,): the numbers from 0 to count - 1 in any order."""
        return tf.random.experimental.stateless_shuffle(tf.range(count), self._next_seed())

    def _next_seed(self) -> tf.Tensor:
        self._drawn += 1
        return tf.random.fold_in(self._seed, self._drawn)
