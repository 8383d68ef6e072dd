"""Makes one image from several, in DALI: mosaic, CutMix and MixUp.

A canvas is a finished network input: float32 (H, W, 3), with boxes in pixels of the canvas. A piece is a
rectangle of a canvas and its position in the new image. Later pieces cover earlier ones.

CutMix: arXiv 1905.04899. MixUp: arXiv 1710.09412, with Darknet's constant weights of one half
(AlexeyAB/darknet src/data.c, load_data_detection: blend_images_cv, blend_truth).
"""

import dataclasses

from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.dali_ops import YX_TO_XYXY, uniform
from yolov4 import mosaic
from yolov4.config import YOLOv4Config
from yolov4.crops import round_half_up
from yolov4.mosaic import Objects, Pieces

COVERED = 0.5  # a box is removed if CutMix covers a larger share of it


def mix(
    config: YOLOv4Config,
    images: DataNode,
    objects: Objects,
    place: DataNode | None,
    image_size: DataNode,
    excluded: DataNode | None = None,
) -> tuple[DataNode, Objects]:
    """Mixes some samples with others of the batch (mosaic, MixUp, CutMix). The order in the batch changes.

    Args:
        images: float32 (H, W, 3), the canvases, all of the same size.
        objects: the objects of each canvas.
        place: int32 (4,), top, left, height and width of the image in its canvas; None without mosaics.
        image_size: int32 (2,), (H, W).
        excluded: int32 (), 1 for a canvas that must not be mixed with others; None: all can be mixed.
    """
    sources = draw_sources(mosaic.TILES if config.mosaic_prob else 2)
    groups = [whole_canvas(sources[0], image_size)]
    free: DataNode | int = 1
    if excluded is not None:
        free = 1 - fn.permute_batch(excluded, indices=sources[0])
    if config.mosaic_prob:
        assert place is not None
        chosen = fn.random.coin_flip(probability=config.mosaic_prob)
        free = free - chosen
        groups = [mosaic.tiles(sources, place, mosaic.random_cut(image_size), image_size, chosen)]
    if config.mixup_prob:
        chosen = fn.random.coin_flip(probability=config.mixup_prob) * free
        free = free - chosen
        blended = dataclasses.replace(whole_canvas(sources[1], image_size), count=chosen)
    if config.cutmix_prob:
        chosen = fn.random.coin_flip(probability=config.cutmix_prob) * free
        groups.append(random_rectangle(sources[1], chosen, image_size))

    parts = [part for group in groups for part in objects_of(objects, group, config.min_visible)]
    canvases, images = images, paste(images, groups)
    if config.cutmix_prob:
        parts[0] = hide_covered(parts[0], groups[-1])
    if config.mixup_prob:
        images = mixup(images, canvases, blended)
        parts += objects_of(objects, blended)
    # No zip(..., strict=True) here: DALI's AutoGraph fails on it.
    return images, Objects(fn.cat(*(p.boxes_px for p in parts)), fn.cat(*(p.labels for p in parts)))


def images_of_one(config: YOLOv4Config) -> int:
    """Returns the largest number of images whose objects can be in one mixed image."""
    images = mosaic.TILES if config.mosaic_prob else 1
    return images * 2 if config.mixup_prob or config.cutmix_prob else images


def draw_sources(count: int) -> list[DataNode]:
    """Draws `count` canvases for each new image, and returns their indices in the batch, int32 () nodes.

    The first index is the main canvas of the new image.
    """
    main = fn.batch_permutation()
    others = [fn.batch_permutation(no_fixed_points=True) for _ in range(count - 1)]
    return [main, *(fn.permute_batch(main, indices=other) for other in others)]


def whole_canvas(source: DataNode, image_size: DataNode) -> Pieces:
    """Returns the whole canvas as one piece."""
    size = fn.expand_dims(image_size, axes=[0])
    return Pieces([source], size * 0, size, size * 0, 1)


