"""What is asked of DALI to read images, said once: in a graph (`fn`) and imperatively (`ndd`) alike.

A call is either a reader of DALI (`ReaderCall`), or samples that Python gives (`ExternalCall`), for what no
reader of DALI can be trusted with. Both give the same two things, in the same order and the same parts:

    images  uint8 (bytes,), an encoded image; or (H, W, C), uint8 or float32, where `layout` is "HWC"
    labels  int32 (), -1 where there is none

Order and parts are those of readers.py; samples of Python are ordered here, by the same rules.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from nvidia.dali import Pipeline, fn, types
from nvidia.dali.data_node import DataNode

from common.reader_parts import integer_of
from common.shards import shard_range

if TYPE_CHECKING:
    from nvidia.dali.experimental.dynamic import Batch


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


class ExternalCall(NamedTuple):
    """Samples that Python gives, by their position.

    Attributes:
        sample: position -> (image, label); called in any order, from one thread at a time.
        size: number of samples.
        shard_id, num_shards, training, seed: as everywhere.
        layout: "HWC" where images are arrays.
    """

    sample: Callable[[int], tuple[np.ndarray, int]]
    size: int
    shard_id: int = 0
    num_shards: int = 1
    training: bool = False
    seed: int = 0
    layout: str = ""


Call = ReaderCall | ExternalCall


def in_graph(call: Call, name: str = "reader") -> tuple[DataNode, DataNode]:
    """(images, labels) inside a DALI graph, without end.

    A pipeline over either kind of call resumes exactly from `Pipeline.checkpoint()`.

    Args:
        call: what to read.
        name: of the operator, unique in its pipeline; `pipeline.epoch_size(name)` asks for it. DALI has no
            name for an ExternalCall: ask `size`.
    """
    if isinstance(call, ExternalCall):
        source = _Endless(call, Pipeline.current().max_batch_size)
        images, labels = fn.external_source(source=source, num_outputs=2, batch=False)
    else:
        outputs = getattr(fn.readers, call.operator)(name=name, **call.arguments)
        images, labels = _outputs(outputs, call)
        if labels is None:
            labels = types.Constant(_NO_LABEL, device="cpu")
        else:
            number = integer_of(labels) if call.label_is_text else fn.squeeze(labels, axes=[0])
            labels = fn.cast(number, dtype=types.INT32)
    return fn.reshape(images, layout=call.layout) if call.layout else images, labels


def in_dynamic(call: Call, batch_size: int, *, epochs: int = 1) -> Iterator["tuple[Batch, Batch]"]:
    """(images, labels) in batches of ndd, every image of this shard once an epoch.

    Args:
        call: what to read.
        batch_size: of all batches but the last of an epoch, which may be shorter.
        epochs: how often; each training epoch has an order of its own.
    """
    ndd = _dynamic()
    batches = _by_python if isinstance(call, ExternalCall) else _by_reader
    for images, labels in batches(call, batch_size, epochs):
        yield ndd.reshape(images, layout=call.layout) if call.layout else images, labels


_NO_LABEL = np.array(-1, np.int32)
_CLASS_OF = {
    "file": "File",
    "tfrecord": "TFRecord",
    "caffe": "Caffe",
    "caffe2": "Caffe2",
    "mxnet": "MXNet",
    "webdataset": "Webdataset",
    "numpy": "Numpy",
}


def _dynamic() -> ModuleType:
    """The dynamic API: half a second to import, and most who read images never ask for it."""
    import nvidia.dali.experimental.dynamic as ndd

    return ndd


def _by_reader(call: ReaderCall, batch_size: int, epochs: int) -> Iterator["tuple[Batch, Batch]"]:
    ndd = _dynamic()
    # Padded, batches do not reach into the next epoch.
    reader = getattr(ndd.readers, _CLASS_OF[call.operator])(**call.arguments | {"pad_last_batch": True})
    for epoch in range(epochs):
        left = None
        for outputs in reader.next_epoch(batch_size=batch_size):
            if left is None:
                left = _part_size(call.arguments, reader.get_metadata()["epoch_size"], epoch)
            count = min(batch_size, left)
            left -= count
            if not count:  # another shard has a batch more
                continue
            images, labels = _outputs(outputs, call)
            if labels is None:
                labels = ndd.as_batch([_NO_LABEL] * count)
            elif call.label_is_text:
                digits = _first(labels, count).tensors
                labels = ndd.as_batch(
                    [np.array(int(np.asarray(text).tobytes()), np.int32) for text in digits]
                )
            else:
                labels = ndd.cast(ndd.squeeze(_first(labels, count), axes=[0]), dtype=types.INT32)
            yield _first(images, count), labels


def _part_size(arguments: Mapping[str, Any], size: int, epoch: int) -> int:
    """How many images a reader gives in an epoch."""
    shard_id, num_shards = arguments["shard_id"], arguments["num_shards"]
    if not arguments.get("stick_to_shard") and not arguments.get("shuffle_after_epoch"):
        shard_id = (shard_id + epoch) % num_shards  # the readers pass their parts on
    begin, end = shard_range(size, shard_id, num_shards)
    return end - begin


def _outputs(outputs: Any, call: ReaderCall) -> tuple[Any, Any]:
    """(images, labels) among what a reader gives; labels None where there are none."""
    if not isinstance(outputs, tuple | list | dict):
        outputs = (outputs,)
    return outputs[call.image], None if call.label is None else outputs[call.label]


def _first(batch: "Batch", count: int) -> "Batch":
    ndd = _dynamic()
    # DALI 2.4: `batch.select(slice(count))` and a batch of `batch.tensors[:count]` hold all samples.
    return batch if batch.batch_size == count else ndd.as_batch(batch.tensors.tolist()[:count])


# --- samples of Python ---


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def _position(call: ExternalCall, epoch: int, place: int) -> int:
    """Which sample stands at a place of this shard's part of an epoch."""
    begin, _ = shard_range(call.size, call.shard_id, call.num_shards)
    if call.training:
        return int(_permutation(call.size, call.seed, epoch)[begin + place])
    return begin + place


