"""Functions for the DALI graphs of both apps. Shapes are those of one sample."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

# Means and standard deviations of RGB pixels (0 to 255) in ImageNet. Source: google/automl,
# efficientdet/hparams_config.py, mean_rgb and stddev_rgb.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_ROWS = 2**14  # limit for boxes of one image
_NUMBERS = np.arange(1, _MAX_ROWS + 1, dtype=np.int32)[np.newaxis]
YX_TO_XYXY = [0, 1, 1, 0, 0, 1, 1, 0]  # a matrix for fn.coord_transform, row by row

Nodes = tuple[DataNode, DataNode, DataNode, DataNode]  # jpegs, boxes, labels, image_ids: see readers.py


# --- images ---


def source_size(jpegs: DataNode) -> DataNode:
    """Reads the stored height and width from an image's header, int32 (2,). Ignores EXIF orientation."""
    return int32(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2])


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes images in a DALI graph.

    Attributes:
        device: "cpu" or "gpu", the device that holds the decoded pixels.
        hw_load: fraction of a batch's JPEGs that the GPU's JPEG engines (A100 and later) decode, 0 to 1.
        largest: (height, width) for which the engines reserve memory. With (0, 0), memory grows on demand.
        roi: on a GPU, decode only the needed window, as CPUs always do. Off by default, because it can crash
            with DALI 2.4 (github.com/NVIDIA/nvImageCodec/issues/55).
        fancy_upsampling: on a GPU, interpolate the colours of complete JPEGs as CPUs always do. nvJPEG cannot
            do this for a window.
    """

    device: str = "cpu"
    hw_load: float = 0.65
    largest: tuple[int, int] = (0, 0)
    roi: bool = False
    fancy_upsampling: bool = True

    def crop(self, jpegs: DataNode, window: DataNode) -> DataNode:
        """Decodes a window of an image.

        Args:
            jpegs: bytes of the image file.
            window: int32 (4,), top, left, height, width in pixels of the stored image.

        Returns:
            uint8 (height, width, 3) RGB, not rotated by EXIF.
        """
        part: dict[str, Any] = {"start": window[0:2], "shape": window[2:4], "axes": [0, 1]}
        options: dict[str, Any] = {"output_type": types.RGB, "adjust_orientation": False}
        if self.device == "cpu":
            return fn.decoders.image_slice(jpegs, **part, **options)
        height, width = self.largest
        options |= {
            "device": "mixed",
            "hw_decoder_load": self.hw_load,
            "preallocate_height_hint": height,
            "preallocate_width_hint": width,
            "jpeg_fancy_upsampling": self.fancy_upsampling and not self.roi,
        }
        if self.roi:
            return fn.decoders.image_slice(jpegs, **part, **options)
        return fn.slice(fn.decoders.image(jpegs, **options), **part)


def resize(
    images: DataNode, size: DataNode, mirrored: DataNode | None = None, antialias: bool = True
) -> DataNode:
    """Resizes images, and mirrors the images for which `mirrored` is 1.

    Args:
        images: (h, w, C).
        size: int32 (2,), the new height and width.
        mirrored: int32 (), 1 to flip the image horizontally. None means that no image is flipped.
        antialias: if True, an output pixel is the average of all pixels that it covers. If False, it depends
            on at most four of them.
    """
    if mirrored is not None:  # fn.resize mirrors if the width is negative
        size = fn.stack(size[0], size[1] * (1 - 2 * mirrored))
    resized: Any = fn.resize(  # DALI's type hints allow two outputs
        images, size=fn.cast(size, dtype=types.FLOAT), antialias=antialias
    )
    return resized


def place(
    images: DataNode,
    top_left: DataNode,
    image_size: DataNode,
    fill: float | Sequence[float],
) -> DataNode:
    """Places an image on a canvas of one colour. Parts outside the canvas are cut off.

    Args:
        images: (h, w, C), any dtype.
        top_left: int32 (2,), the row and column of the image's first pixel on the canvas.
        image_size: (height, width) of the canvas, int32.
        fill: the canvas' colour, one number for all channels or one number per channel.

    Returns:
        (height, width, C), the dtype of `images`.
    """
    return fn.slice(
        images,
        start=fn.cast(-top_left, dtype=types.INT32),
        shape=image_size,
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=[float(value) for value in fill] if isinstance(fill, Sequence) else float(fill),
    )


# --- boxes ---


def xyxy(yx: DataNode) -> DataNode:
    """Converts (y, x), an array (2,) of any number type, to (x, y, x, y), a float32 array (1, 4)."""
    return fn.coord_transform(fn.expand_dims(yx, axes=[0]), M=YX_TO_XYXY)


def boxes_to_window(boxes: DataNode, size: DataNode, window: DataNode) -> DataNode:
    """Converts boxes normalised by the image to boxes normalised by the window, clipped to the window.

    Boxes outside the window lose their area, and `select_boxes` drops them later.

    Args:
        boxes: float32 (N, 4), ltrb.
        size: int32 (2,), height and width of the image in pixels.
        window: int32 (4,), top, left, height, width in pixels of the image.
    """
    boxes_px = boxes * xyxy(size) - xyxy(window[0:2])
    return dali_math.clamp(boxes_px / xyxy(window[2:4]), 0.0, 1.0)


def pad_boxes(boxes: DataNode, labels: DataNode, max_instances: int) -> tuple[DataNode, DataNode]:
    """Converts labels to 0-based classes and pads boxes and classes with -1.

    Args:
        boxes: float32 (N, 4), with at most `max_instances` boxes.
        labels: int32 (N,), 1-based.
        max_instances: number of rows of the results.

    Returns:
        float32 (max_instances, 4) boxes and int32 (max_instances,) 0-based classes.
    """
    padded_boxes = fn.pad(boxes, axes=[0], shape=[max_instances], fill_value=-1)
    return padded_boxes, fn.pad(labels - 1, axes=[0], shape=[max_instances], fill_value=-1)


class Selected(NamedTuple):
    """The result of `select_boxes`."""

    boxes: DataNode  # float32 (M, 4)
    labels: DataNode  # int32 (M,)
    lost: DataNode  # int32 (2,), numbers of boxes dropped because of min_size and because of max_instances


def select_boxes(
    boxes: DataNode,
    labels: DataNode,
    min_size: tuple[float, float] = (0.0, 0.0),
    max_instances: int | None = None,
) -> Selected:
    """Drops small boxes and keeps the largest of the others; runs on the CPU.

    Boxes without area, inverted boxes and boxes with NaN or infinite coordinates are always dropped.

    Args:
        boxes: float32 (N, 4), ltrb.
        labels: int32 (N,).
        min_size: smallest (height, width) that is kept, in the unit of the boxes.
        max_instances: largest number of boxes to keep; None: keep all. If areas are equal, the
            first boxes are kept.

    Returns:
        The kept boxes and their labels in the original order, and how many boxes were dropped.
    """
    sides = boxes[:, 2:4] - boxes[:, 0:2]  # (N, 2) width, height
    smallest = np.maximum(np.array(min_size[::-1], np.float32), np.finfo(np.float32).tiny)
    # NaN and infinite sides fail one of these comparisons.
    is_large = (sides >= types.Constant(smallest, device="cpu")) & (sides <= _FLOAT32_MAX)
    large = selected = fn.reductions.min(int32(is_large), axes=[1])  # (N,)
    count = boxes.shape()[0]
    number = types.Constant(_NUMBERS, device="cpu")[:, :count]  # (1, N): 1, 2, 3, ...
    column = types.Constant(_NUMBERS.T, device="cpu")  # (rows, 1)
    is_before = column[:count] <= number  # (N, N)
    if max_instances is not None:
        # Positive floats have the same order as their bits.
        area_bits = fn.reinterpret(sides[:, 0] * sides[:, 1], dtype=types.INT32)
        key = fn.cast(area_bits, dtype=types.INT64) * _MAX_ROWS - number
        is_larger = (fn.transpose(key, perm=[1, 0]) > key) * fn.expand_dims(large, axes=[1])
        selected = large * (fn.reductions.sum(is_larger, axes=[0]) < max_instances)

    num_kept = fn.reductions.sum(selected, dtype=types.INT32)
    # The next lines compute boxes[kept] as a matrix product. Each row of the matrix has a single 1.
    place = (
        fn.reductions.sum(is_before * fn.expand_dims(selected, axes=[1]), axes=[0], dtype=types.INT32)
        * selected
    )
    # Slice after `==`, as DALI 2.4 may read wrong memory if an operand is empty.
    is_source = (fn.expand_dims(place, axes=[0]) == column[:count])[:num_kept]  # (M, N)
    # Multiplies the coordinates' bits as integers, because 0 times NaN is NaN.
    bits = fn.expand_dims(is_source, axes=[2]) * fn.reinterpret(boxes, dtype=types.INT32)  # (M, N, 4)
    bits = fn.reductions.sum(bits, axes=[1], dtype=types.INT32)
    labels = fn.reductions.sum(is_source * labels, axes=[1], dtype=types.INT32)  # (M,)

    visible = fn.reductions.sum(fn.reductions.min(int32(sides > 0), axes=[1]), dtype=types.INT32)
    num_large = fn.reductions.sum(large, dtype=types.INT32)
    lost = fn.stack(visible - num_large, num_large - num_kept)
    return Selected(fn.reinterpret(bits, dtype=types.FLOAT), labels, lost)


# --- numbers ---


def int32(values: DataNode) -> DataNode:
    """Converts to int32; fractions are rounded."""
    return fn.cast(values, dtype=types.INT32)


def uniform(low: float, high: float, shape: list[int] | None = None) -> DataNode | float:
    """Returns for each sample a random number from low to high, or an array of shape `shape`."""
    if low < high:
        return fn.random.uniform(range=(low, high), shape=shape)
    return float(low)  # DALI refuses an empty range
