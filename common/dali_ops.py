"""Stages that the DALI graphs of both apps and tools/preprocess.py share; each sees one sample.

Those with an `api` run in both of DALI's APIs: operators have the same names and arguments in both. What
differs are the methods of `Api`; tools/preprocessing/apis.py has the Dynamic API.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from common.errors import UserError

# ImageNet, RGB, for pixels in 0..255: google/automl efficientdet/hparams_config.py mean_rgb, stddev_rgb.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_ROWS = 2**14  # more boxes than this in one image are an error: choosing among N takes N x N numbers
_NUMBERS = np.arange(1, _MAX_ROWS + 1, dtype=np.int32)[np.newaxis]
YX_TO_XYXY = [0, 1, 1, 0, 0, 1, 1, 0]  # a matrix for fn.coord_transform, row by row

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


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How images are decoded.

    Attributes:
        device: where the pixels are, "cpu" or "gpu".
        hw_load: share of a batch's JPEGs that the GPU's JPEG engines decode, 0 to 1; the others are decoded
            by CPU threads and CUDA together. GPUs without engines (before A100) ignore it.
        largest: (height, width) that the engines reserve memory for; (0, 0): memory grows as images need it.
        roi: on a GPU, decode no more than the window, as always on a CPU. Off by default: DALI 2.4 needs
            nvImageCodec 0.9, which can crash there (github.com/NVIDIA/nvImageCodec/issues/55).
    """

    device: str = "cpu"
    hw_load: float = 0.65
    largest: tuple[int, int] = (0, 0)
    roi: bool = False

    def crop(self, jpegs: DataNode, window: DataNode) -> DataNode:
        """Decodes a part of an image.

        Args:
            jpegs: the file's bytes.
            window: int32 (4,), top, left, height, width in pixels of the stored image.

        Returns:
            uint8 (height, width, 3) RGB, as stored (EXIF does not turn it).
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
            # As CPU decoders interpolate chroma; nvJPEG before 13.2 cannot for a window.
            "jpeg_fancy_upsampling": not self.roi,
        }
        if self.roi:
            return fn.decoders.image_slice(jpegs, **part, **options)
        return fn.slice(fn.decoders.image(jpegs, **options), **part)


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
        antialias: average over all pixels that an output pixel covers; without, at most four are used.
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
    """(pixels - mean) / std, at the top left of an image of zeros if `image_size` is given.

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


def xyxy(yx: DataNode) -> DataNode:
    """(2,), y and x of any number type -> float32 (1, 4): x, y, x, y."""
    return fn.coord_transform(fn.expand_dims(yx, axes=[0]), M=YX_TO_XYXY)


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


class Selected(NamedTuple):
    """What `select_boxes` keeps."""

    boxes: DataNode  # float32 (M, 4)
    labels: DataNode  # int32 (M,)
    lost: DataNode  # int32 (2,): boxes with an area that are too small; large ones above max_instances


def select_boxes(
    boxes: DataNode,
    labels: DataNode,
    min_size: tuple[float, float] = (0.0, 0.0),
    max_instances: int | None = None,
) -> Selected:
    """Drops small boxes and keeps the largest of the others; runs in a DALI graph, on the CPU.

    Boxes without area, inverted boxes and boxes with NaN or infinite coordinates are always dropped. What
    costs time is the number of operators, because each one handles a few numbers only.

    Args:
        boxes: float32 (N, 4), ltrb.
        labels: int32 (N,).
        min_size: (height, width), in the unit of the boxes.
        max_instances: how many to keep at most, those with the largest areas; of equal boxes the first stay.
            None: all.

    Returns:
        The boxes that stay, in their order, with their labels.
    """
    sides = boxes[:, 2:4] - boxes[:, 0:2]  # (N, 2) width, height
    smallest = np.maximum(np.array(min_size[::-1], np.float32), np.finfo(np.float32).tiny)
    # A coordinate that is not finite makes its side NaN or infinite, and a comparison with NaN is false.
    is_large = (sides >= types.Constant(smallest, device="cpu")) & (sides <= _FLOAT32_MAX)
    large = kept = fn.reductions.min(int32(is_large), axes=[1])  # (N,)
    count = boxes.shape()[0]
    number = types.Constant(_NUMBERS, device="cpu")[:, :count]  # (1, N): 1, 2, 3, ...
    column = types.Constant(_NUMBERS.T, device="cpu")  # (rows, 1)
    is_before = column[:count] <= number  # (N, N)
    if max_instances is not None:
        # Positive floats are ordered like their bits: one integer compares the area, then the position.
        area_bits = fn.reinterpret(sides[:, 0] * sides[:, 1], dtype=types.INT32)
        key = fn.cast(area_bits, dtype=types.INT64) * _MAX_ROWS - number
        is_larger = (fn.transpose(key, perm=[1, 0]) > key) * fn.expand_dims(large, axes=[1])
        kept = large * (fn.reductions.sum(is_larger, axes=[0]) < max_instances)

    num_kept = fn.reductions.sum(kept, dtype=types.INT32)
    # DALI's graph has no boxes[kept]. Instead the rows are multiplied by a matrix with one 1 in each line.
    place = fn.reductions.sum(is_before * fn.expand_dims(kept, axes=[1]), axes=[0], dtype=types.INT32) * kept
    # Cut to M rows after the comparison: DALI 2.4 reads other memory where it compares (1, N) with (1, 1)
    # and, for another image of the batch, (1, 1) with (0, 1).
    is_source = (fn.expand_dims(place, axes=[0]) == column[:count])[:num_kept]  # (M, N)
    # The factors are integers, the bits of the coordinates: products are exact, and 0 x NaN is 0.
    bits = fn.expand_dims(is_source, axes=[2]) * fn.reinterpret(boxes, dtype=types.INT32)  # (M, N, 4)
    bits = fn.reductions.sum(bits, axes=[1], dtype=types.INT32)
    labels = fn.reductions.sum(is_source * labels, axes=[1], dtype=types.INT32)  # (M,)

    visible = fn.reductions.sum(fn.reductions.min(int32(sides > 0), axes=[1]), dtype=types.INT32)
    num_large = fn.reductions.sum(large, dtype=types.INT32)
    lost = fn.stack(visible - num_large, num_large - num_kept)
    return Selected(fn.reinterpret(bits, dtype=types.FLOAT), labels, lost)


# --- numbers ---


def int32(values: DataNode) -> DataNode:
    """int32; numbers with a fraction are rounded, not cut."""
    return fn.cast(values, dtype=types.INT32)


def uniform(low: float, high: float, shape: list[int] | None = None) -> DataNode | float:
    """A random number from low .. high for each sample, or an array of this `shape`."""
    if low < high:
        return fn.random.uniform(range=(low, high), shape=shape)
    return float(low)  # DALI refuses an empty range
