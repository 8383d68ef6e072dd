"""What the loaders of both apps share: what a loader is, `--pipeline_type`, where it runs, synthetic boxes.

auto         dali_gpu where TensorFlow and DALI both see a GPU, else dali_cpu
dali_gpu     DALI, JPEGs decoded and everything after on the GPU
dali_cpu     DALI without any GPU
tensorflow   the plain tf.data twin
synthetic    one random batch for ever: what a step costs without a loader
"""

import contextlib
from typing import Protocol

import numpy as np
import tensorflow as tf
from nvidia.dali import backend

from common.errors import UserError, unknown
from common.flags import PIPELINE_TYPES

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


def resolve_type(pipeline_type: str) -> str:
    """The loader that `--pipeline_type` means on this machine: auto becomes dali_gpu or dali_cpu.

    Raises:
        UserError: no such type, or dali_gpu without a GPU.
    """
    if pipeline_type not in PIPELINE_TYPES:
        raise unknown("pipeline type", pipeline_type, PIPELINE_TYPES)
    if pipeline_type == "auto":
        return "dali_gpu" if gpu_visible() else "dali_cpu"
    if pipeline_type == "dali_gpu" and not gpu_visible():
        raise UserError(
            "--pipeline_type=dali_gpu needs a GPU that TensorFlow and DALI both see (TensorFlow:"
            f" {len(tf.config.list_physical_devices('GPU'))}, DALI: {backend.GetCUDADeviceCount()}):"
            " use --pipeline_type=dali_cpu"
        )
    return pipeline_type


def gpu_visible() -> bool:
    """Whether both TensorFlow and DALI see a GPU."""
    return bool(tf.config.list_physical_devices("GPU")) and backend.GetCUDADeviceCount() > 0


def placement(loader: Loader, device_index: int = 0) -> contextlib.AbstractContextManager:
    """The scope in which to make a loader's dataset: DALI's GPU pipeline belongs on TensorFlow's GPU."""
    return tf.device(f"/gpu:{device_index}" if loader.pipeline_type == "dali_gpu" else "/cpu:0")


def refuse_synthetic(pipeline_type: str) -> None:
    """Noise can be trained on for speed's sake, but there is nothing to find in it."""
    if pipeline_type == "synthetic":
        raise UserError("--pipeline_type=synthetic is for training speed only: use auto")


def synthetic_boxes(random: np.random.Generator, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """What is said to be on one image of noise.

    Returns:
        float32 (SYNTHETIC_BOXES, 4), boxes, ltrb normalised; int32 (SYNTHETIC_BOXES,), their labels, 1-based.
    """
    centers = random.uniform(0.2, 0.8, (SYNTHETIC_BOXES, 2))
    half_sizes = random.uniform(0.02, 0.2, (SYNTHETIC_BOXES, 2))
    boxes = np.concatenate([centers - half_sizes, centers + half_sizes], 1).astype(np.float32)
    return boxes, random.integers(1, num_classes + 1, SYNTHETIC_BOXES, np.int32)
