"""Stages that the DALI graphs of both apps and tools/preprocess.py share; each sees one sample.

Those with an `api` run in both of DALI's APIs: operators have the same names and arguments in both. What
differs are the methods of `Api`; tools/preprocessing/apis.py has the Dynamic API.
"""

from collections.abc import Sequence
from typing import Any

from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

# ImageNet, RGB, for pixels in 0..255: google/automl efficientdet/hparams_config.py mean_rgb, stddev_rgb.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)

Data = Any  # nvidia.dali.data_node.DataNode in a graph, nvidia.dali.experimental.dynamic.Batch otherwise


class Api:
    """The Pipeline API: nodes of a graph that runs later.

    Attributes:
        ops: the module of the operators; `ops.decoders`, `ops.transforms` and so on below it.
    """

    ops: Any = fn

    def part(self, data: DataNode, index: int | slice) -> DataNode:
        """`data[index]` along the first axis of each sample."""
        return data[index]


GRAPH = Api()


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


def count_visible(boxes: DataNode) -> DataNode:
    """Number of boxes (N, 4) ltrb with any area left, int32 scalar."""
    visible = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return fn.reductions.sum(int32(visible), dtype=types.INT32)


def int32(values: DataNode) -> DataNode:
    """int32; numbers with a fraction are rounded, not cut."""
    return fn.cast(values, dtype=types.INT32)


def uniform(low: float, high: float, shape: list[int] | None = None) -> DataNode | float:
    """A number drawn for each sample, or as many as `shape` says, from low .. high."""
    if low < high:
        return fn.random.uniform(range=(low, high), shape=shape)
    return float(low)  # DALI refuses an empty range
