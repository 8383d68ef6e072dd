"""EfficientDet's input pipeline in DALI: image files and their boxes in, normalised images and targets out.

    pipeline = EfficientDetPipeline(source=source, config=config, batch_size=16, training=True)
    images, targets = next(iter(pipeline.dataset()))

A training image goes through a random crop, a resize, flip, GridMask and colour; an evaluation image is used
whole and never changes. Both end at the top left of the network input, the rest in the mean colour,
normalised. Boxes are mapped exactly as the pixels are.

The graph is a sequence of the functions below and in crops.py, which see one sample each (DALI's convention).
EfficientDet: arXiv 1911.09070.
"""

import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import box_encoder, dataset
from common.anchors import Anchors
from common.dali_ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    count_visible,
    decode_crop,
    int32,
    normalize,
    resize,
    uniform,
)
from common.sources import Source
from efficientdet.config import EfficientDetConfig
from efficientdet.crops import random_crop, source_size, whole_image

MEAN_RGB, STDDEV_RGB = IMAGENET_MEAN, IMAGENET_STD

# GridMask (arXiv 2001.04086): squares of 0.4 of a tile are blacked out, the paper's r = 0.6. The 10 degrees
# are those of google/automl efficientdet/aug/gridmask.py. Tiles are relative to the shorter side of the
# network input.
GRID_MASK_RATIO = 0.4
GRID_MASK_TILE = (0.2, 0.6)
GRID_MASK_ANGLE = math.radians(10)


# --- 1. crop ---


def boxes_to_window(boxes: DataNode, size: DataNode, window: DataNode) -> DataNode:
    """Boxes normalised by the image -> normalised by the window and clipped to it.

    As in google/automl a box stays as long as any of it shows, wherever its centre is. What is left of it
    may be nothing: `box_encoder.drop_small_boxes` comes later.
    """
    window = fn.cast(window, dtype=types.FLOAT)
    height, width = size[0], size[1]
    boxes_px = boxes * fn.stack(width, height, width, height)
    boxes_px = boxes_px - fn.stack(window[1], window[0], window[1], window[0])
    return dali_math.clamp(boxes_px / fn.stack(window[3], window[2], window[3], window[2]), 0.0, 1.0)


# --- 2. flip, GridMask, colour ---


def random_flip(images: DataNode, boxes: DataNode, prob: float) -> tuple[DataNode, DataNode]:
    """Mirrors left and right, pixels and boxes together."""
    coin = fn.random.coin_flip(probability=prob)
    flipped = fn.flip(images, horizontal=coin)
    return flipped, fn.bb_flip(boxes, horizontal=coin, ltrb=True)


def random_grid_mask(images: DataNode, image_size: tuple[int, int], prob: float) -> DataNode:
    """Blacks out a randomly turned and shifted grid of squares; boxes stay (arXiv 2001.04086)."""
    tile = uniform(*GRID_MASK_TILE) * float(min(image_size))
    chosen = fn.cast(fn.random.coin_flip(probability=prob), dtype=types.FLOAT)
    return fn.grid_mask(
        images,
        tile=int32(dali_math.max(tile, 2.0)),
        ratio=GRID_MASK_RATIO * chosen,  # a ratio of 0 masks nothing
        angle=uniform(-GRID_MASK_ANGLE, GRID_MASK_ANGLE),
        shift_x=uniform(0.0, 1.0) * tile,
        shift_y=uniform(0.0, 1.0) * tile,
    )


def random_color(
    images: DataNode, brightness: float, contrast: float, saturation: float, hue: float
) -> DataNode:
    """Factors drawn from 1 - x .. 1 + x, hue turned by -hue .. hue degrees."""
    return fn.color_twist(
        images,
        brightness=uniform(1 - brightness, 1 + brightness),
        contrast=uniform(1 - contrast, 1 + contrast),
        saturation=uniform(1 - saturation, 1 + saturation),
        hue=uniform(-hue, hue),
    )


# --- 3. the network input ---


def pad_and_normalize(images: DataNode, image_size: tuple[int, int]) -> DataNode:
    """uint8 (h, w, 3) -> float32 (H, W, 3): the crop at the top left, 0 (the mean colour) elsewhere."""
    return normalize(images, MEAN_RGB, STDDEV_RGB, image_size=image_size)


def preprocess_ops(config: EfficientDetConfig) -> str:
    """What evaluation and inference do to an image, as `--ops` of tools/preprocess.py."""
    height, width = config.image_size
    return (
        f"decode:exif=ignore | fit:{height}x{width},antialias={int(config.antialias)} | "
        f"crop_mirror_normalize:{height}x{width},x=0,y=0,fill=0,mean=imagenet"
    )


def boxes_to_input(boxes: DataNode, size: DataNode, image_size: tuple[int, int]) -> DataNode:
    """Boxes normalised by the crop -> normalised by the network input, whose top left the crop fills."""
    height, width = size[0] / float(image_size[0]), size[1] / float(image_size[1])
    return boxes * fn.stack(width, height, width, height)


# --- 4. the whole graph of one sample ---


