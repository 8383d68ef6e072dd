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

from common.args import PIPELINE_TYPES
from common.errors import UserError, unknown

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
        dali_device_id: of dali_gpu only: the GPU that was asked for; None: the replica's own.
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


def check_dali_device(dali_device_id: int | None, pipeline_type: str, strategy: str = "none") -> None:
    """`--dali_device_id`: a GPU of this host for the loader, while the model keeps its own.

    Raises:
        UserError: the loader is none of DALI's on a GPU, there is no such GPU, or a strategy deals them out.
    """
    if dali_device_id is None:
        return
    pipeline_type = resolve_type(pipeline_type)
    if pipeline_type != "dali_gpu":
        raise UserError(
            f"--dali_device_id={dali_device_id} is for --pipeline_type=dali_gpu, and this is {pipeline_type}:"
            " leave it out"
        )
    if strategy != "none":
        raise UserError(
            f"--dali_device_id={dali_device_id} does not go with --strategy={strategy}: every GPU has a model"
            " and its loader there; leave it out"
        )
    count = min(len(tf.config.list_physical_devices("GPU")), backend.GetCUDADeviceCount())
    if dali_device_id >= count:
        raise UserError(
            f"--dali_device_id={dali_device_id}: there is no such GPU; they are numbered 0 to {count - 1}"
        )


def gpu_visible() -> bool:
    """Whether both TensorFlow and DALI see a GPU."""
    return bool(tf.config.list_physical_devices("GPU")) and backend.GetCUDADeviceCount() > 0


def placement(loader: Loader, device_index: int = 0) -> contextlib.AbstractContextManager:
    """The scope in which to make a loader's dataset: DALI's GPU pipeline belongs on TensorFlow's GPU."""
    if loader.pipeline_type != "dali_gpu":
        return tf.device("/cpu:0")
    return tf.device(f"/gpu:{device_index if loader.dali_device_id is None else loader.dali_device_id}")


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
