"""The input pipeline in plain tf.data. Benchmarks compare the DALI pipeline with this one.

    --pipeline_type=tensorflow

This pipeline follows the rules of pipeline.py, but draws other random numbers. In evaluation, decoded pixels
and boxes equal DALI's, and resized values (0 to 255) differ by less than 1 on average. Colours are changed in
true HSV, as in Darknet. Darknet's recipe works with this pipeline. Other loader settings need DALI.
"""

import dataclasses

import tensorflow as tf

from common import letterbox
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
from yolov4 import pipeline, tf_mosaic
from yolov4.config import FILL, LOADER_FIELDS, YOLOv4Config
from yolov4.crops import CropResize

# The loader fields that this pipeline supports.
FIELDS = {"antialias", "letterbox", "jitter", "flip_prob", "hue", "saturation", "exposure", "mosaic_prob"}
FIELDS |= {"min_visible", "close_mosaic", "multi_scale", "min_box_size", "max_instances"}

# --- 1. input size and crop ---
# In this file, image_size and the fields of a CropResize are int32 tensors.


def input_size(config: YOLOv4Config, training: bool, random: Random) -> tf.Tensor:
    """Returns int32 (2,), (height, width) of the input. It is random in training if multi_scale > 1."""
    if not training or config.multi_scale == 1:
        return tf.constant(config.image_size)
    low, high = config.size_range
    sizes = tf.constant([config.bucket(units) for units in range(low, high + 1)])
    return sizes[tf.cast(random.uniform(0.0, len(sizes)), tf.int32)]