def augment(config: EfficientDetConfig, images: DataNode, boxes: DataNode) -> tuple[DataNode, DataNode]:
    """Flip, GridMask and colour, each absent from the graph where it is off."""
    if config.flip_prob:
        images, boxes = random_flip(images, boxes, config.flip_prob)
    if config.grid_mask_prob:
        images = random_grid_mask(images, config.image_size, config.grid_mask_prob)
    if config.brightness or config.contrast or config.saturation or config.hue:
        images = random_color(images, config.brightness, config.contrast, config.saturation, config.hue)
    return images, boxes


class EfficientDetPipeline:
    """Feeds one rank. The same class serves training, evaluation and (without targets) inference.

    Training is infinite, shuffled, augmented. Evaluation goes through this rank's shard in order,
    letterboxed; ranks whose shard is shorter repeat an image at the end.

    Attributes:
        pipeline_type: dali_cpu or dali_gpu.
        saveable: whether tf.train.Checkpoint can save the dataset's iterator.
        dali_device_id: see __init__; common.loading.placement puts the dataset there.
        size: images of the whole source, all ranks together.
        steps_per_epoch: batches that every rank takes in one epoch.
        element_spec: of one batch, in the order of the DALI outputs (INTERFACE order).
    """

    def __init__(
        self,
        *,
        source: Source,
        config: EfficientDetConfig,
        batch_size: int,
        training: bool,
        device: str = "cpu",
        device_id: int | None = None,
        dali_device_id: int | None = None,
        shard_id: int = 0,
        num_shards: int = 1,
        num_threads: int = 2,
        prefetch: int = 2,
        seed: int = 0,
        with_targets: bool = True,
        count_lost: bool = False,
        name_images: bool = False,
        checkpointing: bool = True,
    ) -> None:
        """
        Args:
            source: what `common.open_data.open_source` returns.
            config: the model's; it decides image size, anchors and augmentation.
            batch_size: images of a batch on this rank.
            training: shuffled and augmented; otherwise in order, whole, letterboxed.
            device: "cpu", or "gpu": pixels are decoded, and all that follows is done, on that GPU.
            device_id: the GPU; None on a CPU.
            dali_device_id: another GPU, where pixels are to be made on one that the model is not on.
            shard_id, num_shards: this rank's share of the data.
            num_threads, prefetch: DALI's CPU threads; batches made ahead.
            seed: of the order, the same on all ranks, and of the augmentation, another on each. 0 is one.
            with_targets: False leaves images, image_ids, image_sizes and letterbox only.
            count_lost: adds `lost`, int32 (B, 2): boxes that show, but below min_box_size; boxes above
                max_instances.
            name_images: adds `image_ids`, which evaluation always has, to training batches.
            checkpointing: lets tf.train.Checkpoint save the dataset's iterator; DALI can on a CPU only.
        """
        if device not in ("cpu", "gpu") or (device == "gpu") != (device_id is not None):
            raise ValueError(
                f"device={device!r}, device_id={device_id!r}: need 'cpu' and None, or 'gpu' and a number"
            )
        self.config = config
        self.batch_size = batch_size
        self.training = training
        self.pipeline_type = f"dali_{device}"
        self.saveable = checkpointing and device == "cpu"
        self.dali_device_id = dali_device_id
        self.size = source.size
        self.steps_per_epoch = dataset.steps_per_epoch(
            source.size, batch_size * num_shards, training=training
        )
        self.element_spec = element_spec(
            config,
            batch_size,
            training=training,
            with_targets=with_targets,
            count_lost=count_lost,
            name_images=name_images,
        )
        self._source = source
        self._device = device
        self._device_id = device_id if dali_device_id is None else dali_device_id
        self._shard_id = shard_id
        self._num_shards = num_shards
        self._num_threads = num_threads
        self._prefetch = prefetch
        self._seed = seed

    @functools.cached_property
    def pipeline(self) -> dali.Pipeline:
        """The DALI pipeline, built; its outputs are named and ordered as in `element_spec`."""
        return self._build(list(self.element_spec), encode_boxes=True)

    def dataset(self) -> tf.data.Dataset:
        """tf.data of (images, targets): float32 (B, H, W, 3), and the other outputs by name. Never ends.

        On a CPU the targets are encoded after the graph: fn.box_encoder, which looks at every pair of box and
        anchor, costs as much there as the pixels do.
        """
        images_spec, *_ = self.element_spec.values()
        targets_spec = {name: spec for name, spec in self.element_spec.items() if name != "images"}
        encode_after = self._device == "cpu" and "num_positives" in targets_spec
        if encode_after:
            encoded = ("num_positives", "class_targets", "box_targets")
            targets_spec = {k: spec for k, spec in targets_spec.items() if not k.startswith(encoded)}
        pipeline = self._build(["images", *sorted(targets_spec)], encode_boxes=not encode_after)
        batches = dataset.from_pipeline(pipeline, (images_spec, targets_spec), device_id=self._device_id)
        if encode_after:
            batches = batches.map(functools.partial(add_targets, anchors=self.config.anchors))
        return batches

    def _build(self, names: list[str], *, encode_boxes: bool) -> dali.Pipeline:
        pipeline = dali.Pipeline(
            batch_size=self.batch_size,
            num_threads=self._num_threads,
            device_id=self._device_id,
            prefetch_queue_depth=self._prefetch,
            # Another augmentation on every rank; the reader has the seed itself.
            seed=int(np.random.SeedSequence([self._seed, self._shard_id]).generate_state(1)[0]),
            exec_dynamic=True,
            enable_checkpointing=self.saveable,
        )
        with pipeline:
            outputs = self._define_graph(encode_boxes)
            nodes = [outputs[name] for name in names]
            pipeline.set_outputs(*(node.gpu() if self._device == "gpu" else node for node in nodes))
        pipeline.build()
        return pipeline

    def _define_graph(self, encode_boxes: bool) -> dict[str, DataNode]:
        config = self.config
        jpegs, boxes, labels, image_ids = self._source.read(
            shard_id=self._shard_id,
            num_shards=self._num_shards,
            training=self.training,
            seed=self._seed,
        )
        size = source_size(jpegs)
        if self.training:
            crop, boxes, labels = random_crop(config, size, boxes, labels)
        else:
            crop = whole_image(size, config.image_size)

        images = decode_crop(jpegs, crop.window, self._device)
        images = resize(images, crop.size, antialias=config.antialias)
        boxes = boxes_to_window(boxes, size, crop.window)
        if self.training:
            images, boxes = augment(config, images, boxes)
        images = pad_and_normalize(images, config.image_size)
        boxes = boxes_to_input(boxes, crop.size, config.image_size)

        visible = count_visible(boxes)
        boxes, labels = box_encoder.drop_small_boxes(boxes, labels, min_box_size(config))
        large = labels.shape(dtype=types.INT32)[0]
        if encode_boxes:
            encoded = box_encoder.encode_boxes(
                boxes, labels, config.anchors, config.max_instances, device=self._device
            )
            targets = target_dict(encoded, config.anchors)
        else:
            boxes, labels = box_encoder.keep_largest(boxes, labels, config.max_instances)
            padded = box_encoder.pad_boxes(boxes, labels, config.max_instances)
            targets = dict(zip(("boxes", "classes"), padded, strict=True))
        return {
            "images": images,
            **targets,
            "image_ids": image_ids,
            "image_sizes": int32(size),
            "letterbox": fn.cast(fn.cat([0, 0], crop.size), dtype=types.FLOAT),
            "lost": fn.stack(visible - large, dali_math.max(large - config.max_instances, 0)),
        }


