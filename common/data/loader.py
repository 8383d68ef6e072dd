"""The common code of both apps' loaders: options, shapes of a batch, devices, `--pipeline_type`.

An app's loaders are subclasses of `BaseLoader`. Every loader yields `(images, targets)` with static shapes,
whose first axis is the batch.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia import dali
from nvidia.dali import backend

from common.args import DECODER_FLAGS, Args, EvalArgs, InferArgs, default_threads
from common.dali_ops import Decoder
from common.data.sources import Data, Source
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.progress import log_once

SYNTHETIC_IMAGES = 1024  # in an epoch
SYNTHETIC_BOXES = 7  # boxes per synthetic image; COCO train2017 has 7.3 boxes per image
LOADER_FLAGS = ("pipeline_type", "batch_size", "prefetch", *DECODER_FLAGS)
MAX_RESERVED = 2**30  # bytes; above this, JPEG engines reserve no memory
LOADER_VERSION = 1  # raise it if the iterators of the previous version cannot be restored

Batch = tuple[Any, dict[str, Any]]  # images, targets
ElementSpec = tuple[tf.TensorSpec, dict[str, tf.TensorSpec]]
Shapes = dict[str, tuple[tuple[int | None, ...], tf.DType]]  # name -> shape of one image's tensor, dtype


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BaseLoader:
    """Loads the batches of one replica (training) or rank (evaluation, inference).

    In evaluation, a shorter shard repeats an image at the end.

    Attributes:
        source: the data set, from `open_source` of common/data/open.py; None for synthetic data.
        config: the app's config, which sets image size and augmentation.
        batch_size: images per batch.
        training: if True, images are shuffled and augmented. If False, whole images are read in order.
        shard_id: index of the shard that is read.
        num_shards: number of shards.
        num_threads: number of CPU threads.
        prefetch: number of batches that are loaded ahead.
        device_id: the GPU that gets the batches, as CUDA and DALI number it. None: batches are on the CPU.
        hw_decoder_load: on a GPU, see dali_ops.Decoder.
        fancy_upsampling: on a GPU, see dali_ops.Decoder.
        roi_decoding: on a GPU, see dali_ops.Decoder.
        num_classes: number of classes of synthetic data.
        checkpointing: lets tf.train.Checkpoint save `iterator()`; has no effect on a GPU.
        seed: sets the order of the images, equal for all shards, and the augmentation, different for each.
        shuffle: the order of TFRecords and WebDataset in training, one of args.SHUFFLES; DALI only.
        with_targets: if False, batches have only images, image_ids, image_sizes and letterbox.
        count_lost: adds `lost`, int32 (B, 2), numbers of boxes that min_box_size and max_instances removed.
        name_images: adds `image_ids` to training batches; evaluation batches always have them.
    """

    source: Source | None
    config: Any
    batch_size: int
    training: bool
    shard_id: int = 0
    num_shards: int = 1
    num_threads: int = 2
    prefetch: int = 2
    device_id: int | None = None
    hw_decoder_load: float = Decoder.hw_load
    fancy_upsampling: bool = Decoder.fancy_upsampling
    roi_decoding: bool = Decoder.roi
    num_classes: int = 80
    checkpointing: bool = True
    seed: int = 0
    shuffle: str = "global"
    with_targets: bool = True
    count_lost: bool = False
    name_images: bool = False

    @property
    def pipeline_type(self) -> str:
        """dali_gpu, dali_cpu, tensorflow or synthetic."""
        raise NotImplementedError

    @property
    def saveable(self) -> bool:
        """Whether tf.train.Checkpoint can save `iterator()`."""
        return self.checkpointing and self.device_id is None

    @property
    def opened_source(self) -> Source:
        """The source; raises ValueError for synthetic data."""
        if self.source is None:
            raise ValueError("synthetic data have no source")
        return self.source

    @property
    def size(self) -> int:
        """Number of images, for all ranks together."""
        return self.opened_source.size

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one epoch, the same on every rank."""
        return steps_per_epoch(self.size, self.batch_size * self.num_shards, training=self.training)

    @property
    def image_size(self) -> tuple[int | None, int | None]:
        """The (height, width) of the images. A side that changes from batch to batch is None."""
        return self.config.image_size

    def dataset(self) -> tf.data.Dataset:
        """Returns an endless dataset of (images, targets): float32 (B, H, W, 3), and a dict of tensors.

        The dict has `target_shapes`. Evaluation adds image_ids, int64 (B,); image_sizes, int32 (B, 2), height
        and width of the stored image; letterbox, float32 (B, 4), top, left, height, width in input pixels.
        """
        raise NotImplementedError

    def iterator(self) -> Iterator[Batch]:
        """Returns endless batches for a training step. On a GPU, their int32 tensors are converted to int64.

        TensorFlow copies int32 arguments of a compiled function from the GPU to the host, but not int64
        (tensorflow/core/common_runtime/eager/execute.cc GetDeviceForInput).

        Raises:
            UserError: the data are in a bucket, and have changed, or the store does not answer.
        """
        if self.source:  # if DALI's plugin finds no store, it aborts the process
            self.source.check_unchanged(strict=True)
        with tf.device(tensorflow_device(self.device_id)):
            batches = iter(self.dataset())
            if self.pipeline_type == "synthetic" and self.device_id is not None:  # copy and convert only once
                return itertools.repeat(_without_int32(tf.nest.map_structure(tf.identity, next(batches))))
        return batches if self.device_id is None else map(_without_int32, batches)

    def target_shapes(self) -> Shapes:
        """Returns the shapes and dtypes of the targets."""
        raise NotImplementedError

    @functools.cached_property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Name -> shape and dtype of each tensor of a batch, in order."""
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
class DaliOptions(BaseLoader):
    """The common part of loaders that use DALI."""

    @property
    def device(self) -> str:
        """Where images are decoded and processed, "cpu" or "gpu"."""
        return "cpu" if self.device_id is None else "gpu"

    @property
    def pipeline_type(self) -> str:
        """dali_cpu or dali_gpu."""
        return f"dali_{self.device}"

    @property
    def decoder(self) -> Decoder:
        height, width = self.opened_source.annotations.image_sizes.max(axis=0, initial=0).tolist()
        fits = self.batch_size * self.hw_decoder_load * height * width * 3 <= MAX_RESERVED
        largest = (height, width) if fits else (0, 0)
        return Decoder(self.device, self.hw_decoder_load, largest, self.roi_decoding, self.fancy_upsampling)


def steps_per_epoch(num_images: int, global_batch_size: int, *, training: bool) -> int:
    """Returns the number of steps in one epoch, the same on every rank.

    Training leaves an incomplete last batch to the next epoch. Evaluation reads every image.
    """
    if training:
        return max(num_images // global_batch_size, 1)
    return -(-num_images // global_batch_size)


# --- --pipeline_type ---


def resolve_type(pipeline_type: str) -> str:
    """Replaces auto by dali_gpu or dali_cpu. Raises UserError for dali_gpu without a GPU."""
    if pipeline_type == "auto":
        if not gpu_visible() and backend.GetCUDADeviceCount():
            log_once(
                "warning: DALI sees a GPU, but TensorFlow does not, so everything runs on the CPU: run "
                "`make setup` again, or install TensorFlow's CUDA libraries (its extra: tensorflow[and-cuda])"
            )
        return "dali_gpu" if gpu_visible() else "dali_cpu"
    if pipeline_type == "dali_gpu" and not gpu_visible():
        raise UserError("--pipeline_type=dali_gpu needs a GPU that TensorFlow and DALI see: use dali_cpu")
    return pipeline_type


def make_loader(
    classes: Mapping[str, type[BaseLoader]],
    pipeline_type: str,
    *,
    device_id: int = 0,
    num_threads: int | None = None,
    **options: Any,
) -> BaseLoader:
    """Makes the loader that `--pipeline_type` selects.

    Args:
        classes: the app's loader classes, with the names dali, tensorflow and synthetic.
        pipeline_type: one of args.PIPELINE_TYPES; UserError for dali_gpu without a GPU.
        num_threads, options: arguments of the app's loader.
    """
    pipeline_type = resolve_type(pipeline_type)
    if pipeline_type == "dali_gpu" or (pipeline_type == "synthetic" and gpu_visible()):
        options["device_id"] = device_id
    kind = pipeline_type.removesuffix("_gpu").removesuffix("_cpu")
    return classes[kind](num_threads=num_threads or default_threads(), **options)


def open_loader(
    classes: Mapping[str, type[BaseLoader]],
    a: Args,
    ranks: Ranks,
    config: Any,
    data: Data,
    *,
    training: bool,
    device_index: int = 0,
    **epoch_options: Any,
) -> BaseLoader:
    """Opens the training loader of one replica of this process, or the evaluation loader of this rank.

    Args:
        classes: the loader classes of the app, see make_loader.
        training: whether to open the training loader or the evaluation loader.
        device_index: index in `ranks.local_replicas`.
        epoch_options: further arguments of the loader, which the app's `epoch_options` returns for an epoch.
    """
    if training:
        shard_id, num_shards = ranks.local_replicas[device_index], ranks.num_replicas
        options: dict[str, Any] = {"source": data.train, "count_lost": True, "name_images": True}
    else:
        shard_id, num_shards = ranks.rank, ranks.world_size
        options = {"source": data.evaluation, "with_targets": False}
    return make_loader(
        classes,
        config=config,
        training=training,
        shard_id=shard_id,
        num_shards=num_shards,
        num_classes=data.num_classes,
        device_id=ranks.gpu_number(device_index),
        num_threads=a.num_threads or default_threads(ranks.local_size * len(ranks.local_replicas)),
        **{name: getattr(a, name) for name in LOADER_FLAGS},
        **options,
        **epoch_options,
    )


def evaluation_options(a: EvalArgs | InferArgs) -> dict[str, Any]:
    """Returns the arguments of `make_loader` for the flags of eval.py and infer.py, except --pipeline_type.

    Raises:
        UserError: the data would be synthetic.
    """
    if a.pipeline_type == "synthetic":
        raise UserError("--pipeline_type=synthetic only measures training speed: use --pipeline_type=auto")
    names = ("batch_size", "num_threads", "prefetch", *DECODER_FLAGS)
    return {name: getattr(a, name) for name in names} | {"training": False, "with_targets": False}


def gpu_visible() -> bool:
    """Returns whether both TensorFlow and DALI see a GPU."""
    return bool(tf.config.list_physical_devices("GPU")) and backend.GetCUDADeviceCount() > 0


def tensorflow_device(device_id: int | None) -> str:
    """Returns TensorFlow's name of a device.

    `device_id` is the number of a GPU in CUDA and DALI, or None for the CPU.
    """
    if device_id is None:
        return "/cpu:0"
    visible = [int(gpu.name.rpartition(":")[2]) for gpu in tf.config.get_visible_devices("GPU")]
    return f"/gpu:{visible.index(device_id)}"


def _without_int32(batch: Batch) -> Batch:
    def without(x: tf.Tensor) -> tf.Tensor:
        with tf.device(x.device):  # otherwise the first GPU would convert all
            return tf.cast(x, tf.int64) if x.dtype == tf.int32 else x

    return tf.nest.map_structure(without, batch)


# --- tf.data ---


def from_pipeline(
    pipeline: dali.Pipeline, element_spec: ElementSpec, *, device_id: int | None
) -> tf.data.Dataset:
    """Makes an endless tf.data dataset from a DALI pipeline.

    Iterators of the dataset can be saved on a CPU, if the pipeline was made with checkpointing.

    Args:
        pipeline: must not be built or run, because DALIDataset builds its own copy.
        element_spec: shapes and dtypes of a batch, (images, targets). The pipeline's outputs must have the
            order of tf.nest.flatten(element_spec): the images, then the targets by name.
        device_id: GPU of the pipeline; None for a pipeline without a GPU.
    """
    with tf.device(tensorflow_device(device_id)):
        flat = dali_tf.DALIDataset(
            pipeline=pipeline,
            batch_size=pipeline.max_batch_size,
            output_shapes=tuple(spec.shape for spec in tf.nest.flatten(element_spec)),
            output_dtypes=tuple(spec.dtype for spec in tf.nest.flatten(element_spec)),
            num_threads=pipeline.num_threads,
            device_id=device_id,
            prefetch_queue_depth=pipeline.prefetch_queue_depth,
        )
        if device_id is not None:
            return _OnGPU(flat, element_spec)
        return flat.map(lambda *tensors: tf.nest.pack_sequence_as(element_spec, tensors))


class _OnGPU(tf.data.Dataset):
    """A dataset on a GPU. Its elements get the structure of `element_spec`."""

    def __init__(self, flat: tf.data.Dataset, element_spec: ElementSpec) -> None:
        self._flat, self._element_spec = flat, element_spec
        super().__init__(flat._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._flat]

    @property
    def element_spec(self) -> ElementSpec:
        return self._element_spec


def synthetic_dataset(
    loader: BaseLoader, example: Callable[[np.random.Generator], dict[str, np.ndarray]]
) -> tf.data.Dataset:
    """Repeats one batch without end. `example` makes one image with its targets."""
    random = np.random.default_rng([loader.seed, loader.shard_id])
    facts: dict[str, Any] = {
        "image_sizes": np.array(loader.image_size, np.int32),
        "letterbox": np.array((0, 0, *loader.image_size), np.float32),
        "lost": np.zeros(2, np.int32),
    }
    examples = [{**example(random), **facts, "image_ids": i} for i in range(loader.batch_size)]
    batch = {
        name: tf.constant(np.stack([example[name] for example in examples]), spec.dtype)
        for name, spec in loader.element_spec.items()
    }
    return tf.data.Dataset.from_tensors((batch.pop("images"), batch)).repeat()


def synthetic_boxes(
    random: np.random.Generator, num_classes: int, max_instances: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns random boxes and classes for one image, padded with -1."""
    centers = random.uniform(0.2, 0.8, (SYNTHETIC_BOXES, 2))
    half_sizes = random.uniform(0.02, 0.2, (SYNTHETIC_BOXES, 2))
    boxes = np.concatenate([centers - half_sizes, centers + half_sizes], 1).astype(np.float32)
    classes = random.integers(num_classes, size=SYNTHETIC_BOXES, dtype=np.int32)
    count = min(SYNTHETIC_BOXES, max_instances)
    padding = [0, max_instances - count]
    boxes = np.pad(boxes[:count], [padding, [0, 0]], constant_values=-1)
    return boxes, np.pad(classes[:count], [padding], constant_values=-1)