def whole_image(size: tf.Tensor, image_size: tf.Tensor, keep_aspect: bool) -> CropResize:
    """Takes the whole image. With keep_aspect, letterboxes and centres it; otherwise stretches it."""
    window = tf.concat([[0, 0], size], 0)
    if not keep_aspect:
        return CropResize(window, tf.concat([[0, 0], image_size], 0))
    fitted = tf.stack(letterbox.fit(size[0], size[1], tf.unstack(image_size), tf.minimum, tf.maximum))
    return CropResize(window, tf.concat([(image_size - fitted) // 2, fitted], 0))


def jittered_crop(
    size: tf.Tensor, image_size: tf.Tensor, jitter: float, keep_aspect: bool, random: Random
) -> CropResize:
    """Takes a random crop, which may reach outside the image, and stretches it over the network input."""
    sides = tf.cast(size, tf.float32)
    moved = random.uniform(-jitter, jitter, (2, 2)) * sides  # rows: top and left, bottom and right
    if keep_aspect:
        shape = tf.cast(image_size, tf.float32)
        moved -= (tf.reduce_max(sides / shape) * shape - sides) / 2
    moved = tf.cast(tf.floor(moved + 0.5), tf.int32)
    start, length = moved[0], tf.maximum(size - moved[1] - moved[0], 1)
    first, last = tf.maximum(start, 0), tf.minimum(start + length, size)  # the part in the image

    def to_input(position: tf.Tensor) -> tf.Tensor:
        return (2 * image_size * (position - start) + length) // (2 * length)

    place = tf.minimum(to_input(first), image_size - 1)
    place_size = tf.maximum(to_input(last) - place, 1)
    return CropResize(tf.concat([first, last - first], 0), tf.concat([place, place_size], 0))


# --- 2. colour ---


def random_hsv(image: tf.Tensor, hue: float, saturation: float, exposure: float, random: Random) -> tf.Tensor:
    """Turns the hue by -hue to hue degrees; multiplies saturation and brightness by random factors."""
    hsv = tf.image.rgb_to_hsv(tf.cast(image, tf.float32) / 255)
    h, s, v = tf.unstack(hsv, axis=-1)
    h = tf.math.floormod(h + random.uniform(-hue, hue) / 360, 1.0)
    s = tf.minimum(s * random_factor(saturation, random), 1.0)
    v = tf.minimum(v * random_factor(exposure, random), 1.0)
    return tf.cast(tf.round(tf.image.hsv_to_rgb(tf.stack([h, s, v], -1)) * 255), tf.uint8)


def random_factor(limit: float, random: Random) -> tf.Tensor:
    """Returns a factor from 1 to limit, or with probability 0.5 its reciprocal (utils.c, rand_scale)."""
    factor = random.uniform(1.0, limit)
    return tf.where(random.uniform(0.0, 1.0) < 0.5, factor, 1.0 / factor)


# --- 3. the network input ---


def pad(image: tf.Tensor, place: tf.Tensor, image_size: tf.Tensor) -> tf.Tensor:
    """Puts uint8 (h, w, 3) at its place in uint8 (H, W, 3), and FILL around it."""
    top, left, height, width = tf.unstack(place)
    bottom, right = image_size[0] - top - height, image_size[1] - left - width
    return tf.pad(image, [[top, bottom], [left, right], [0, 0]], constant_values=FILL)


def boxes_to_input(boxes: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """Converts boxes normalised by the window to pixels of the network input; the window fills `place`."""
    return boxes * xyxy(place[2:]) + xyxy(place[:2])


def random_flip(
    image: tf.Tensor, boxes_px: tf.Tensor, place: tf.Tensor, prob: float, random: Random
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mirrors the canvas, its boxes and the place of the image horizontally with probability `prob`."""
    width = tf.shape(image)[1]
    left, top, right, bottom = tf.unstack(boxes_px, axis=1)
    side = tf.cast(width, tf.float32)
    mirrored = tf.stack([side - right, top, side - left, bottom], axis=1)
    other_place = tf.stack([place[0], width - place[1] - place[3], place[2], place[3]])
    chosen = random.uniform(0.0, 1.0) < prob
    return (
        tf.where(chosen, image[:, ::-1], image),
        tf.where(chosen, mirrored, boxes_px),
        tf.where(chosen, other_place, place),
    )


def finish_boxes(
    boxes_px: tf.Tensor, labels: tf.Tensor, image_size: tf.Tensor, config: YOLOv4Config
) -> dict[str, tf.Tensor]:
    """Drops small boxes, keeps the largest of the others, and pads to max_instances.

    Args:
        boxes_px: float32 (N, 4), ltrb; rows without area are padding.
        labels: int32 (N,), 1-based.
    """
    min_size = (config.min_box_size, config.min_box_size)
    boxes_px, labels, lost = select_boxes(boxes_px, labels, min_size, config.max_instances)
    boxes, classes = tf_readers.pad_boxes_tf(boxes_px / xyxy(image_size), labels, config.max_instances)
    return {"boxes": boxes, "classes": classes, "num_boxes": tf.shape(labels)[0], "lost": lost}


# --- 4. the whole pipeline ---


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class YOLOv4TFPipeline(pipeline.YOLOv4Loader):
    """The loader without DALI. It has the same options and outputs as YOLOv4Pipeline."""

    pipeline_type = "tensorflow"

    def __post_init__(self) -> None:
        if self.training:
            refuse_changes(self.config, LOADER_FIELDS, FIELDS)

    def dataset(self) -> tf.data.Dataset:
        """Returns an endless dataset of (images, targets). An evaluation takes `steps_per_epoch` batches."""
        options = tf.data.Options()
        options.threading.private_threadpool_size = self.num_threads
        options.experimental_symbolic_checkpoint = True  # else checkpoints hold the prefetched images
        parallel = {"num_parallel_calls": self.num_threads, "deterministic": True}
        return (
            loader_examples(self)
            .enumerate()
            .map(self._preprocess, **parallel)
            .padded_batch(self.batch_size, drop_remainder=True)  # pads boxes with rows of 0
            .enumerate()
            .map(self._finish, **parallel)
            .prefetch(self.prefetch)
            .with_options(options)
        )

    def _preprocess(self, index: tf.Tensor, example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        config = self.config
        encoded, boxes = example["encoded"], example["boxes"]
        size = tf_readers.image_size_tf(encoded)
        image_size = self._input_size(index // self.batch_size)
        random = Random(index, self.seed, self.shard_id, 2)
        if self.training and config.jitter:
            crop = jittered_crop(size, image_size, config.jitter, config.letterbox, random)
        else:
            crop = whole_image(size, image_size, config.letterbox)

        place = crop.place
        image = tf_readers.decode_image_tf(encoded, crop.window)
        image = resize(image, place[2:], config.antialias)
        if self.training and (config.hue or config.saturation > 1 or config.exposure > 1):
            image = random_hsv(image, config.hue, config.saturation, config.exposure, random)
        image = pad(image, place, image_size)
        boxes_px = boxes_to_input(boxes_to_window(boxes, size, crop.window), place)
        if self.training and config.flip_prob:
            image, boxes_px, place = random_flip(image, boxes_px, place, config.flip_prob, random)
        return {
            "images": image,
            "boxes_px": boxes_px,
            "labels": example["labels"],
            "places": place,
            "image_ids": example["image_id"],
            "image_sizes": size,
        }

    def _finish(
        self, index: tf.Tensor, batch: dict[str, tf.Tensor]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        images, boxes_px, labels = batch["images"], batch["boxes_px"], batch["labels"]
        mosaic_prob = self.mixed_config.mosaic_prob
        if mosaic_prob:
            random = Random(index, self.seed, self.shard_id, 3)
            canvases = tf_mosaic.Canvases(images, boxes_px, labels, batch["places"])
            images, boxes_px, labels = tf_mosaic.mix(canvases, mosaic_prob, random, self.config.min_visible)
        image_size = self._input_size(index)
        selected = tf.map_fn(
            lambda sample: finish_boxes(sample[0], sample[1], image_size, self.config),
            (boxes_px, labels),
            fn_output_signature={"boxes": tf.float32}
            | dict.fromkeys(("classes", "num_boxes", "lost"), tf.int32),
        )
        outputs = {
            "images": tf.cast(images, tf.float32) / 255,
            **selected,
            "image_ids": batch["image_ids"],
            "image_sizes": batch["image_sizes"],
            "letterbox": tf.cast(batch["places"], tf.float32),
        }
        spec = self.element_spec
        outputs = {name: tf.ensure_shape(outputs[name], spec[name].shape) for name in spec}
        return outputs.pop("images"), outputs

    def _input_size(self, batch_index: tf.Tensor) -> tf.Tensor:
        # All ranks use the same size for a batch.
        random = Random(batch_index, self.seed, 0, 1)
        return input_size(self.config, self.training, random)
