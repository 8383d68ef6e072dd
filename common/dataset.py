"""Loaders as tf.data: a DALI pipeline, one batch repeated, and image decoding for the plain tf.data loaders.

Every loader of an app yields `(images, targets)` with static shapes, the batch first, so that training code,
`fit` included, cannot tell them apart.
"""

import contextlib

import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia import dali

ElementSpec = tuple[tf.TensorSpec, dict[str, tf.TensorSpec]]


def from_pipeline(
    pipeline: dali.Pipeline, element_spec: ElementSpec, *, device_id: int | None
) -> tf.data.Dataset:
    """A DALI pipeline as tf.data. It never ends: count steps (`steps_per_epoch`).

    Its iterator can be saved by tf.train.Checkpoint on a CPU, if the pipeline was made with checkpointing; on
    a GPU the plugin cannot. A GPU pipeline's dataset is placed where the caller's `tf.device` scope says.

    Args:
        pipeline: not run by anyone else: DALIDataset makes its own copy.
        element_spec: of a batch, (images, targets). The pipeline's outputs must come in the order in which
            tf.nest flattens it: the images, then the targets sorted by their names. Axes of size one that
            DALI gives and the spec lacks are removed.
        device_id: GPU of the pipeline; None for one without a GPU.
    """
    with tf.device("/cpu:0") if device_id is None else contextlib.nullcontext():
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
            return _Structured(flat, element_spec)
        return flat.map(lambda *tensors: tf.nest.pack_sequence_as(element_spec, tensors))


class _Structured(tf.data.Dataset):
    """The same tensors under another structure, for datasets on a GPU, where `map` has no kernel."""

    def __init__(self, flat: tf.data.Dataset, element_spec: ElementSpec) -> None:
        self._flat = flat
        self._element_spec = element_spec
        super().__init__(flat._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._flat]

    @property
    def element_spec(self) -> ElementSpec:
        return self._element_spec


def repeat_batch(batch: tuple[tf.Tensor, dict[str, tf.Tensor]]) -> tf.data.Dataset:
    """One batch for ever: what a step costs without a loader."""
    return tf.data.Dataset.from_tensors(batch).repeat()


def steps_per_epoch(num_images: int, global_batch_size: int, *, training: bool) -> int:
    """Steps that every rank takes in one epoch.

    Training batches cross the epoch's end, so the incomplete last batch is left to the next epoch. Evaluation
    needs every image: ranks whose shard is shorter repeat an image, whose id tells.
    """
    if training:
        return max(num_images // global_batch_size, 1)
    return -(-num_images // global_batch_size)


def image_size_tf(encoded: tf.Tensor) -> tf.Tensor:
    """int32 (2,): (height, width) of a JPEG or PNG as stored, from its header."""
    size = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.extract_jpeg_shape(encoded)[:2],
        # PNG: the first chunk starts at byte 8 with its length and name, then width and height, big-endian.
        lambda: tf.io.decode_raw(tf.strings.substr(encoded, 16, 8), tf.int32, little_endian=False)[::-1],
    )
    return tf.ensure_shape(size, (2,))


def decode_image_tf(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """The window (top, left, height, width) of a JPEG or PNG: uint8 (h, w, 3) RGB, not turned by EXIF.

    Grey, palette and CMYK images become RGB. Whole images are bit for bit DALI's, whose inverse DCT is the
    accurate one. A window of a JPEG with subsampled colour differs in its outermost columns: libjpeg does not
    look beyond them.
    """

    def decode_png() -> tf.Tensor:
        image = tf.io.decode_png(encoded, channels=3)
        return image[window[0] : window[0] + window[2], window[1] : window[1] + window[3]]

    image = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.decode_and_crop_jpeg(encoded, window, channels=3, dct_method="INTEGER_ACCURATE"),
        decode_png,
    )
    return tf.ensure_shape(image, (None, None, 3))