def min_box_size(config: EfficientDetConfig) -> tuple[float, float]:
    """Smallest (height, width) of a box to learn, relative to the network input."""
    height, width = config.image_size
    return config.min_box_size / height, config.min_box_size / width


def target_dict(encoded: box_encoder.EncodedBoxes, anchors: Anchors) -> dict[str, Any]:
    """Names for the encoder's tensors, class and box targets of each level interleaved."""
    targets = {"num_positives": encoded.num_positives, "boxes": encoded.boxes, "classes": encoded.classes}
    for level, classes, boxes in zip(anchors.levels, encoded.class_targets, encoded.box_targets, strict=True):
        targets[f"class_targets_{level}"] = classes
        targets[f"box_targets_{level}"] = boxes
    return targets


def add_targets(
    images: tf.Tensor, targets: dict[str, tf.Tensor], anchors: Anchors
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """A batch whose `targets` hold padded boxes and classes, and what is encoded from them as well."""
    encoded = box_encoder.encode_batch_tf(targets["boxes"], targets["classes"], anchors)
    return images, targets | target_dict(encoded, anchors)


def element_spec(
    config: EfficientDetConfig,
    batch_size: int,
    *,
    training: bool,
    with_targets: bool,
    count_lost: bool,
    name_images: bool,
) -> dict[str, tf.TensorSpec]:
    """Name -> shape and dtype of what one batch holds, in order. All loaders of the app give these."""
    anchors, k = config.anchors, config.anchors_per_location
    spec = {"images": ((*config.image_size, 3), tf.float32)}
    if with_targets:
        spec |= {
            "num_positives": ((), tf.float32),
            "boxes": ((config.max_instances, 4), tf.float32),
            "classes": ((config.max_instances,), tf.int32),
        }
        for level, (height, width) in zip(anchors.levels, anchors.feature_sizes, strict=True):
            spec[f"class_targets_{level}"] = ((height, width, k), tf.int32)
            spec[f"box_targets_{level}"] = ((height, width, k * 4), tf.float32)
    if not training or name_images:
        spec["image_ids"] = ((), tf.int64)
    if not training:
        spec |= {
            "image_sizes": ((2,), tf.int32),
            "letterbox": ((4,), tf.float32),
        }
    if count_lost:
        spec["lost"] = ((2,), tf.int32)
    return {name: tf.TensorSpec((batch_size, *shape), dtype) for name, (shape, dtype) in spec.items()}
