"""The loader that `--pipeline_type` names: an object with `.dataset()`, `.size`, `.steps_per_epoch`.

The types are those of common/loading.py. Targets of synthetic data are encoded for real.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from common import box_encoder
from common.loader import synthetic_dataset
from common.loading import SYNTHETIC_IMAGES, Loader, resolve_type, synthetic_boxes
from efficientdet.pipeline import EfficientDetLoader, EfficientDetPipeline, target_dict
from efficientdet.tf_pipeline import EfficientDetTFPipeline


def make_loader(
    pipeline_type: str,
    *,
    device_id: int = 0,
    dali_device_id: int | None = None,
    num_classes: int = 90,
    **options: Any,
) -> Loader:
    """The loader that `--pipeline_type` names.

    Args:
        pipeline_type: one of args.PIPELINE_TYPES.
        device_id: the GPU of this rank, where there is one.
        dali_device_id: another one for dali_gpu; see loading.check_dali_device.
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
        options |= {"device": "gpu", "device_id": device_id, "dali_device_id": dali_device_id}
    return EfficientDetPipeline(**options)


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
