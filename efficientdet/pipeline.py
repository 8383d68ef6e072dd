"""EfficientDet's input pipeline in DALI: turns image files and boxes into normalised images and targets.

    pipeline = EfficientDetPipeline(source=source, config=config, batch_size=16, training=True)
    images, targets = next(iter(pipeline.dataset()))

A training image is cropped at random, resized and flipped. Then GridMask blacks out squares, and the colours
are changed. An evaluation image is used whole. Each image is placed at the top left of the network input.
Each function processes one sample (DALI's convention): images are uint8 (h, w, 3), boxes float32 (N, 4),
ltrb, and sizes float32 (2,), height and width in pixels.
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from common import box_encoder
from common.anchors import Anchors
from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD, int32, resize, select_boxes, uniform, xyxy
from common.data.loader import BaseLoader, DaliOptions, Shapes, from_pipeline
from efficientdet.augmentations import auto_augment, is_conditional, random_cutout, random_rotation
from efficientdet.config import EfficientDetConfig
from efficientdet.crops import random_crop, source_size, whole_image

MEAN_RGB, STDDEV_RGB = IMAGENET_MEAN, IMAGENET_STD

# GridMask (arXiv 2001.04086) divides the image into tiles and blacks out one square in each tile.
GRID_MASK_RATIO = 0.4  # side of the square / side of the tile; this is 1 - r in the paper
GRID_MASK_TILE = (0.2, 0.6)  # side of the tile / shorter side of the network input
GRID_MASK_ANGLE = math.radians(10)  # google/automl efficientdet/aug/gridmask.py


# --- 1. crop ---


def boxes_to_window(boxes: DataNode, size: DataNode, window: DataNode) -> DataNode:
    """Converts boxes normalised by the image to boxes normalised by the window, clipped to the window.

    Boxes outside the window lose their area, and `select_boxes` drops them later.
    """
    boxes_px = boxes * xyxy(size) - xyxy(window[0:2])
    return dali_math.clamp(boxes_px / xyxy(window[2:4]), 0.0, 1.0)


# --- 2. flip, GridMask, colour ---


def random_flip(images: DataNode, boxes: DataNode, prob: float) -> tuple[DataNode, DataNode]:
    """Mirrors image and boxes horizontally with probability `prob`."""
    coin = fn.random.coin_flip(probability=prob)
    flipped = fn.flip(images, horizontal=coin)
    return flipped, fn.bb_flip(boxes, horizontal=coin, ltrb=True)


def random_grid_mask(images: DataNode, image_size: tuple[int, int], prob: float) -> DataNode:
    """Blacks out a randomly rotated and shifted grid of squares; boxes do not change (arXiv 2001.04086)."""
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
    """Changes the colours at random.

    `hue` is the largest change in degrees. Each other argument x means a random factor from 1 - x to 1 + x.
    """
    return fn.color_twist(
        images,
        brightness=uniform(1 - brightness, 1 + brightness),
        contrast=uniform(1 - contrast, 1 + contrast),
        saturation=uniform(1 - saturation, 1 + saturation),
        hue=uniform(-hue, hue),
    )


# --- 3. the network input ---


def pad_and_normalize(images: DataNode, image_size: tuple[int, int]) -> DataNode:
    """Normalises uint8 (h, w, 3), then pads it at the right and bottom to float32 (H, W, 3)."""
    return fn.crop_mirror_normalize(
        images,
        mean=list(MEAN_RGB),
        std=list(STDDEV_RGB),
        crop=[float(side) for side in image_size],
        crop_pos_x=0.0,
        crop_pos_y=0.0,
        out_of_bounds_policy="pad",
        fill_values=0.0,
        dtype=types.FLOAT,
        output_layout="HWC",
    )


def boxes_to_input(boxes: DataNode, size: DataNode, image_size: tuple[int, int]) -> DataNode:
    """Converts boxes normalised by the crop (`size`) to boxes normalised by the network input."""
    return boxes * xyxy(size / types.Constant(np.array(image_size, np.float32), device="cpu"))


# --- 4. the whole graph of one sample ---


def augment(
    config: EfficientDetConfig, images: DataNode, boxes: DataNode, labels: DataNode
) -> tuple[DataNode, DataNode, DataNode]:
    """Applies the random changes. New stages belong here.

    Args:
        images: uint8 (h, w, 3), a resized crop.
        boxes: float32 (N, 4), ltrb normalised by the crop.
        labels: int32 (N,), 1-based.
    """
    if config.flip_prob:
        images, boxes = random_flip(images, boxes, config.flip_prob)
    if config.rotation:  # fn.rotate fills corners with one level for all channels
        images, boxes, labels = random_rotation(images, boxes, labels, config.rotation, sum(MEAN_RGB) / 3)
    if config.auto_augment != "none":
        images = auto_augment(images, config)
    if config.grid_mask_prob:
        images = random_grid_mask(images, config.image_size, config.grid_mask_prob)
    if config.brightness or config.contrast or config.saturation or config.hue:
        images = random_color(images, config.brightness, config.contrast, config.saturation, config.hue)
    if config.cutout_prob:
        images = random_cutout(images, config.cutout_prob, MEAN_RGB)
    return images, boxes, labels


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EfficientDetLoader(BaseLoader):
    """The base class of this app's loaders."""

    config: EfficientDetConfig

    def target_shapes(self) -> Shapes:
        config, k = self.config, self.config.anchors_per_location
        shapes: Shapes = {
            "num_positives": ((), tf.float32),
            "boxes": ((config.max_instances, 4), tf.float32),
            "classes": ((config.max_instances,), tf.int32),
        }
        for level, (height, width) in zip(config.anchors.levels, config.anchors.feature_sizes, strict=True):
            shapes[f"class_targets_{level}"] = ((height, width, k), tf.int32)
            shapes[f"box_targets_{level}"] = ((height, width, k * 4), tf.float32)
        return shapes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EfficientDetPipeline(DaliOptions, EfficientDetLoader):
    """The DALI loader."""

    @functools.cached_property
    def pipeline(self) -> dali.Pipeline:
        """The built DALI pipeline. Its outputs have the names and the order of `element_spec`."""
        pipeline = self._define(list(self.element_spec))
        pipeline.build()
        return pipeline

    def dataset(self) -> tf.data.Dataset:
        """Returns an endless dataset of (images, dict of the other outputs); see `BaseLoader.dataset`."""
        spec = self.element_spec["images"], self.target_spec
        pipeline = self._define(["images", *sorted(self.target_spec)])
        return from_pipeline(pipeline, spec, device_id=self.device_id)

    def _define(self, names: list[str]) -> dali.Pipeline:
        @dali.pipeline_def(
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            device_id=self.device_id,  # type: ignore[arg-type]  # the type stub lacks None
            prefetch_queue_depth=self.prefetch,
            # Each rank has its own seed for augmentation. The readers of all ranks use the same order.
            seed=int(np.random.SeedSequence([self.seed, self.shard_id]).generate_state(1)[0]),
            enable_checkpointing=self.saveable,
            enable_conditionals=is_conditional(self.config),
        )
        def graph() -> tuple[DataNode, ...]:
            outputs = self._define_graph()
            return tuple(outputs[name].gpu() if self.device == "gpu" else outputs[name] for name in names)

        return graph()

    def _define_graph(self) -> dict[str, DataNode]:
        config = self.config
        jpegs, boxes, labels, image_ids = self._read()
        size = source_size(jpegs)
        if self.training:
            crop, boxes, labels = random_crop(config, size, boxes, labels)
        else:
            crop = whole_image(size, config.image_size)

        images = self.decoder.crop(jpegs, crop.window)
        images = resize(images, crop.size, antialias=config.antialias)
        boxes = boxes_to_window(boxes, size, crop.window)
        if self.training:
            images, boxes, labels = augment(config, images, boxes, labels)
        images = pad_and_normalize(images, config.image_size)
        boxes = boxes_to_input(boxes, crop.size, config.image_size)

        rows = config.max_instances
        limit = self.opened_source.annotations.limit(rows)  # None (faster) if no image has more boxes
        boxes, labels, lost = select_boxes(boxes, labels, min_box_size(config), limit)
        encoded = box_encoder.encode_selected(boxes, labels, config.anchors, rows, device=self.device)
        return {
            "images": images,
            **target_dict(encoded, config.anchors),
            "image_ids": image_ids,
            "image_sizes": int32(size),
            "letterbox": fn.cast(fn.cat([0, 0], crop.size), dtype=types.FLOAT),
            "lost": lost,
        }

    @do_not_convert
    def _read(self) -> tuple[DataNode, ...]:
        return self.opened_source.read(
            shard_id=self.shard_id, num_shards=self.num_shards, training=self.training, seed=self.seed
        )


def min_box_size(config: EfficientDetConfig) -> tuple[float, float]:
    """Returns the least (height, width) of a box to train on, relative to the network input."""
    height, width = config.image_size
    return config.min_box_size / height, config.min_box_size / width


def target_dict(encoded: box_encoder.EncodedBoxes, anchors: Anchors) -> dict[str, Any]:
    """Returns the encoder's tensors by their names in `target_shapes`."""
    targets = {"num_positives": encoded.num_positives, "boxes": encoded.boxes, "classes": encoded.classes}
    for index, level in enumerate(anchors.levels):
        targets[f"class_targets_{level}"] = encoded.class_targets[index]
        targets[f"box_targets_{level}"] = encoded.box_targets[index]
    return targets
