"""The loader that `--pipeline_type` names: an object with `.dataset()`, `.size`, `.steps_per_epoch`.

The types are those of common/loader.py. Targets of synthetic data are encoded for real.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from common import box_encoder
from common.args import MAX_SEED, Args
from common.distributed.ranks import Ranks
from common.loader import SYNTHETIC_IMAGES, BaseLoader, resolve_type, synthetic_boxes, synthetic_dataset
from common.sources import Source
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import EfficientDetLoader, EfficientDetPipeline, target_dict
from efficientdet.tf_pipeline import EfficientDetTFPipeline


def make_loader(
    pipeline_type: str,
    *,
    device_id: int = 0,
    dali_device_id: int | None = None,
    num_classes: int = 90,
    **options: Any,
) -> BaseLoader:
    """The loader that `--pipeline_type` names.

    Args:
        pipeline_type: one of args.PIPELINE_TYPES.
        device_id: the GPU of this rank, where there is one.
        dali_device_id: another one for dali_gpu; see loader.check_dali_device.
        num_classes: of synthetic data.
        options: source, config, batch_size, training and the others of common.loader.BaseLoader.

    Raises:
        UserError: dali_gpu without a GPU.
    """
    pipeline_type = resolve_type(pipeline_type)
    if pipeline_type == "synthetic":
        return SyntheticLoader(num_classes=num_classes, **options)
    if pipeline_type == "tensorflow":
        return EfficientDetTFPipeline(**options)
    if pipeline_type == "dali_gpu":
        options |= {"device_id": device_id, "dali_device_id": dali_device_id}
    return EfficientDetPipeline(**options)


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
) -> BaseLoader:
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


def open_eval_loader(a: Args, config: EfficientDetConfig, source: Source | None, ranks: Ranks) -> BaseLoader:
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticLoader(EfficientDetLoader):
    """One batch of noise with random boxes, repeated. Needs no files."""

    num_classes: int

    pipeline_type = "synthetic"
    size = SYNTHETIC_IMAGES

    def dataset(self) -> tf.data.Dataset:
        """tf.data of (images, targets), the same batch without end."""
        return synthetic_dataset(self, self._example)

    def _example(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        boxes, labels = synthetic_boxes(random, self.num_classes)
        anchors = self.config.anchors
        encoded = box_encoder.encode_boxes_tf(
            tf.constant(boxes), tf.constant(labels), anchors, self.config.max_instances
        )
        images = random.standard_normal((*self.image_size, 3), np.float32)
        return {"images": images, **target_dict(encoded, anchors)}
