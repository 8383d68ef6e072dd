"""Who loads: `--pipeline_type` to an object with `.dataset()`, `.size`, `.steps_per_epoch`.

auto         dali_gpu where TensorFlow and DALI both see a GPU, else dali_cpu
dali_gpu     DALI, JPEGs decoded and everything after on the GPU
dali_cpu     DALI without any GPU
tensorflow   the plain tf.data twin
synthetic    one random batch for ever, with targets encoded for real: what a step costs without a loader
"""

import contextlib
from typing import Protocol

import numpy as np
import tensorflow as tf
from nvidia.dali import backend

from common import box_encoder, dataset
from common.errors import UserError, unknown
from common.flags import PIPELINE_TYPES
from common.sources import Source
from efficientdet import pipeline
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import EfficientDetPipeline
from efficientdet.tf_pipeline import EfficientDetTFPipeline

SYNTHETIC_IMAGES = 1024  # what one epoch of synthetic data counts as
SYNTHETIC_BOXES = 7  # per image; COCO train2017 has 7.3


class Loader(Protocol):
    """What the training loop asks of whoever loads.

    Attributes:
        pipeline_type: dali_gpu, dali_cpu, tensorflow or synthetic.
        saveable: whether tf.train.Checkpoint can save the dataset's iterator.
        size: images of the whole source, all ranks together.
        steps_per_epoch: batches that every rank takes in one epoch.
        element_spec: name -> tf.TensorSpec of one batch: images, then the targets.
    """

    pipeline_type: str
    saveable: bool
    size: int
    steps_per_epoch: int
    element_spec: dict[str, tf.TensorSpec]

    def dataset(self) -> tf.data.Dataset:
        """(images, targets) without end."""
        ...


def make_loader(
    pipeline_type: str,
    *,
    source: Source | None,
    config: EfficientDetConfig,
    batch_size: int,
    training: bool,
    device_id: int = 0,
    shard_id: int = 0,
    num_shards: int = 1,
    num_threads: int = 2,
    prefetch: int = 2,
    seed: int = 0,
    with_targets: bool = True,
    count_lost: bool = False,
    num_classes: int = 90,
) -> Loader:
    """The loader that `--pipeline_type` names; see EfficientDetPipeline for the other arguments.

    Args:
        source: None for synthetic data only.
        device_id: the GPU of this rank, where there is one.
        num_classes: of synthetic data.

    Raises:
        UserError: dali_gpu without a GPU.
    """
    if pipeline_type == "auto":
        pipeline_type = "dali_gpu" if gpu_visible() else "dali_cpu"
    elif pipeline_type == "dali_gpu" and not gpu_visible():
        raise UserError(
            "--pipeline_type=dali_gpu needs a GPU that TensorFlow and DALI both see (TensorFlow:"
            f" {len(tf.config.list_physical_devices('GPU'))}, DALI: {backend.GetCUDADeviceCount()}):"
            " use --pipeline_type=dali_cpu"
        )
    options = {
        "config": config,
        "batch_size": batch_size,
        "training": training,
        "num_shards": num_shards,
        "shard_id": shard_id,
        "seed": seed,
        "with_targets": with_targets,
        "count_lost": count_lost,
    }
    threads = {"num_threads": num_threads, "prefetch": prefetch}
    if pipeline_type == "synthetic":
        return SyntheticLoader(**options, num_classes=num_classes)
    if pipeline_type == "tensorflow":
        return EfficientDetTFPipeline(source=source, **options, **threads)
    if pipeline_type == "dali_gpu":
        return EfficientDetPipeline(source=source, **options, **threads, device="gpu", device_id=device_id)
    if pipeline_type == "dali_cpu":
        return EfficientDetPipeline(source=source, **options, **threads)
    raise unknown("pipeline type", pipeline_type, PIPELINE_TYPES)


def refuse_synthetic(pipeline_type: str) -> None:
    """Noise can be trained on for speed's sake, but there is nothing to find in it."""
    if pipeline_type == "synthetic":
        raise UserError("--pipeline_type=synthetic is for training speed only: use auto")


def placement(loader: Loader) -> contextlib.AbstractContextManager:
    """The scope in which to make a loader's dataset: DALI's GPU pipeline belongs on TensorFlow's GPU."""
    return tf.device("/gpu:0" if loader.pipeline_type == "dali_gpu" else "/cpu:0")


def gpu_visible() -> bool:
    """Whether both TensorFlow and DALI see a GPU."""
    return bool(tf.config.list_physical_devices("GPU")) and backend.GetCUDADeviceCount() > 0


class SyntheticLoader:
    """One batch of noise with random boxes, repeated. Needs no files."""

    pipeline_type = "synthetic"
    saveable = True

    def __init__(
        self,
        *,
        config: EfficientDetConfig,
        batch_size: int,
        training: bool,
        shard_id: int = 0,
        num_shards: int = 1,
        seed: int = 0,
        with_targets: bool = True,
        count_lost: bool = False,
        num_classes: int = 90,
    ) -> None:
        self.size = SYNTHETIC_IMAGES
        self.steps_per_epoch = dataset.steps_per_epoch(self.size, batch_size * num_shards, training=training)
        self.element_spec = pipeline.element_spec(
            config, batch_size, training=training, with_targets=with_targets, count_lost=count_lost
        )
        self._config = config
        self._num_classes = num_classes
        self._seed = [seed, shard_id]

    def dataset(self) -> tf.data.Dataset:
        """tf.data of (images, targets), the same batch for ever."""
        random = np.random.default_rng(self._seed)
        examples = [self._example(random, i) for i in range(self.element_spec["images"].shape[0])]
        batch = {
            name: tf.constant(np.stack([example[name] for example in examples]), spec.dtype)
            for name, spec in self.element_spec.items()
        }
        return dataset.repeat_batch((batch.pop("images"), batch))

    def _example(self, random: np.random.Generator, index: int) -> dict[str, np.ndarray]:
        config = self._config
        centers = random.uniform(0.2, 0.8, (SYNTHETIC_BOXES, 2))
        half_sizes = random.uniform(0.02, 0.2, (SYNTHETIC_BOXES, 2))
        boxes = np.concatenate([centers - half_sizes, centers + half_sizes], 1).astype(np.float32)
        labels = random.integers(1, self._num_classes + 1, SYNTHETIC_BOXES, np.int32)
        encoded = box_encoder.encode_boxes_tf(
            tf.constant(boxes), tf.constant(labels), config.anchors, config.max_instances
        )
        return {
            "images": random.standard_normal((*config.image_size, 3), np.float32),
            **pipeline.target_dict(encoded, config.anchors),
            "image_ids": np.int64(index),
            "image_sizes": np.array(config.image_size, np.int32),
            "letterbox": np.array((0, 0, *config.image_size), np.float32),
            "lost": np.zeros(2, np.int32),
        }
