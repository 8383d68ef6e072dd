"""Applies a chain of operators to the images of a source. Four interfaces return the results:

p = Preprocessor(source=open_image_source("files", "photos"), ops="resize:short=256 | crop:224x224")
images, labels = p.pipeline.run()        # DALI's Pipeline API
for images, labels in p.dynamic(): ...   # DALI's Dynamic API
for sample in p.samples(): ...           # NumPy, one epoch in the source's order
for images, labels in p.dataset(): ...   # TensorFlow
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import tensorflow as tf
from nvidia import dali

from common.dali_ops import Data
from common.data import loader
from common.errors import UserError
from tools.preprocessing import chain
from tools.preprocessing.apis import GRAPH, Api, Dynamic
from tools.preprocessing.formats.base import ImageSource
from tools.preprocessing.fusion import fuse
from tools.preprocessing.reading import Part
from tools.preprocessing.samples import Sample

_FAILURES = (RuntimeError, ValueError, TypeError, MemoryError)


@dataclasses.dataclass(kw_only=True, eq=False)
class Preprocessor:
    """Preprocesses the images of a source.

    Attributes:
        source: the result of `open_image_source`.
        ops: a chain of operators, see chain.py.
        training: whether to shuffle the images.
        device: "cpu" or "gpu". With "gpu", the decoded images and all later images are in GPU memory.
        device_id: number of the GPU; None on a CPU.
        num_threads: number of DALI's CPU threads.
        prefetch: number of batches that a pipeline makes in advance.
        shard_id, num_shards: number of this rank's shard, and number of all shards.
        seed: seed of the order of the images and of random arguments; 0 is a valid seed.
        size: number of images of this shard in one epoch.

    Raises:
        UserError: --ops is not valid, or there are fewer images than shards.
    """

    source: ImageSource
    ops: str = ""
    batch_size: int = 8
    training: bool = False
    device: str = "cpu"
    device_id: int | None = None
    num_threads: int = 2
    prefetch: int = 2
    shard_id: int = 0
    num_shards: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "gpu") or (self.device == "gpu") != (self.device_id is not None):
            given = f"device={self.device!r}, device_id={self.device_id!r}"
            raise ValueError(f"{given}: need 'cpu' and None, or 'gpu' and a number")
        is_decoded = self.source.is_decoded
        self.chain = chain.parse(self.ops, is_decoded=is_decoded)
        if not is_decoded and self.device == "cpu":
            self.chain = fuse(self.chain)
        self._part = Part(self.source, self.shard_id, self.num_shards, self.training, self.seed)
        self.size = self._part.size
        # Random arguments differ between ranks.
        self._seed = int(np.random.SeedSequence([self.seed, self.shard_id]).generate_state(1)[0])

    # --- DALI ---

    @functools.cached_property
    def pipeline(self) -> dali.Pipeline:
        """The built pipeline. Endlessly returns images and labels, int32 ()."""
        return self._build()

    def restored(self, checkpoint: str) -> dali.Pipeline:
        """Returns a pipeline that continues from `pipeline.checkpoint()`."""
        return self._build(checkpoint=checkpoint)

    def dynamic(self, *, epochs: int = 1) -> Iterator[tuple[ndd.Batch, ndd.Batch]]:
        """Yields batches of images and labels. An epoch's last batch may be smaller."""
        ndd.set_num_threads(self.num_threads)
        api = Dynamic(self._seed)
        for encoded, labels in self._part.in_dynamic(self.batch_size, epochs=epochs):
            api.batch_size = encoded.batch_size
            yield self._apply(api, encoded), labels

    # --- NumPy ---

    def samples(self, api: str = "pipeline") -> Iterator[Sample]:
        """Yields every image of this shard once, in the source's order. `api` is "pipeline" or "dynamic".

        Raises UserError, with the name of the image, if an operator fails.
        """
        if self.training:
            raise ValueError("samples() needs training=False: use `pipeline` or `dynamic`")
        position = self._part.begin
        try:
            for image in self._images(api):
                name, label = self.source.images[position].name, int(self.source.labels[position])
                yield Sample(position, name, label, image, self.chain.layout)
                position += 1
        except _FAILURES as error:
            raise self._explain(error, position) from error

    def _images(self, api: str) -> Iterator[np.ndarray]:
        if api == "dynamic":
            for images, _ in self.dynamic():
                yield from map(np.array, images.cpu().tensors)
            return
        # A new pipeline, because `self.pipeline` may be in the middle of an epoch.
        pipeline = self._build(checkpointing=False)
        for begin in range(0, self.size, self.batch_size):
            batch = pipeline.run()[0].as_cpu()
            for i in range(min(self.batch_size, self.size - begin)):
                yield np.array(batch[i])

    # --- TensorFlow ---

    def dataset(self) -> tf.data.Dataset:
        """Returns an endless tf.data.Dataset of (images, labels). The images of a batch must have one size.

        If the source has no DALI reader, the position of the dataset's iterator cannot be saved.
        """
        dtype = tf.as_dtype(self._alone(self._part.begin).dtype)
        images = tf.TensorSpec((self.batch_size, None, None, None), dtype)
        spec = images, tf.TensorSpec((self.batch_size,), tf.int32)
        if self.source.reader is None:
            return tf.data.Dataset.from_generator(self._arrays, output_signature=spec)
        pipeline = self._define(checkpointing=self.device == "cpu")
        return loader.from_pipeline(pipeline, spec, device_id=self.device_id)

    def _arrays(self) -> Iterator[tuple[np.ndarray, ...]]:
        pipeline = self._build(checkpointing=False)
        while True:
            yield tuple(part.as_cpu().as_array() for part in pipeline.run())

    # --- inside ---

    def _build(self, **options: Any) -> dali.Pipeline:
        pipeline = self._define(**options)
        pipeline.build()
        return pipeline

    def _define(self, *, checkpointing: bool = True, checkpoint: str | None = None) -> dali.Pipeline:
        pipeline = dali.Pipeline(
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            device_id=self.device_id,
            prefetch_queue_depth=self.prefetch,
            seed=self._seed,
            exec_dynamic=True,  # else DALI overwrites batches that the caller holds
            enable_checkpointing=checkpointing,
            checkpoint=checkpoint,
        )
        with pipeline:
            encoded, labels = self._part.in_graph()
            images = self._apply(GRAPH, encoded)
            pipeline.set_outputs(images, labels.gpu() if self.device == "gpu" else labels)
        return pipeline

    def _apply(self, api: Api, encoded: Data) -> Data:
        return self.chain.apply(api, encoded, is_decoded=self.source.is_decoded, device=self.device)

    def _alone(self, position: int) -> np.ndarray:
        alone = copy.copy(self)
        alone.batch_size, alone._part = 1, Part(self.source, position, self.source.size)
        return np.array(alone._build(checkpointing=False).run()[0].as_cpu()[0])

    def _explain(self, error: Exception, position: int) -> UserError:
        """Names the image that fails, by running each image of the batch alone."""
        for suspect in range(position, min(position + self.batch_size, self._part.begin + self.size)):
            try:
                self._alone(suspect)
            except _FAILURES as found:
                return UserError(f"image {suspect} ({self.source.images[suspect].name!r}): {_reason(found)}")
        return UserError(f"an image in the batch that begins with image {position} failed: {_reason(error)}")


def _reason(error: Exception) -> str:
    text = str(error.__cause__ or error)
    operator = re.search(r"operator `nvidia\.dali\.fn\.([\w.]+)`", text)
    _, _, said = text.removeprefix("Multiple exceptions:").rpartition("encountered:")
    first = next((line.strip() for line in said.splitlines() if line.strip()), "")
    first = re.sub(r'^(N4dali\w+: )?(Assert on ".*?" failed: )?', "", first).rstrip(".")
    if operator and operator[1].startswith("crop") and first.startswith("Slice can't be placed"):
        first = "the crop reaches beyond the image; fill=0 pads smaller images"
    return f"{operator[1]}: {first}" if operator else first
