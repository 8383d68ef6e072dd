"""Who loads: `--pipeline_type` to an object with `.dataset()`, `.size`, `.steps_per_epoch`.

The types are those of common/loading.py. Targets of synthetic data are encoded for real.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from common import box_encoder, dataset
from common.args import MAX_SEED, Args
from common.distributed.ranks import Ranks
from common.loading import SYNTHETIC_IMAGES, Loader, resolve_type, synthetic_boxes
from common.sources import Source
from efficientdet import pipeline
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import EfficientDetPipeline
from efficientdet.tf_pipeline import EfficientDetTFPipeline


def make_loader(
    pipeline_type: str,
    *,
    source: Source | None,
    config: EfficientDetConfig,
    batch_size: int,
    training: bool,
    device_id: int = 0,
    dali_device_id: int | None = None,
    shard_id: int = 0,
    num_shards: int = 1,
    num_threads: int = 2,
    prefetch: int = 2,
    seed: int = 0,
    with_targets: bool = True,
    count_lost: bool = False,
    name_images: bool = False,
    num_classes: int = 90,
) -> Loader:
    """The loader that `--pipeline_type` names; see EfficientDetPipeline for the other arguments.

    Args:
        source: None for synthetic data only.
        device_id: the GPU of this rank, where there is one.
        dali_device_id: another one for dali_gpu; see loading.check_dali_device.
        num_classes: of synthetic data.

    Raises:
        UserError: dali_gpu without a GPU.
    """
    pipeline_type = resolve_type(pipeline_type)
    options = {
        "config": config,
        "batch_size": batch_size,
        "training": training,
        "num_shards": num_shards,
        "shard_id": shard_id,
        "seed": seed,
        "with_targets": with_targets,
        "count_lost": count_lost,
        "name_images": name_images,
    }
    threads = {"num_threads": num_threads, "prefetch": prefetch}
    if pipeline_type == "synthetic":
        return SyntheticLoader(**options, num_classes=num_classes)
    if pipeline_type == "tensorflow":
        return EfficientDetTFPipeline(source=source, **options, **threads)
    if pipeline_type == "dali_gpu":
        device = {"device": "gpu", "device_id": device_id, "dali_device_id": dali_device_id}
        return EfficientDetPipeline(source=source, **options, **threads, **device)
    return EfficientDetPipeline(source=source, **options, **threads)


def epoch_kwargs(config: EfficientDetConfig, seed: int, epochs_done: int) -> dict[str, Any]:
    """Arguments of `open_training_loader` for a loader that is opened after so many epochs."""
    return {"seed": (seed + epochs_done) % (MAX_SEED + 1)}


def open_training_loader(
    a: Args,
    config: EfficientDetConfig,
    source: Source | None,
    num_classes: int,
    ranks: Ranks,
    shard_id: int,
    num_shards: int,
    device_index: int,
    seed: int,
) -> Loader:
    """The training loader of one shard, for the replica `device_index` of this process."""
    return make_loader(
        a.pipeline_type,
        source=source,
        config=config,
        batch_size=a.batch_size,
        training=True,
        device_id=ranks.gpu_number(device_index),
        dali_device_id=a.dali_device_id,
        shard_id=shard_id,
        num_shards=num_shards,
        num_threads=a.num_threads,
        prefetch=a.prefetch,
        seed=seed,
        count_lost=True,
        name_images=True,
        num_classes=num_classes,
    )


def open_eval_loader(a: Args, config: EfficientDetConfig, source: Source | None, ranks: Ranks) -> Loader:
    """The evaluation loader of this rank's images."""
    return make_loader(
        a.pipeline_type,
        source=source,
        config=config,
        batch_size=a.batch_size,
        training=False,
        device_id=ranks.gpu_number(0),
        dali_device_id=a.dali_device_id,
        shard_id=ranks.rank,
        num_shards=ranks.world_size,
        num_threads=a.num_threads,
        prefetch=a.prefetch,
        with_targets=False,
    )


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
        name_images: bool = False,
        num_classes: int = 90,
    ) -> None:
        self.size = SYNTHETIC_IMAGES
        self.steps_per_epoch = dataset.steps_per_epoch(self.size, batch_size * num_shards, training=training)
        self.element_spec = pipeline.element_spec(
            config,
            batch_size,
            training=training,
            with_targets=with_targets,
            count_lost=count_lost,
            name_images=name_images,
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
        boxes, labels = synthetic_boxes(random, self._num_classes)
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
