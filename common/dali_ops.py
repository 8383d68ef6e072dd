"""Stages that the DALI graphs of both apps and tools/preprocess.py share; each sees one sample.

Those with an `api` run in both of DALI's APIs: operators have the same names and arguments in both. What
differs are the methods of `Api`; tools/preprocessing/apis.py has the Dynamic API.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.errors import UserError

# ImageNet, RGB, for pixels in 0..255: google/automl efficientdet/hparams_config.py mean_rgb, stddev_rgb.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_ROWS = 2**14  # more boxes than this in one image are an error: choosing among N takes N x N numbers

SHUFFLE_BUFFER = 1024  # encoded images that each rank holds while it trains from containers

Nodes = tuple[DataNode, DataNode, DataNode, DataNode]  # jpegs, boxes, labels, image_ids: see readers.py
Data = Any  # nvidia.dali.data_node.DataNode in a graph, nvidia.dali.experimental.dynamic.Batch otherwise


class Api:
    """The Pipeline API: nodes of a graph that runs later.

    Attributes:
        ops: the module of the operators; `ops.decoders`, `ops.transforms` and so on below it.
    """

    ops: Any = fn

    def part(self, data: Data, index: int | slice) -> Data:
        """`data[index]` along the first axis of each sample."""
        return data[index]


GRAPH = Api()


# --- which rank reads which images, in which order ---


def shard_range(size: int, shard_id: int, num_shards: int) -> tuple[int, int]:
    """The part [begin, end) of `size` images that DALI gives to a shard (start_index in its loader.h)."""
    return size * shard_id // num_shards, size * (shard_id + 1) // num_shards


def check_shards(num_images: int, num_shards: int) -> None:
    """UserError for more ranks than images."""
    if num_images < num_shards:
        raise UserError(
            f"{num_images} images cannot be shared by {num_shards} ranks: use at most {num_images} ranks"
        )


def order(training: bool, seed: int, *, in_container: bool = False) -> dict[str, Any]:
    """The arguments of DALI's readers that order images.

    Args:
        training: shuffled without end; otherwise each rank reads its part, always in the same order.
        seed: of the shuffling.
        in_container: for readers of containers, which DALI shuffles by file and within a buffer.
    """
    if not training:
        return {"pad_last_batch": True, "stick_to_shard": True}
    # The pipeline's own seed does not affect this shuffling.
    shuffled = {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": seed}
    return shuffled | (buffer_order(seed) if in_container else {})


def buffer_order(seed: int) -> dict[str, Any]:
    """The arguments of DALI's readers that shuffle within a buffer."""
    return {"random_shuffle": True, "initial_fill": SHUFFLE_BUFFER, "seed": seed}


# --- images ---


def decode_crop(jpegs: DataNode, window: DataNode, device: str) -> DataNode:
    """Decodes a part of an image, and no more than its format demands.

    Args:
        jpegs: the file's bytes.
        window: int32 (4,), top, left, height, width in pixels of the stored image.
        device: "cpu" or "gpu".

    Returns:
        uint8 (height, width, 3) RGB, as stored (EXIF does not turn it).
    """
    return fn.decoders.image_slice(
        jpegs,
        start=window[0:2],
        shape=window[2:4],
        axes=[0, 1],
        device="mixed" if device == "gpu" else "cpu",
        output_type=types.RGB,
        adjust_orientation=False,
    )


def resize(
    images: Data,
    size: Data | Sequence[float],
    mirrored: Data | None = None,
    antialias: bool = True,
    interpolation: types.DALIInterpType = types.INTERP_LINEAR,
    api: Api = GRAPH,
) -> Data:
    """
    Args:
        images: (h, w, C).
        size: int32 (2,), height and width.
        mirrored: int32 (), 1 to exchange left and right.
        antialias: average over all pixels that an output pixel covers; without, at most four are looked at.
        interpolation: of DALI's.
        api: of `images`.
    """
    if mirrored is not None:  # fn.resize mirrors for a negative width
        size = api.ops.stack(api.part(size, 0), api.part(size, 1) * (1 - 2 * mirrored))
    if not isinstance(size, Sequence):
        size = api.ops.cast(size, dtype=types.FLOAT)
    return api.ops.resize(images, size=size, interp_type=interpolation, antialias=antialias)


def place(
    images: Data,
    top_left: Data,
    image_size: Data | Sequence[int],
    fill: float | Sequence[float],
    api: Api = GRAPH,
) -> Data:
    """An image somewhere in another one of a single colour; what reaches beyond is cut.

    Args:
        images: (h, w, C), any dtype.
        top_left: int32 (2,), the row and column where its first pixel goes.
        image_size: (height, width) of the result, int32.
        fill: the colour, one number for all channels or one for each.
        api: of `images`.

    Returns:
        (height, width, C), the dtype of `images`.
    """
    return api.ops.slice(
        images,
        start=api.ops.cast(-top_left, dtype=types.INT32),
        shape=image_size,
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=[float(value) for value in fill] if isinstance(fill, Sequence) else float(fill),
    )


def normalize(
    images: Data,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    image_size: Sequence[int] | None = None,
    api: Api = GRAPH,
) -> Data:
    """(pixels - mean) / std, at the top left of an image of zeros where `image_size` says so.

    Args:
        images: (h, w, C).
        mean, std: one number for each channel, for pixels in 0..255.
        image_size: (height, width) of the result; None: that of `images`.
        api: of `images`.

    Returns:
        float32 (height, width, C).
    """
    placed = {}
    if image_size is not None:
        placed = {
            "crop": [float(side) for side in image_size],
            "crop_pos_x": 0.0,
            "crop_pos_y": 0.0,
            "out_of_bounds_policy": "pad",
            "fill_values": 0.0,
        }
    return api.ops.crop_mirror_normalize(
        images, mean=list(mean), std=list(std), dtype=types.FLOAT, output_layout="HWC", **placed
    )


