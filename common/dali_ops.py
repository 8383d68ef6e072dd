"""Stages that the DALI graphs of both apps share; each sees one sample."""

from nvidia import dali
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode


def mark(stage: str, *nodes: DataNode) -> None:
    """Says that this is what a stage of the graph makes: where `marked` lets bench.py cut the graph.

    Said twice of a stage, both are what it makes.
    """
    vars(dali.Pipeline.current()).setdefault("marks", {}).setdefault(stage, []).extend(nodes)


def marked(pipeline: dali.Pipeline) -> dict[str, list[DataNode]]:
    """Stage -> what it makes, in the order in which the graph first marked them."""
    return vars(pipeline).get("marks", {})


def decode_window(jpegs: DataNode, window: DataNode, device: str) -> DataNode:
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
    images: DataNode, size: DataNode, mirrored: DataNode | None = None, antialias: bool = True
) -> DataNode:
    """Linear.

    Args:
        images: (h, w, C).
        size: int32 (2,), height and width.
        mirrored: int32 (), 1 to exchange left and right.
        antialias: average over all pixels that an output pixel covers; without, at most four are looked at.
    """
    if mirrored is not None:
        size = fn.stack(size[0], size[1] * (1 - 2 * mirrored))  # fn.resize mirrors for a negative width
    return fn.resize(
        images,
        size=fn.cast(size, dtype=types.FLOAT),
        interp_type=types.INTERP_LINEAR,
        antialias=antialias,
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
