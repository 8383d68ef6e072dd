"""The loader that `--pipeline_type` names: an object with `.dataset()`, `.size`, `.steps_per_epoch`.

The types are those of common/loading.py.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from common.loader import synthetic_dataset
from common.loading import SYNTHETIC_BOXES, SYNTHETIC_IMAGES, Loader, resolve_type, synthetic_boxes
from yolov4.pipeline import YOLOv4Loader, YOLOv4Pipeline
from yolov4.tf_pipeline import YOLOv4TFPipeline


def make_loader(
    pipeline_type: str,
    *,
    device_id: int = 0,
    dali_device_id: int | None = None,
    num_classes: int = 80,
    **options: Any,
) -> Loader:
    """The loader that `--pipeline_type` names.

    Args:
        pipeline_type: one of args.PIPELINE_TYPES.
        device_id: the GPU of this rank, where there is one.
        dali_device_id: another one for dali_gpu; see loading.check_dali_device.
        num_classes: of synthetic data.
        options: source, config, batch_size, training and the others of YOLOv4Loader.

    Raises:
        UserError: dali_gpu without a GPU.
    """
    pipeline_type = resolve_type(pipeline_type)
    if pipeline_type == "synthetic":
        return SyntheticLoader(num_classes=num_classes, **options)
    if pipeline_type == "tensorflow":
        return YOLOv4TFPipeline(**options)
    if pipeline_type == "dali_gpu":
        options |= {"device": "gpu", "device_id": device_id, "dali_device_id": dali_device_id}
    return YOLOv4Pipeline(**options)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticLoader(YOLOv4Loader):
    """One batch of noise with random boxes, repeated, always of config.image_size. Needs no files."""

    num_classes: int

    pipeline_type = "synthetic"
    size = SYNTHETIC_IMAGES

    @property
    def image_size(self) -> tuple[int, int]:
        return self.config.image_size

    def dataset(self) -> tf.data.Dataset:
        """tf.data of (images, targets), the same batch without end."""
        return synthetic_dataset(self, self._example)

    def _example(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        boxes, labels = synthetic_boxes(random, self.num_classes)
        count = min(SYNTHETIC_BOXES, self.config.max_instances)
        padding = [0, self.config.max_instances - count]
        return {
            "images": random.random((*self.image_size, 3), np.float32),
            "boxes": np.pad(boxes[:count], [padding, [0, 0]], constant_values=-1),
            "classes": np.pad(labels[:count] - 1, [padding], constant_values=-1),
            "num_boxes": np.int32(count),
        }