# --- boxes ---


def count_visible(boxes: DataNode) -> DataNode:
    """Number of boxes (N, 4) ltrb with any area left, int32 scalar."""
    visible = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return fn.reductions.sum(int32(visible), dtype=types.INT32)


def pad_boxes(boxes: DataNode, labels: DataNode, max_instances: int) -> tuple[DataNode, DataNode]:
    """Fills up with -1; runs in a DALI graph.

    Args:
        boxes: float32 (N, 4), N at most max_instances: fn.pad does not truncate.
        labels: int32 (N,), 1-based.
        max_instances: rows of the results.

    Returns:
        float32 (max_instances, 4) and int32 (max_instances,), 0-based classes.
    """
    padded_boxes = fn.pad(boxes, axes=[0], shape=[max_instances], fill_value=-1)
    return padded_boxes, fn.pad(labels - 1, axes=[0], shape=[max_instances], fill_value=-1)


def drop_small_boxes(
    boxes: DataNode, labels: DataNode, min_size: tuple[float, float] = (0.0, 0.0)
) -> tuple[DataNode, DataNode]:
    """Drops boxes smaller than `min_size`; runs in a DALI graph, on the CPU.

    Boxes without area, inverted boxes and boxes with NaN or infinite coordinates are always dropped.

    Args:
        boxes: float32 (N, 4), ltrb normalised.
        labels: int (N,).
        min_size: (height, width), normalised like the boxes.

    Returns:
        The boxes that stay, float32 (M, 4), in their order, and their labels, int32 (M,).
    """
    min_height, min_width = min_size
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    # A coordinate that is not finite makes its side NaN or infinite, and a comparison with NaN is false.
    keep_width = (width > 0) & (width >= float(min_width)) & (width <= _FLOAT32_MAX)
    keep_height = (height > 0) & (height >= float(min_height)) & (height <= _FLOAT32_MAX)
    return _select(boxes, labels, keep_width & keep_height)


def keep_largest(boxes: DataNode, labels: DataNode, max_instances: int) -> tuple[DataNode, DataNode]:
    """Keeps the boxes with the largest areas; runs in a DALI graph, on the CPU.

    Args:
        boxes: float32 (N, 4), ltrb normalised, finite.
        labels: int (N,).
        max_instances: how many to keep at most; of equal boxes the first stay.

    Returns:
        The boxes that stay, float32 (M, 4), in their order, and their labels, int32 (M,).
    """
    width = dali_math.max(boxes[:, 2] - boxes[:, 0], 0.0)
    height = dali_math.max(boxes[:, 3] - boxes[:, 1], 0.0)
    # Positive floats are ordered like their bits: one integer compares the area, then the position.
    area_bits = fn.cast(fn.reinterpret(width * height, dtype=types.INT32), dtype=types.INT64)
    key = area_bits * _MAX_ROWS - _arange(boxes.shape()[0])
    is_larger = fn.expand_dims(key, axes=[0]) > fn.expand_dims(key, axes=[1])  # (N, N)
    rank = fn.reductions.sum(fn.cast(is_larger, dtype=types.INT32), axes=[1])
    return _select(boxes, labels, rank < max_instances)


def _select(boxes: DataNode, labels: DataNode, keep: DataNode) -> tuple[DataNode, DataNode]:
    """boxes[keep], labels[keep] for a boolean (N,) `keep`: DALI's graph has no such indexing.

    Instead the rows are multiplied by a matrix with a single 1 in each line. The factors are integers, the
    bits of the coordinates: the products are exact, and 0 times a NaN that is to be dropped is 0.
    """
    kept = fn.cast(keep, dtype=types.INT32)
    index = _arange(boxes.shape()[0])
    is_before = fn.expand_dims(index, axes=[0]) < fn.expand_dims(index, axes=[1])  # (N, N)
    target = fn.reductions.sum(is_before * fn.expand_dims(kept, axes=[0]), axes=[1])  # row of each kept box
    target = (target + 1) * kept - 1  # -1 for the others

    wanted = fn.expand_dims(_arange(fn.reductions.sum(kept)), axes=[1])  # (M, 1)
    is_source = fn.expand_dims(target, axes=[0]) == wanted  # (M, N)
    labels = fn.expand_dims(fn.cast(labels, dtype=types.INT32), axes=[0])
    bits = fn.expand_dims(fn.reinterpret(boxes, dtype=types.INT32), axes=[0])
    labels = is_source * labels  # (M, N)
    bits = fn.expand_dims(is_source, axes=[2]) * bits  # (M, N, 4)
    labels = fn.reductions.sum(labels, axes=[1], dtype=types.INT32)  # (M,)
    bits = fn.reductions.sum(bits, axes=[1], dtype=types.INT32)  # (M, 4)
    return fn.reinterpret(bits, dtype=types.FLOAT), labels


def _arange(count: DataNode) -> DataNode:
    """int32 (count,): 0, 1, 2, ..."""
    return types.Constant(np.arange(_MAX_ROWS, dtype=np.int32), device="cpu")[:count]


# --- numbers ---


def int32(values: DataNode) -> DataNode:
    """int32; numbers with a fraction are rounded, not cut."""
    return fn.cast(values, dtype=types.INT32)


def uniform(low: float, high: float, shape: list[int] | None = None) -> DataNode | float:
    """A number drawn for each sample, or as many as `shape` says, from low .. high."""
    if low < high:
        return fn.random.uniform(range=(low, high), shape=shape)
    return float(low)  # DALI refuses an empty range
