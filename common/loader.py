"""What the loaders of both apps share: their options, the layout of a batch, and synthetic batches.

An app's loaders are subclasses: one by DALI, one by plain tf.data, and one that repeats a synthetic batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from common import dataset

if TYPE_CHECKING:
    from common.sources import Source

Shapes = dict[str, tuple[tuple[int | None, ...], tf.DType]]  # name -> shape of one image's tensor, dtype


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BaseLoader:
    """Feeds one rank. The same class serves training, evaluation and (without targets) inference.

    Training is infinite, shuffled, augmented. Evaluation goes through this rank's shard in order, with whole
    images; ranks whose shard is shorter repeat an image at the end.

    Attributes:
        source: what `common.datacheck.open_data.open_source` returns; None for synthetic data.
        config: the app's; it decides image size and augmentation.
        batch_size: images of a batch on this rank.
        training: shuffled and augmented; otherwise in order and whole.
        shard_id, num_shards: this rank's share of the data.
        num_threads, prefetch: CPU threads; batches made ahead.
        seed: of the order, the same on all ranks, and of the augmentation, another on each. 0 is a seed.
        with_targets: False leaves images, image_ids, image_sizes and letterbox only.
        count_lost: adds `lost`, int32 (B, 2): visible boxes below min_box_size; boxes above max_instances.
        name_images: adds `image_ids`, which evaluation always has, to training batches.
        saveable: whether tf.train.Checkpoint can save the dataset's iterator.
    """

    source: "Source | None"
    config: Any
    batch_size: int
    training: bool
    shard_id: int = 0
    num_shards: int = 1
    num_threads: int = 2
    prefetch: int = 2
    seed: int = 0
    with_targets: bool = True
    count_lost: bool = False
    name_images: bool = False

    saveable = True

    @property
    def size(self) -> int:
        """Images of the whole source, all ranks together."""
        return self.source.size

    @property
    def steps_per_epoch(self) -> int:
        """Batches that every rank takes in one epoch."""
        return dataset.steps_per_epoch(self.size, self.batch_size * self.num_shards, training=self.training)

    @property
    def image_size(self) -> tuple[int | None, int | None]:
        """(height, width) of the images; None where it changes from batch to batch."""
        return self.config.image_size

    def target_shapes(self) -> Shapes:
        """What the app's loss compares to."""
        raise NotImplementedError

    @functools.cached_property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Name -> shape and dtype of what one batch holds, in order. All loaders of an app have the same."""
        shapes: Shapes = {"images": ((*self.image_size, 3), tf.float32)}
        if self.with_targets:
            shapes |= self.target_shapes()
        if not self.training or self.name_images:
            shapes["image_ids"] = ((), tf.int64)
        if not self.training:
            shapes |= {"image_sizes": ((2,), tf.int32), "letterbox": ((4,), tf.float32)}
        if self.count_lost:
            shapes["lost"] = ((2,), tf.int32)
        return {
            name: tf.TensorSpec((self.batch_size, *shape), dtype) for name, (shape, dtype) in shapes.items()
        }

    @property
    def target_spec(self) -> dict[str, tf.TensorSpec]:
        """`element_spec` without the images."""
        return {name: spec for name, spec in self.element_spec.items() if name != "images"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DaliOptions:
    """What a loader by DALI takes besides.

    Attributes:
        device: "cpu", or "gpu": pixels are decoded, and all that follows is done, on that GPU.
        device_id: the GPU; None on a CPU.
        dali_device_id: another GPU for the pixels than the model's; common.loading.placement uses it.
        checkpointing: lets tf.train.Checkpoint save the dataset's iterator; DALI can on a CPU only.
    """

    device: str = "cpu"
    device_id: int | None = None
    dali_device_id: int | None = None
    checkpointing: bool = True

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "gpu") or (self.device == "gpu") != (self.device_id is not None):
            raise ValueError(
                f"device={self.device!r}, device_id={self.device_id!r}: need 'cpu' and None, or 'gpu' and a "
                "number"
            )

    @property
    def pipeline_type(self) -> str:
        """dali_cpu or dali_gpu."""
        return f"dali_{self.device}"

    @property
    def saveable(self) -> bool:
        """Whether tf.train.Checkpoint can save the dataset's iterator."""
        return self.checkpointing and self.device == "cpu"

    @property
    def pixel_device_id(self) -> int | None:
        """The GPU of the DALI pipeline; None on a CPU."""
        return self.device_id if self.dali_device_id is None else self.dali_device_id


def synthetic_dataset(
    loader: BaseLoader, example: Callable[[np.random.Generator], dict[str, np.ndarray]]
) -> tf.data.Dataset:
    """(images, targets): one batch without end. `example` makes an image and its targets, by their names."""
    random = np.random.default_rng([loader.seed, loader.shard_id])
    facts = {
        "image_sizes": np.array(loader.image_size, np.int32),
        "letterbox": np.array((0, 0, *loader.image_size), np.float32),
        "lost": np.zeros(2, np.int32),
    }
    examples = [{**example(random), **facts, "image_ids": i} for i in range(loader.batch_size)]
    batch = {
        name: tf.constant(np.stack([example[name] for example in examples]), spec.dtype)
        for name, spec in loader.element_spec.items()
    }
    return dataset.repeat_batch((batch.pop("images"), batch))
