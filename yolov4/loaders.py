"""Makes the loader that `--pipeline_type` names: an object with `.dataset()`, `.size`, `.steps_per_epoch`."""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from common.args import MAX_SEED
from common.data import loader
from common.data.loader import SYNTHETIC_IMAGES, synthetic_boxes, synthetic_dataset
from yolov4.config import YOLOv4Config
from yolov4.pipeline import YOLOv4Loader, YOLOv4Pipeline
from yolov4.tf_pipeline import YOLOv4TFPipeline


def epoch_options(
    config: YOLOv4Config, seed: int, epochs_done: int, shuffle: str = "global"
) -> dict[str, Any]:
    """Returns the arguments of `open_loader` for a training loader that starts after `epochs_done` epochs.

    The last `config.close_mosaic` epochs have no mosaic, MixUp or CutMix.
    """
    mixes = bool(config.mosaic_prob or config.mixup_prob or config.cutmix_prob)
    mosaic = mixes and epochs_done < config.epochs - config.close_mosaic
    return {"seed": (seed + epochs_done) % (MAX_SEED + 1), "shuffle": shuffle, "mosaic": mosaic}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticLoader(YOLOv4Loader):
    """Repeats one batch of noise with random boxes."""

    pipeline_type = "synthetic"
    size = SYNTHETIC_IMAGES

    @property
    def image_size(self) -> tuple[int, int]:
        return self.config.image_size

    def dataset(self) -> tf.data.Dataset:
        return synthetic_dataset(self, self._example)

    def _example(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        boxes, classes = synthetic_boxes(random, self.num_classes, self.config.max_instances)
        images = random.random((*self.image_size, 3), np.float32)
        count = np.array(np.sum(classes >= 0), np.int32)
        return {"images": images, "boxes": boxes, "classes": classes, "num_boxes": count}


LOADERS = {"dali": YOLOv4Pipeline, "tensorflow": YOLOv4TFPipeline, "synthetic": SyntheticLoader}

make_loader = functools.partial(loader.make_loader, LOADERS)
open_loader = functools.partial(loader.open_loader, LOADERS)
