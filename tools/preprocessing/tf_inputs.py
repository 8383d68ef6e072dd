"""Samples of Python for DALIDatasetWithInputs: a graph in a DALIDataset cannot hold a Python function."""

import collections
import threading
from collections.abc import Callable, Iterator

import numpy as np
import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

from common.reader_calls import ExternalCall, endless

_NAMES = ("images", "labels")


def tf_inputs(
    call: ExternalCall, batch_size: int
) -> tuple[Callable[[], tuple[DataNode, DataNode]], dict[str, dali_tf.experimental.Input]]:
    """Both ends of a hand-over from tf.data to DALI.

    Args:
        call: what to read.
        batch_size: of the pipeline.

    Returns:
        What reads (images, labels) inside the graph; the `input_datasets` of DALIDatasetWithInputs.
    """

    def read() -> tuple[DataNode, DataNode]:
        images = fn.external_source(name=_NAMES[0], layout=call.layout or None)
        return images, fn.external_source(name=_NAMES[1])

    first, _ = call.sample(0)
    specs = (
        tf.TensorSpec([None] * np.ndim(first), tf.as_dtype(np.asarray(first).dtype)),
        tf.TensorSpec([], tf.int32),
    )
    halves = _Halves(lambda: endless(call, batch_size))
    datasets = {
        name: tf.data.Dataset.from_generator(lambda half=half: halves.read(half), output_signature=spec)
        for half, (name, spec) in enumerate(zip(_NAMES, specs, strict=True))
    }
    return read, {
        name: dali_tf.experimental.Input(dataset, layout=(call.layout or None) if name == "images" else None)
        for name, dataset in datasets.items()
    }


class _Halves:
    """Pairs read once and handed out as two streams, whose readers may be threads of their own."""

    def __init__(self, pairs: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]) -> None:
        self._pairs = pairs
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[Iterator, tuple[collections.deque, collections.deque]]] = {}
        self._started = [0, 0]

    def read(self, half: int) -> Iterator[np.ndarray]:
        with self._lock:
            number = self._started[half]  # the n-th iteration of one dataset goes with the n-th of the other
            self._started[half] += 1
            if number not in self._streams:
                self._streams[number] = (self._pairs(), (collections.deque(), collections.deque()))
            pairs, waiting = self._streams[number]
        try:
            while True:
                with self._lock:
                    if not waiting[half]:
                        for queue, value in zip(waiting, next(pairs), strict=True):
                            queue.append(value)
                    value = waiting[half].popleft()
                yield value
        finally:  # whoever iterates has let go: the other half holds what it still needs itself
            with self._lock:
                self._streams.pop(number, None)
