"""Makes the loader that `--pipeline_type` names: an object with `.dataset()`, `.size`, `.steps_per_epoch`."""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from common import box_encoder
from common.args import MAX_SEED
from common.data import loader
from common.data.loader import SYNTHETIC_IMAGES, synthetic_boxes, synthetic_dataset
from efficientdet.config import EfficientDetConfig
from efficientdet.pipeline import EfficientDetLoader, EfficientDetPipeline, target_dict
from efficientdet.tf_pipeline import EfficientDetTFPipeline


def epoch_options(
    config: EfficientDetConfig, seed: int, epochs_done: int, shuffle: str = "global"
) -> dict[str, Any]:
    """Returns the arguments of `open_loader` for a training loader that starts after `epochs_done` epochs."""
    return {"seed": (seed + epochs_done) % (MAX_SEED + 1), "shuffle": shuffle}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticLoader(EfficientDetLoader):
    """Repeats one batch of noise with random boxes."""

    pipeline_type = "synthetic"
    size = SYNTHETIC_IMAGES

    def dataset(self) -> tf.data.Dataset:
        return synthetic_dataset(self, self._example)

    def _example(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        boxes, classes = synthetic_boxes(random, self.num_classes, self.config.max_instances)
        encoded = box_encoder.encode_boxes_tf(tf.constant(boxes), tf.constant(classes), self.config.anchors)
        images = random.standard_normal((*self.config.image_size, 3), np.float32)
        return {"images": images, **target_dict(encoded, self.config.anchors)}


LOADERS = {"dali": EfficientDetPipeline, "tensorflow": EfficientDetTFPipeline, "synthetic": SyntheticLoader}

make_loader = functools.partial(loader.make_loader, LOADERS)
open_loader = functools.partial(loader.open_loader, LOADERS)
