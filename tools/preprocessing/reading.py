"""Reads a source: in a DALI graph (`fn`), by the Dynamic API (`ndd`), or as inputs of a DALIDataset.

A source is read by one of DALI's readers (`ReaderCall`), or sample by sample by Python (`PythonCall`), where
no reader of DALI can read it correctly. Both give the same two outputs, in the same order:

    images  uint8 (bytes,), an encoded image; or (H, W, C), uint8 or float32, where `layout` is "HWC"
    labels  int32 (), -1 where there is none

Order and parts are those of common/readers.py. LMDB is permuted within the buffer alone, and each epoch a
rank reads the part of the next one.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia.dali import Pipeline, fn, types
from nvidia.dali.data_node import DataNode

from common import dali_ops, tfrecord
from common.dali_ops import shard_range

_NO_LABEL = np.array(-1, np.int32)
_CLASSES = {"tfrecord": "TFRecord", "mxnet": "MXNet"}  # in ndd.readers; others are capitalised


class Part(NamedTuple):
    """What a shard reads, and in which order: the arguments of `ImageSource.call`."""

    shard_id: int
    num_shards: int
    training: bool
    seed: int


class ReaderCall(NamedTuple):
    """A reader operator of DALI and its arguments.

    Attributes:
        operator: its name in fn.readers.
        arguments: all but `name`.
        image: which of its outputs is the image: a position, or a key of TFRecord's dict.
        label: which of its outputs is the label, one number in a list; None: there is none.
        layout: "HWC" where images are arrays.
        label_is_text: the label is written in decimal digits.
    """

    operator: str
    arguments: dict[str, Any]
    image: int | str = 0
    label: int | str | None = 1
    layout: str = ""
    label_is_text: bool = False

    def of_part(self, part: Part) -> "ReaderCall":
        """The same reader for one shard."""
        if part.training and self.operator.startswith("caffe"):
            order = dali_ops.buffer_order(part.seed)
        else:
            in_container = self.operator not in ("file", "numpy")
            order = dali_ops.order(part.training, part.seed, in_container=in_container)
        shard = {"shard_id": part.shard_id, "num_shards": part.num_shards}
        return self._replace(arguments=self.arguments | shard | order)


class PythonCall(NamedTuple):
    """Samples that Python reads by their position.

    Attributes:
        load: position -> image; called in any order, from one thread at a time.
        labels: int32 (N,), of all images.
        part: the shard and the order.
        layout: "HWC" where images are arrays.
    """

    load: Callable[[int], np.ndarray]
    labels: np.ndarray
    part: Part
    layout: str = ""

    def position(self, epoch: int, place: int) -> int:
        """The sample at a place of this shard's part of an epoch."""
        begin, _ = shard_range(len(self.labels), self.part.shard_id, self.part.num_shards)
        if self.part.training:
            return int(_permutation(len(self.labels), self.part.seed, epoch)[begin + place])
        return begin + place

    def position_in_batch(self, batch_size: int, batch: int, row: int) -> int:
        """The sample at a place of an endless stream of batches.

        Training reads one epoch's part after another, across batches. Evaluation repeats the last sample
        until all shards have the same number of batches, and begins anew.
        """
        begin, end = shard_range(len(self.labels), self.part.shard_id, self.part.num_shards)
        if self.part.training:
            return self.position(*divmod(batch * batch_size + row, end - begin))
        num_batches = -(-len(self.labels) // (batch_size * self.part.num_shards))
        return self.position(0, min(batch % num_batches * batch_size + row, end - begin - 1))


Call = ReaderCall | PythonCall


def in_graph(call: Call, name: str = "reader") -> tuple[DataNode, DataNode]:
    """(images, labels) inside a DALI graph, without end.

    A pipeline over either kind of call resumes exactly from `Pipeline.checkpoint()`.

    Args:
        call: what to read.
        name: of the operator, unique in its pipeline, for `pipeline.epoch_size(name)`. DALI has no name for
            a PythonCall.
    """
    if isinstance(call, PythonCall):
        batch_size = Pipeline.current().max_batch_size

        def sample(info: types.SampleInfo) -> tuple[np.ndarray, np.ndarray]:
            position = call.position_in_batch(batch_size, info.iteration, info.idx_in_batch)
            return call.load(position), np.array(call.labels[position])

        images, labels = fn.external_source(source=sample, num_outputs=2, batch=False)
    else:
        images, labels = _outputs(getattr(fn.readers, call.operator)(name=name, **call.arguments), call)
        if labels is None:
            labels = types.Constant(_NO_LABEL, device="cpu")
        else:
            number = tfrecord.parse_integer(labels) if call.label_is_text else fn.squeeze(labels, axes=[0])
            labels = fn.cast(number, dtype=types.INT32)
    return fn.reshape(images, layout=call.layout) if call.layout else images, labels


def in_dynamic(call: Call, batch_size: int, *, epochs: int = 1) -> Iterator[tuple[ndd.Batch, ndd.Batch]]:
    """(images, labels) in batches of ndd, every image of this shard once an epoch.

    Args:
        call: what to read.
        batch_size: of all batches but the last of an epoch, which may be shorter.
        epochs: number of epochs; each training epoch has another order.
    """
    batches = _by_python if isinstance(call, PythonCall) else _by_reader
    for images, labels in batches(call, batch_size, epochs):
        yield ndd.reshape(images, layout=call.layout) if call.layout else images, labels


def tf_inputs(
    call: PythonCall, batch_size: int
) -> tuple[Callable[[], tuple[DataNode, DataNode]], dict[str, dali_tf.experimental.Input]]:
    """Hands samples of Python from tf.data to DALI: a graph in a DALIDataset cannot hold a Python function.

    Returns:
        The function that reads (images, labels) inside the graph; `input_datasets` of DALIDatasetWithInputs.
    """

    def dataset(value: Callable[[int], np.ndarray]) -> tf.data.Dataset:
        def values() -> Iterator[np.ndarray]:
            for number in itertools.count():
                yield value(call.position_in_batch(batch_size, *divmod(number, batch_size)))

        first = value(0)
        spec = tf.TensorSpec([None] * np.ndim(first), tf.as_dtype(first.dtype))
        return tf.data.Dataset.from_generator(values, output_signature=spec)

    layout = call.layout or None
    return (
        lambda: (fn.external_source(name="images", layout=layout), fn.external_source(name="labels")),
        {
            "images": dali_tf.experimental.Input(dataset(call.load), layout=layout),
            "labels": dali_tf.experimental.Input(dataset(lambda position: np.array(call.labels[position]))),
        },
    )


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def _by_python(call: PythonCall, batch_size: int, epochs: int) -> Iterator[tuple[ndd.Batch, ndd.Batch]]:
    begin, end = shard_range(len(call.labels), call.part.shard_id, call.part.num_shards)
    for epoch in range(epochs):
        for first in range(0, end - begin, batch_size):
            places = range(first, min(first + batch_size, end - begin))
            positions = [call.position(epoch, place) for place in places]
            images = ndd.as_batch([call.load(position) for position in positions])
            yield images, ndd.as_batch([np.array(call.labels[position]) for position in positions])


def _by_reader(call: ReaderCall, batch_size: int, epochs: int) -> Iterator[tuple[ndd.Batch, ndd.Batch]]:
    # Padded, batches do not reach into the next epoch.
    arguments = call.arguments | {"pad_last_batch": True}
    reader = getattr(ndd.readers, _CLASSES.get(call.operator, call.operator.capitalize()))(**arguments)
    shard_id, num_shards = arguments["shard_id"], arguments["num_shards"]
    # Otherwise the readers exchange their parts after each epoch.
    stays = arguments.get("stick_to_shard") or arguments.get("shuffle_after_epoch")
    for epoch in range(epochs):
        left = None
        for outputs in reader.next_epoch(batch_size=batch_size):
            if left is None:
                size = reader.get_metadata()["epoch_size"]
                begin, end = shard_range(size, (shard_id + (0 if stays else epoch)) % num_shards, num_shards)
                left = end - begin
            count = min(batch_size, left)
            left -= count
            if not count:  # another shard has a batch more
                continue
            images, labels = _outputs(outputs, call)
            if labels is None:
                labels = ndd.as_batch([_NO_LABEL] * count)
            elif call.label_is_text:
                texts = [np.asarray(text).tobytes() for text in _first(labels, count).tensors]
                labels = ndd.as_batch([np.array(int(text), np.int32) for text in texts])
            else:
                labels = ndd.cast(ndd.squeeze(_first(labels, count), axes=[0]), dtype=types.INT32)
            yield _first(images, count), labels


def _outputs(outputs: Any, call: ReaderCall) -> tuple[Any, Any]:
    """(images, labels) among a reader's outputs; labels None where there are none."""
    if not isinstance(outputs, tuple | list | dict):
        outputs = (outputs,)
    return outputs[call.image], None if call.label is None else outputs[call.label]


def _first(batch: ndd.Batch, count: int) -> ndd.Batch:
    # DALI 2.4: `batch.select(slice(count))` and a batch of `batch.tensors[:count]` hold all samples.
    return batch if batch.batch_size == count else ndd.as_batch(batch.tensors.tolist()[:count])
