"""EfficientDet's input pipeline in DALI: turns image files and boxes into normalised images and targets.

    pipeline = EfficientDetPipeline(source=source, config=config, batch_size=16, training=True)
    images, targets = next(iter(pipeline.dataset()))

A training image is cropped at random (crops.py), resized and augmented (augmentations.py). An evaluation
image is used whole. Each image is placed at the top left of the network input.
Each function processes one sample (DALI's convention): images are uint8 (h, w, 3), boxes float32 (N, 4),
ltrb, and sizes int32 (2,), height and width in pixels.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from common import box_encoder
from common.anchors import Anchors
from common.dali_ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    boxes_to_window,
    resize,
    select_boxes,
    source_size,
    xyxy,
)
from common.data.loader import BaseLoader, DaliOptions, Shapes, from_pipeline
from efficientdet.augmentations import augment
from efficientdet.config import EfficientDetConfig
from efficientdet.crops import random_crop, whole_image

# --- 1. the network input ---


def pad_and_normalize(images: DataNode, image_size: tuple[int, int]) -> DataNode:
    """Normalises uint8 (h, w, 3), then pads it at the right and bottom to float32 (H, W, 3)."""
    return fn.crop_mirror_normalize(
        images,
        mean=list(IMAGENET_MEAN),
        std=list(IMAGENET_STD),
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


# --- 2. the whole graph of one sample ---


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EfficientDetLoader(BaseLoader):
    """The base class of this app's loaders."""

    config: EfficientDetConfig

    def target_shapes(self) -> Shapes:
        """Returns the shapes of the targets. Only assignment=max_iou reads the targets of each anchor."""
        config, k = self.config, self.config.anchors_per_location
        shapes: Shapes = {
            "num_positives": ((), tf.float32),
            "boxes": ((config.max_instances, 4), tf.float32),
            "classes": ((config.max_instances,), tf.int32),
        }
        if config.assignment == "task_aligned":
            return shapes
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
            # Each shard has its own seed for augmentation. The readers of all shards use the same order.
            seed=int(np.random.SeedSequence([self.seed, self.shard_id]).generate_state(1)[0]),
            enable_checkpointing=self.saveable,
            enable_conditionals=self.config.auto_augment != "none",
        )
        def graph() -> tuple[DataNode, ...]:
            outputs = self._define_graph()
            return tuple(outputs[name].gpu() if self.device == "gpu" else outputs[name] for name in names)

        return graph()

    def _define_graph(self) -> dict[str, DataNode]:
        config = self.config
        jpegs, boxes, labels, image_ids = self._read()
        size = source_size(jpegs)
        # efficientdet-d0 uses the crop scale_jitter and, of the augmentations, only the flip (config.py).
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
            "image_sizes": size,
            "letterbox": fn.cast(fn.cat([0, 0], crop.size), dtype=types.FLOAT),
            "lost": lost,
        }

    @do_not_convert
    def _read(self) -> tuple[DataNode, ...]:
        # For a COCO json this is `readers.coco_reader`.
        return self.opened_source.read(
            shard_id=self.shard_id,
            num_shards=self.num_shards,
            training=self.training,
            seed=self.seed,
            shuffle=self.shuffle,
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