def paste(canvases: DataNode, groups: list[Pieces]) -> DataNode:
    """Pastes pieces of canvases into an image, float32 (H, W, 3). The pieces must cover the whole image."""

    def join(arrays: list[DataNode]) -> DataNode:
        rows = [arrays[i][: group.count] for i, group in enumerate(groups)]
        return fn.cat(*rows, axis=0) if len(rows) > 1 else rows[0]

    return fn.multi_paste(
        canvases,
        in_ids=join([fn.stack(*group.sources) for group in groups]),
        in_anchors=join([group.starts for group in groups]),
        shapes=join([group.sizes for group in groups]),
        out_anchors=join([group.targets for group in groups]),
    )


def objects_of(canvas: Objects, pieces: Pieces, min_visible: float = 0.0) -> list[Objects]:
    """Returns the objects of each piece: the boxes of its canvas, clipped to the piece and moved with it.

    Boxes outside their piece get no area, also those of which the piece shows less than `min_visible`.
    """
    # A piece with `count` 0 gets no area. Absent tiles of a mosaic already have none.
    sizes = pieces.sizes if len(pieces.sources) > 1 else pieces.sizes * pieces.count
    starts, ends, shifts = (
        fn.coord_transform(corners, M=YX_TO_XYXY)  # float32 (R, 4)
        for corners in (pieces.starts, pieces.starts + sizes, pieces.targets - pieces.starts)
    )
    result = []
    for row, source in enumerate(pieces.sources):
        boxes_px, labels = (fn.permute_batch(node, indices=source) for node in canvas)
        clipped_px = dali_math.clamp(boxes_px, starts[row], ends[row])
        clipped_px = mosaic.hide_slivers(boxes_px, clipped_px, min_visible)
        result.append(Objects(clipped_px + shifts[row], labels))
    return result


def random_rectangle(source: DataNode, chosen: DataNode, image_size: DataNode) -> Pieces:
    """Draws the rectangle that CutMix copies. It has the aspect ratio of the canvas."""
    half = dali_math.sqrt(uniform(0.0, 1.0)) * image_size / 2
    center = fn.random.uniform(range=(0.0, 1.0), shape=[2]) * image_size
    first = dali_math.clamp(round_half_up(center - half), 0, image_size)
    size = dali_math.clamp(round_half_up(center + half), 0, image_size) - first
    start, size = fn.expand_dims(first, axes=[0]), fn.expand_dims(size, axes=[0])
    return Pieces([source], start, size, start, chosen * (fn.reductions.min(size) > 0))


def hide_covered(objects: Objects, rectangle: Pieces) -> Objects:
    """Sets a box to 0 if the rectangle covers more than COVERED times the box's area."""
    boxes_px, labels = objects
    top_left, size = rectangle.targets[0], rectangle.sizes[0] * rectangle.count
    bottom_right = top_left + size
    width = _overlap(boxes_px[:, 0], boxes_px[:, 2], top_left[1], bottom_right[1])
    height = _overlap(boxes_px[:, 1], boxes_px[:, 3], top_left[0], bottom_right[0])
    area = (boxes_px[:, 2] - boxes_px[:, 0]) * (boxes_px[:, 3] - boxes_px[:, 1])
    stays = fn.cast(width * height <= COVERED * area, dtype=types.FLOAT)
    return Objects(boxes_px * fn.expand_dims(stays, axes=[1]), labels)


def mixup(images: DataNode, canvases: DataNode, pieces: Pieces) -> DataNode:
    """Averages each image, float32 (H, W, 3), with another canvas, if pieces.count is 1."""
    rows = pieces.sizes[0, 0] * pieces.count  # 0 if the piece is absent
    main = images[:rows]
    other = fn.permute_batch(canvases, indices=pieces.sources[0])[:rows]
    return fn.cat(0.5 * (main + other), images[rows:], axis=0)


def _overlap(low: DataNode, high: DataNode, other_low: DataNode, other_high: DataNode) -> DataNode:
    return dali_math.max(dali_math.min(high, other_high) - dali_math.max(low, other_low), 0.0)
