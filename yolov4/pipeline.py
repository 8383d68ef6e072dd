"""YOLOv4's input pipeline in DALI: turns image files and boxes into images in [0, 1] and padded boxes.

    pipeline = YOLOv4Pipeline(source=source, config=config, batch_size=16, training=True)
    images, targets = next(iter(pipeline.dataset()))

A training image is cropped, coloured and flipped at random. Then some samples become a mosaic, MixUp or
CutMix. Crop, flip, colour and mosaic follow Darknet, except for the differences in docs/yolov4.md. An
evaluation image is used whole, stretched or letterboxed. Each function processes one sample.
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from common import dali_ops
from common.dali_ops import boxes_to_window, resize, select_boxes, source_size, xyxy
from common.data.loader import BaseLoader, DaliOptions, Shapes, from_pipeline
from yolov4 import fresh_mosaic
from yolov4.augmentations import augment, random_flip, to_unit
from yolov4.config import FILL, YOLOv4Config
from yolov4.crops import input_size, training_crop, whole_image
from yolov4.mixing import images_of_one, mix
from yolov4.mosaic import Objects

# --- 1. the network input ---


def pad(images: DataNode, place: DataNode, image_size: DataNode) -> DataNode:
    """Puts float32 (h, w, 3) at its place in float32 (H, W, 3), and FILL around it."""
    return dali_ops.place(images, place[0:2], image_size, [FILL / 255] * 3)


def boxes_to_input(boxes: DataNode, place: DataNode) -> DataNode:
    """Converts boxes normalised by the window to pixels of the network input; the window fills `place`."""
    return boxes * xyxy(place[2:4]) + xyxy(place[0:2])


# --- 2. the whole graph of one sample ---


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class YOLOv4Loader(BaseLoader):
    """The base class of this app's loaders.

    Attributes:
        mosaic: use mosaic, MixUp and CutMix; False in the last epochs (close_mosaic).
    """

    config: YOLOv4Config
    mosaic: bool = True

    @property
    def image_size(self) -> tuple[int | None, int | None]:
        is_fixed = not self.training or self.config.multi_scale == 1
        return self.config.image_size if is_fixed else (None, None)

    @property
    def mixed_config(self) -> YOLOv4Config:
        """The config with the probabilities of mosaic, MixUp and CutMix that this loader uses."""
        config = self.config
        if not (self.training and self.mosaic):
            return dataclasses.replace(config, mosaic_prob=0.0, mixup_prob=0.0, cutmix_prob=0.0)
        if self.batch_size == 1:
            return dataclasses.replace(config, mixup_prob=0.0, cutmix_prob=0.0)
        return config

    def target_shapes(self) -> Shapes:
        return {
            "boxes": ((self.config.max_instances, 4), tf.float32),
            "classes": ((self.config.max_instances,), tf.int32),
            "num_boxes": ((), tf.int32),
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class YOLOv4Pipeline(DaliOptions, YOLOv4Loader):
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
            seed=_mixed_seed(self.seed, self.shard_id, 1),
            enable_checkpointing=self.saveable,
            enable_conditionals=self.config.auto_augment != "none",
        )
        def graph() -> tuple[DataNode, ...]:
            outputs = self._define_graph()
            return tuple(outputs[name].gpu() if self.device == "gpu" else outputs[name] for name in names)

        return graph()

    def _define_graph(self) -> dict[str, DataNode]:
        config = self.config
        mixed = self.mixed_config
        image_size = input_size(config, self.training, _mixed_seed(self.seed, 0, 2))
        if mixed.mosaic_prob and mixed.mosaic_tiles == "fresh":
            images, objects, facts = self._fresh_mosaics(mixed, image_size)
        else:
            images, objects, facts = self._canvases(mixed, image_size)

        limit = self.opened_source.annotations.limit(config.max_instances, images_of_one(mixed))
        boxes_px, labels, lost = select_boxes(*objects, (config.min_box_size,) * 2, limit)
        rows = [config.max_instances]
        return {
            "images": images,
            "boxes": fn.pad(boxes_px / xyxy(image_size), axes=[0], shape=rows, fill_value=-1),
            "classes": fn.pad(labels - 1, axes=[0], shape=rows, fill_value=-1),
            "num_boxes": labels.shape(dtype=types.INT32)[0],
            "lost": lost,
            **facts,
        }

    def _canvases(
        self, mixed: YOLOv4Config, image_size: DataNode
    ) -> tuple[DataNode, Objects, dict[str, DataNode]]:
        config = self.config
        jpegs, boxes, labels, image_ids = self._read(self.seed)
        size = source_size(jpegs)
        if self.training:
            crop = training_crop(config, size, image_size)
        else:
            crop = whole_image(size, image_size, config.letterbox)

        place, mirrored = crop.place, None
        if self.training and config.flip_prob:
            mirrored, place = random_flip(place, image_size, config.flip_prob)
        images = self.decoder.crop(jpegs, crop.window)
        images = resize(images, place[2:4], mirrored, config.antialias)
        boxes = boxes_to_window(boxes, size, crop.window)
        if mirrored is not None:
            boxes = fn.bb_flip(boxes, horizontal=mirrored, ltrb=True)
        if self.training:
            images, boxes, labels = augment(config, images, boxes, labels)
        else:
            images = to_unit(images)
        if config.letterbox or (self.training and config.jitter):
            images = pad(images, place, image_size)
        boxes_px = boxes_to_input(boxes, place)
        objects = Objects(boxes_px, labels)
        if mixed.mosaic_prob or mixed.mixup_prob or mixed.cutmix_prob:
            images, objects = mix(mixed, images, objects, place, image_size)
        letterbox = fn.cast(crop.place, dtype=types.FLOAT)
        return images, objects, {"image_ids": image_ids, "image_sizes": size, "letterbox": letterbox}

    def _fresh_mosaics(
        self, mixed: YOLOv4Config, image_size: DataNode
    ) -> tuple[DataNode, Objects, dict[str, DataNode]]:
        examples, image_ids = [], []
        for number, seed in enumerate(fresh_mosaic.reader_seeds(self.seed)):
            *nodes, ids = self._read(seed, f"reader_{number}" if number else "reader")
            examples.append(fresh_mosaic.Example(*nodes))
            image_ids.append(ids)
        images, objects, mosaics = fresh_mosaic.make(examples, mixed, image_size, self.decoder)
        if mixed.mixup_prob or mixed.cutmix_prob:
            without = dataclasses.replace(mixed, mosaic_prob=0.0)
            images, objects = mix(without, images, objects, None, image_size, excluded=mosaics)
        return images, objects, {"image_ids": image_ids[0]}

    @do_not_convert
    def _read(self, seed: int, name: str = "reader") -> tuple[DataNode, ...]:
        # For a COCO json this is `readers.coco_reader`.
        return self.opened_source.read(
            shard_id=self.shard_id,
            num_shards=self.num_shards,
            training=self.training,
            seed=seed,
            shuffle=self.shuffle,
            name=name,
        )


def _mixed_seed(seed: int, shard_id: int, purpose: int) -> int:
    return int(np.random.SeedSequence([seed, shard_id, purpose]).generate_state(1)[0])
