"""The input pipeline in plain tf.data. Benchmarks compare the DALI pipeline with this one.

    --pipeline_type=tensorflow

This pipeline follows the rules of pipeline.py, but draws other random numbers. In evaluation, decoded pixels
and targets equal DALI's, and resized values (0 to 255) differ by less than 1 on average. The published
recipes work with this pipeline. Other loader settings need DALI.
"""

import dataclasses

import tensorflow as tf

from common import box_encoder, letterbox
from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.data import tf_readers
from common.data.tf_readers import (
    Random,
    boxes_to_window,
    loader_examples,
    refuse_changes,
    resize,
    select_boxes,
    xyxy,
)
from efficientdet import pipeline
from efficientdet.config import LOADER_FIELDS, EfficientDetConfig
from efficientdet.crops import CropResize

# The loader fields that this pipeline supports.
FIELDS = {"augmentation", "jitter_min", "jitter_max", "resize_min", "resize_max", "antialias", "flip_prob"}
FIELDS |= {"min_box_size", "max_instances"}


# --- 1. crop ---
# In this file, the fields of a CropResize are float32 tensors.


def whole_image(size: tf.Tensor, image_size: tuple[int, int]) -> CropResize:
    """Takes the whole image, scaled to fit the network input."""
    return _fit(tf.concat([[0.0, 0.0], size], 0), image_size)


def jittered_crop(
    size: tf.Tensor, image_size: tuple[int, int], jitter_min: float, jitter_max: float, random: Random
) -> CropResize:
    """Scales the image at random, then crops it if it is larger than the network input."""
    limit = tf.constant(image_size, tf.float32)
    scale = random.uniform(jitter_min, jitter_max) * tf.reduce_min(limit / size)
    scaled = tf.maximum(tf.floor(size * scale + 0.5), 1.0)
    shown = tf.minimum(scaled, limit)
    length = tf.clip_by_value(tf.floor(size * shown / scaled + 0.5), 1.0, size)
    start = tf.minimum(tf.floor(random.uniform(0.0, 1.0, (2,)) * (size - length + 1.0)), size - length)
    return CropResize(tf.concat([start, length], 0), shown)


def resize_range_crop(
    size: tf.Tensor, image_size: tuple[int, int], resize_min: int, resize_max: int, random: Random
) -> CropResize:
    """Takes the whole image and scales its shorter side to a random length.

    If the image would be larger than the network input, it is scaled to just fit the network input.
    """
    shorter = tf.floor(random.uniform(resize_min, resize_max + 1.0))
    crop = whole_image(size, image_size)
    return crop._replace(size=tf.minimum(crop.size, tf.floor(size * shorter / tf.reduce_min(size) + 0.5)))


def _fit(window: tf.Tensor, image_size: tuple[int, int]) -> CropResize:
    height, width = tf.unstack(tf.cast(window[2:], tf.int32), 2)
    sides = letterbox.fit(height, width, image_size, tf.minimum, tf.maximum)
    return CropResize(window, tf.cast(tf.stack(sides), tf.float32))


# --- 2. flip ---


def random_flip(
    image: tf.Tensor, boxes: tf.Tensor, prob: float, random: Random
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mirrors an image and its boxes horizontally with probability `prob`."""
    left, top, right, bottom = tf.unstack(boxes, axis=1)
    mirrored = tf.stack([1 - right, top, 1 - left, bottom], axis=1)
    chosen = random.uniform(0.0, 1.0) < prob
    return tf.where(chosen, image[:, ::-1], image), tf.where(chosen, mirrored, boxes)


# --- 3. the network input ---


def pad_and_normalize(image: tf.Tensor, image_size: tuple[int, int]) -> tf.Tensor:
    """Normalises uint8 (h, w, 3). Pads it at the right and bottom with 0, the mean, to float32 (H, W, 3)."""
    normalized = (tf.cast(image, tf.float32) - IMAGENET_MEAN) / IMAGENET_STD
    return tf.image.pad_to_bounding_box(normalized, 0, 0, *image_size)


def boxes_to_input(boxes: tf.Tensor, size: tf.Tensor, image_size: tuple[int, int]) -> tf.Tensor:
    """Normalises boxes by the network input instead of the crop. The crop is at the top left of the input."""
    return boxes * xyxy(size / tf.constant(image_size, tf.float32))


# --- 4. the whole pipeline ---


def random_crop(config: EfficientDetConfig, size: tf.Tensor, random: Random) -> CropResize:
    """Returns the crop that `config.augmentation` names."""
    if config.augmentation == "scale_jitter":
        return jittered_crop(size, config.image_size, config.jitter_min, config.jitter_max, random)
    if config.augmentation == "resize_range":
        return resize_range_crop(size, config.image_size, config.resize_min, config.resize_max, random)
    return whole_image(size, config.image_size)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EfficientDetTFPipeline(pipeline.EfficientDetLoader):
    """The loader without DALI. It has the same options and outputs as EfficientDetPipeline."""

    pipeline_type = "tensorflow"

    def __post_init__(self) -> None:
        if self.training:
            supported = FIELDS - ({"augmentation"} if self.config.augmentation == "min_iou_crop" else set())
            refuse_changes(self.config, LOADER_FIELDS, supported)

    def dataset(self) -> tf.data.Dataset:
        """Returns an endless dataset of (images, targets). An evaluation takes `steps_per_epoch` batches."""
        options = tf.data.Options()
        options.threading.private_threadpool_size = self.num_threads
        options.experimental_symbolic_checkpoint = True  # else checkpoints hold the prefetched images
        return (
            loader_examples(self)
            .enumerate()
            .map(self._preprocess, num_parallel_calls=self.num_threads, deterministic=True)
            .batch(self.batch_size, drop_remainder=True)
            .prefetch(self.prefetch)
            .with_options(options)
        )

    def _preprocess(
        self, index: tf.Tensor, example: dict[str, tf.Tensor]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        config = self.config
        encoded, boxes, labels = example["encoded"], example["boxes"], example["labels"]
        size = tf.cast(tf_readers.image_size_tf(encoded), tf.float32)
        random = Random(index, self.seed, self.shard_id)
        if self.training:
            crop = random_crop(config, size, random)
        else:
            crop = whole_image(size, config.image_size)

        image = tf_readers.decode_image_tf(encoded, tf.cast(crop.window, tf.int32))
        image = resize(image, crop.size, config.antialias)
        boxes = boxes_to_window(boxes, size, crop.window)
        if self.training and config.flip_prob:
            image, boxes = random_flip(image, boxes, config.flip_prob, random)
        image = pad_and_normalize(image, config.image_size)
        boxes = boxes_to_input(boxes, crop.size, config.image_size)

        boxes, labels, lost = select_boxes(boxes, labels, pipeline.min_box_size(config), config.max_instances)
        boxes, classes = tf_readers.pad_boxes_tf(boxes, labels, config.max_instances)
        encoded = box_encoder.encode_boxes_tf(boxes, classes, config.anchors)
        outputs = {
            "images": image,
            **pipeline.target_dict(encoded, config.anchors),
            "image_ids": example["image_id"],
            "image_sizes": tf.cast(size, tf.int32),
            "letterbox": tf.concat([[0.0, 0.0], crop.size], 0),
            "lost": lost,
        }
        spec = self.element_spec
        outputs = {name: tf.ensure_shape(outputs[name], spec[name].shape[1:]) for name in spec}
        return outputs.pop("images"), outputs
