"""Crops of EfficientDet's training images in DALI: which window of an image is used, and at which size.

Scale jitter follows google/automl efficientdet/dataloader.py; min_iou_crop and resize_range follow
NVIDIA/retinanet-examples odtk/dali.py and odtk/data.py.
"""

from typing import Any, NamedTuple

from nvidia.dali import fn
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import letterbox
from common.dali_ops import int32, uniform
from efficientdet.config import EfficientDetConfig

# min_iou_crop: NVIDIA/retinanet-examples odtk/dali.py RandomBBoxCrop.
CROP_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
CROP_SCALING = (0.3, 1.0)  # sides of the crop / sides of the image
CROP_ASPECT = (0.5, 2.0)  # width / height in pixels, as in SSD (arXiv 1512.02325 section 2.2)
CROP_ATTEMPTS = 20  # crops to try with one threshold; then DALI draws another threshold, or no crop


class CropResize(NamedTuple):
    """A window of the stored image, and its size in the network input. Both are int32 nodes."""

    window: DataNode  # (4,): top, left, height, width in pixels of the stored image
    size: DataNode  # (2,): height, width in pixels of the network input, at most image_size


def whole_image(size: DataNode, image_size: tuple[int, int]) -> CropResize:
    """Takes the whole image, scaled to fit the network input."""
    return _fit(fn.cat([0, 0], size), image_size)


def jittered_crop(
    size: DataNode, image_size: tuple[int, int], jitter_min: float, jitter_max: float
) -> CropResize:
    """Scales the image at random, then crops it if it is larger than the network input.

    At scale 1 the image just fits into the network input.
    """
    jitter = uniform(jitter_min, jitter_max)
    scale = jitter * dali_math.min(image_size[0] / size[0], image_size[1] / size[1])
    top, height, out_height = _jittered_side(size[0], scale, image_size[0])
    left, width, out_width = _jittered_side(size[1], scale, image_size[1])
    window = fn.stack(top, left, height, width)
    return CropResize(int32(window), int32(fn.stack(out_height, out_width)))


def _jittered_side(side: DataNode, scale: DataNode, limit: int) -> tuple[DataNode, DataNode, DataNode]:
    scaled = dali_math.max(dali_math.floor(side * scale + 0.5), 1.0)
    shown = dali_math.min(scaled, float(limit))
    length = dali_math.clamp(dali_math.floor(side * shown / scaled + 0.5), 1.0, side)
    free = side - length
    start = dali_math.min(dali_math.floor(uniform(0.0, 1.0) * (free + 1.0)), free)
    return start, length, shown


def resize_range_crop(
    size: DataNode, image_size: tuple[int, int], resize_min: int, resize_max: int
) -> CropResize:
    """Takes the whole image and scales its shorter side to a random length.

    If the image would be larger than the network input, it is scaled to just fit the network input.
    """
    shorter = dali_math.floor(uniform(float(resize_min), resize_max + 1.0))
    scale = shorter / dali_math.min(size[0], size[1])
    crop = whole_image(size, image_size)
    return crop._replace(size=dali_math.min(crop.size, int32(dali_math.floor(size * scale + 0.5))))


def min_iou_crop(
    size: DataNode, boxes: DataNode, labels: DataNode, image_size: tuple[int, int]
) -> tuple[CropResize, DataNode, DataNode]:
    """Takes a random crop (SSD, arXiv 1512.02325 section 2.2), scaled to fit the network input.

    DALI draws one of CROP_THRESHOLDS, or "no crop". The IoU of the crop with every box must be at least the
    threshold. If DALI finds no such crop, it draws again.

    Returns:
        The crop; the boxes whose centre is in the crop, clipped to it, still normalised by the image; their
        labels.
    """
    outputs: Any = fn.random_bbox_crop(
        boxes,
        labels,
        bbox_layout="xyXY",
        input_shape=size,
        shape_layout="HW",  # DALI expects (width, height) by default, and does not check the order
        aspect_ratio=list(CROP_ASPECT),
        thresholds=list(CROP_THRESHOLDS),
        scaling=list(CROP_SCALING),
        allow_no_crop=True,  # so that the search ends
        num_attempts=CROP_ATTEMPTS,
    )
    anchor, shape, boxes, labels = outputs
    boxes = boxes * fn.cat(shape, shape) + fn.cat(anchor, anchor)  # DALI's boxes are relative to the crop
    # DALI has clipped the boxes to the crop. A larger crop would show parts of objects outside their boxes,
    # so round the crop inwards.
    top, height = _whole_pixels(anchor[1], shape[1], size[0])
    left, width = _whole_pixels(anchor[0], shape[0], size[1])
    return _fit(int32(fn.stack(top, left, height, width)), image_size), boxes, labels


def _whole_pixels(start: DataNode, length: DataNode, side: DataNode) -> tuple[DataNode, DataNode]:
    rounding = 1e-3  # float32 may make 0.25 * 400 slightly more than 100
    first = dali_math.clamp(dali_math.ceil(start * side - rounding), 0.0, side - 1.0)
    last = dali_math.clamp(dali_math.floor((start + length) * side + rounding), first + 1.0, side)
    return first, last - first


def _fit(window: DataNode, image_size: tuple[int, int]) -> CropResize:
    sides = letterbox.fit(window[2], window[3], image_size, dali_math.min, dali_math.max)
    return CropResize(window, int32(fn.stack(*sides)))


def random_crop(
    config: EfficientDetConfig, size: DataNode, boxes: DataNode, labels: DataNode
) -> tuple[CropResize, DataNode, DataNode]:
    """Crops as in `config.augmentation`. Returns the crop, the boxes (normalised by the image) and labels.

    Only `min_iou_crop` changes boxes and labels.
    """
    if config.augmentation == "min_iou_crop":
        return min_iou_crop(size, boxes, labels, config.image_size)
    if config.augmentation == "scale_jitter":
        crop = jittered_crop(size, config.image_size, config.jitter_min, config.jitter_max)
    elif config.augmentation == "resize_range":
        crop = resize_range_crop(size, config.image_size, config.resize_min, config.resize_max)
    else:
        crop = whole_image(size, config.image_size)
    return crop, boxes, labels