def _by_python(call: ExternalCall, batch_size: int, epochs: int) -> Iterator["tuple[Batch, Batch]"]:
    ndd = _dynamic()
    begin, end = shard_range(call.size, call.shard_id, call.num_shards)
    for epoch in range(epochs):
        for first in range(0, end - begin, batch_size):
            places = range(first, min(first + batch_size, end - begin))
            samples = [call.sample(_position(call, epoch, place)) for place in places]
            images = ndd.as_batch([image for image, _ in samples])
            yield images, ndd.as_batch([np.array(label, np.int32) for _, label in samples])


class _Endless:
    """A source for `fn.external_source`: asked by number, so that a pipeline can resume anywhere.

    Training goes through one epoch's part after another, across batches. Evaluation repeats the last sample
    until all shards have the same number of batches, and begins anew.
    """

    def __init__(self, call: ExternalCall, batch_size: int):
        self._call = call
        self._batch_size = batch_size
        begin, end = shard_range(call.size, call.shard_id, call.num_shards)
        self._count = end - begin
        self._steps = -(-call.size // (batch_size * call.num_shards))

    def __call__(self, info: types.SampleInfo) -> tuple[np.ndarray, np.ndarray]:
        if self._call.training:
            number = info.iteration * self._batch_size + info.idx_in_batch
            epoch, place = divmod(number, self._count)
        else:
            place = info.iteration % self._steps * self._batch_size + info.idx_in_batch
            epoch, place = 0, min(place, self._count - 1)
        image, label = self._call.sample(_position(self._call, epoch, place))
        return image, np.array(label, np.int32)


def endless(call: ExternalCall, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(image, label) in the order in which `in_graph` of a pipeline with this batch size reads them."""
    read = _Endless(call, batch_size)
    for number in itertools.count():
        iteration, place = divmod(number, batch_size)
        yield read(types.SampleInfo(number, place, iteration, 0))
