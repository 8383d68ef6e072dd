"""What happens to boxes in both pipelines, in NumPy and float64, and how to compare with what came out.

Boxes are ltrb in pixels, of the stored image or of the network input.
"""

import numpy as np

PIXEL = 0.01  # boxes agree to this
DOUBTFUL = 1e-3  # pixels around a threshold within which a box may stay or go
DOUBTFUL_AREA = 1e-4  # likewise of the areas that max_instances chooses by, relative
MATCH_IOU = 0.5  # SSD (arXiv 1512.02325) section 2.2


def swapped(yx: tuple[float, float]) -> np.ndarray:
    """(y, x) -> x, y, x, y."""
    return np.array([yx[1], yx[0], yx[1], yx[0]], np.float64)


def move(boxes_px: np.ndarray, window: tuple[int, ...], place: tuple[int, ...]) -> np.ndarray:
    """Through the map that takes a window of the image to its place in the network input, and clipped to it.

    Args:
        boxes_px: (N, 4) in the stored image.
        window, place: top, left, height, width.
    """
    origin, target = swapped(place[:2]), swapped(place[2:])
    inside = (boxes_px - swapped(window[:2])) / swapped(window[2:])
    return np.clip(inside, 0, 1) * target + origin


def adjoin(boxes_px: np.ndarray, window: tuple[int, ...]) -> np.ndarray:
    """(N,): whether a box and the window have a border in common and nothing else, up to rounding."""
    corners = np.array([window[1], window[0], window[1] + window[3], window[0] + window[2]])
    sides = np.minimum(boxes_px[:, 2:], corners[2:]) - np.maximum(boxes_px[:, :2], corners[:2])
    return np.abs(sides.min(1, initial=np.inf)) < DOUBTFUL


def flip(boxes_px: np.ndarray, width: float) -> np.ndarray:
    """Left and right exchanged in an image of that width."""
    left, top, right, bottom = boxes_px.T
    return np.stack([width - right, top, width - left, bottom], axis=1)


def assert_boxes(outputs, row: int, boxes_px, classes, config, where: str, adjoining: int = 0) -> None:
    """The boxes that came out of an image are those that the config's rule leaves; the lost ones are counted.

    Args:
        outputs: of the pipeline, by name.
        boxes_px, classes: of the image, all that show in the network input.
        adjoining: of how many other boxes rounding decides whether they show.
    """
    is_box = outputs["classes"][row] >= 0
    count = is_box.sum()
    assert is_box[:count].all() and (outputs["classes"][row, count:] == -1).all(), where
    assert (outputs["boxes"][row, count:] == -1).all(), where
    got_px = outputs["boxes"][row, :count].astype(np.float64) * swapped(outputs["images"][row].shape[:2])
    _assert_kept(got_px, outputs["classes"][row, :count], boxes_px, classes, config, where)
    _assert_lost(outputs["lost"][row], boxes_px, config, where, adjoining)


def _assert_kept(got_px, got_classes, boxes_px, classes, config, where: str) -> None:
    """In their order, with the same classes: boxes with a side below `min_box_size` go, then the smallest.

    `max_instances` boxes are left at most.
    """
    min_size, max_instances = config.min_box_size, config.max_instances
    sides = boxes_px[:, 2:] - boxes_px[:, :2]
    smallest, areas = sides.min(1, initial=np.inf), sides.prod(1)
    certain, possible = smallest >= min_size + DOUBTFUL, smallest >= min_size - DOUBTFUL
    count = min(max_instances, certain.sum())
    if possible.sum() > max_instances:
        limit = np.sort(areas[possible])[-max_instances]
        certain &= areas > limit * (1 + DOUBTFUL_AREA)
        possible &= areas >= limit * (1 - DOUBTFUL_AREA)
    assert count <= len(got_px) <= max_instances, where
    row = 0
    for index in np.flatnonzero(possible):
        found = (
            row < len(got_px)
            and got_classes[row] == classes[index]
            and np.abs(got_px[row] - boxes_px[index]).max() <= PIXEL
        )
        assert found or not certain[index], (
            f"{where}: box {index} {boxes_px[index]} of class {classes[index]} is not row {row}:"
            f" {got_px[row : row + 1]} {got_classes[row : row + 1]}"
        )
        row += found
    assert row == len(got_px), f"{where}: {got_px[row]} comes from no box"


def _assert_lost(lost, boxes_px, config, where: str, adjoining: int) -> None:
    """The two counts: boxes that show, but are too small; boxes above max_instances."""
    min_size, max_instances = config.min_box_size, config.max_instances
    smallest = (boxes_px[:, 2:] - boxes_px[:, :2]).min(1, initial=np.inf)
    small = [
        ((smallest > DOUBTFUL) & (smallest < min_size - DOUBTFUL)).sum(),
        ((smallest > 0) & (smallest < min_size + DOUBTFUL)).sum() + adjoining,
    ]
    over = [max((smallest >= min_size + slack).sum() - max_instances, 0) for slack in (DOUBTFUL, -DOUBTFUL)]
    assert small[0] <= lost[0] <= small[1] and over[0] <= lost[1] <= over[1], (
        f"{where}: {lost}, not {small}, {over}"
    )


def match(boxes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """(A,): which box each anchor is to find, -1 for none; SSD's rule by brute force over all pairs.

    An anchor takes the box that it overlaps most if their IoU exceeds 1/2; every box gets its best anchor
    whatever the IoU; of two boxes with the same best anchor the later one has it. Of equals the last one
    wins. All in float32: where two compete, the last bit decides.

    Args:
        boxes, anchors: float32 (N, 4) and (A, 4), ltrb normalised, all with some area.
    """
    if len(boxes) == 0:
        return np.full(len(anchors), -1)
    one, other = boxes[:, np.newaxis], anchors
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    common = np.where((sides > 0).all(-1), sides.prod(-1), np.float32(0))
    areas = [(x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1]) for x in (one, other)]
    iou = common / (areas[0] + areas[1] - common)  # (N, A)
    owners = len(boxes) - 1 - iou[::-1].argmax(0)
    owners[iou.max(0) <= MATCH_IOU] = -1
    best = len(anchors) - 1 - iou[:, ::-1].argmax(1)
    for box, anchor in enumerate(best):
        owners[anchor] = box
    return owners


def deltas(boxes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """(P, 4) dy, dx, dh, dw of boxes relative to anchors (arXiv 1506.01497 section 3.1.2), ltrb each."""
    boxes, anchors = boxes.astype(np.float64), anchors.astype(np.float64)
    sizes = anchors[:, 2:] - anchors[:, :2]
    shifts = (boxes[:, :2] + boxes[:, 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / sizes
    scales = np.log((boxes[:, 2:] - boxes[:, :2]) / sizes)
    return np.concatenate([shifts[:, ::-1], scales[:, ::-1]], axis=1)
