"""What the anchors and cells of YOLOv4 can make of a data set, before anything is trained.

Which boxes train no prediction, which lose theirs to another box, and what AP perfect outputs would get.
Boxes are assigned by targets.py; images are whole, stretched or letterboxed as in evaluation.
"""

import dataclasses

import numpy as np

from common.annotations import Annotations
from tools.report import ap_ceiling, shown_boxes
from tools.report.shown_boxes import Group, ShownBoxes
from yolov4.config import YOLOv4Config
from yolov4.decoding import decode_offsets
from yolov4.targets import assign_targets

BATCH = 16  # images that are assigned at a time
_EDGE = 1e-6  # where scale_xy is 1 no finite output puts a centre on the border of its cell


@dataclasses.dataclass(frozen=True)
class AnchorReport:
    """What becomes of the boxes of a sample of the images.

    Attributes:
        images: in the sample.
        boxes: true boxes of the sample, no crowds; those without area are among them.
        unassigned: boxes that train nothing: the anchor that fits them best belongs to no head.
        lost: boxes that share all their predictions with boxes before them: they have no place of their own.
        ceiling: ap_ceiling.NAMES -> value.
        reasons: in words, why it is below 1.
    """

    images: int
    boxes: int
    unassigned: Group
    lost: Group
    ceiling: dict[str, float]
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        ceiling = ", ".join(f"{name} {value:.3f}" for name, value in self.ceiling.items() if value >= 0)
        lines = [
            f"of {self.boxes} boxes in {self.images} images {self.lost.count} lose their cell and anchor to "
            "another box",
            f"AP ceiling, of perfect outputs: {ceiling}",
        ]
        if self.reasons:
            lines.append(f"what is missing: {'; '.join(self.reasons)}")
        return lines


def examine(
    annotations: Annotations, config: YOLOv4Config, *, max_images: int = 2000, seed: int = 0
) -> AnchorReport:
    """Assigns the boxes of a sample of the images to the predictions of all heads.

    Args:
        annotations: the whole data set; at least one box to train on.
        config: names anchors, heads, image_size, and which boxes training drops.
        max_images: images with boxes beyond these are left out, at random.
        seed: of the choice of images.
    """
    shown = shown_boxes.show(
        shown_boxes.sample_images(annotations, max_images, np.random.default_rng(seed)),
        config.image_size,
        keep_aspect=config.letterbox,
        centered=True,
        max_instances=config.max_instances,
        min_box_size=config.min_box_size,
    )
    kept = shown.kept
    boxes, image = shown.boxes[kept], shown.image[kept]
    prediction, owner = train_predictions(boxes, image, config)
    unassigned = kept[owner < 0]
    lost = kept[(owner >= 0) & (owner != np.arange(len(kept)))]
    ceiling = _ceiling(shown, prediction, owner, config)
    reasons: tuple[str, ...] = ()
    if ceiling["AP"] < ap_ceiling.PERFECT:
        counts = {"without a head": len(unassigned), "without a cell and anchor": len(lost)}
        reasons = ap_ceiling.reasons(shown, counts)
    return AnchorReport(
        images=shown.sample.num_images,
        boxes=shown.num_true,
        unassigned=shown.group(unassigned),
        lost=shown.group(lost),
        ceiling=ceiling,
        reasons=reasons,
    )


def train_predictions(
    boxes: np.ndarray, image: np.ndarray, config: YOLOv4Config
) -> tuple[np.ndarray, np.ndarray]:
    """One of the predictions that each box trains, and the box whose place that is.

    Args:
        boxes: float32 (K, 4), ltrb normalised to the network input.
        image: int (K,), ascending.
        config: names anchors, heads and image_size.

    Returns:
        int64 (K,), the number of the prediction, row by row of head by head, -1 for none; int64 (K,), the
        first box of the image that trains it: the box itself, if it is the first anywhere; -1 for none.
    """
    box, prediction, is_first = _assigned(boxes, image, config)
    chosen, owner = np.full(len(boxes), -1), np.full(len(boxes), -1)
    order = np.lexsort((prediction, ~is_first, box))
    ones, rows = np.unique(box[order], return_index=True)
    chosen[ones] = prediction[order[rows]]

    place = image[box] * (prediction.max(initial=0) + 1) + prediction  # of all images
    owned, owning = place[is_first], box[is_first]
    order = np.argsort(owned)
    wanted = image[ones] * (prediction.max(initial=0) + 1) + chosen[ones]
    owner[ones] = owning[order[np.searchsorted(owned[order], wanted)]]
    return chosen, owner


def _assigned(
    boxes: np.ndarray, image: np.ndarray, config: YOLOv4Config
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Everything that is trained: box, prediction, whether the box is the first there; (T,) each."""
    num_images = int(image.max(initial=-1)) + 1
    starts = np.searchsorted(image, np.arange(num_images + 1))
    slots = np.arange(len(boxes)) - starts[image]
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))]
    for begin in range(0, num_images, BATCH):
        end = min(begin + BATCH, num_images)
        numbers = np.arange(starts[begin], starts[end])
        place = image[numbers] - begin, slots[numbers]
        shape = end - begin, int(slots[numbers].max(initial=0)) + 1
        padded, classes = np.zeros((*shape, 4), np.float32), np.full(shape, -1, np.int32)
        padded[place], classes[place] = boxes[numbers], 0  # boxes of all classes meet alike
        first = 0
        for head in range(len(config.masks)):
            rows, columns = _grid_size(config, head)
            assignment = assign_targets(
                padded, classes, config, head, grid_size=(rows, columns), num_classes=1
            )
            of_box, k = np.nonzero(assignment.assigned.numpy()[place])
            cells, is_first = assignment.cells.numpy()[place], assignment.owner.numpy()[place]
            found.append((numbers[of_box], first + cells[of_box, k].astype(np.int64), is_first[of_box, k]))
            first += rows * columns * config.anchors_per_location
    box, prediction, is_first = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return box, prediction, is_first


def _ceiling(
    shown: ShownBoxes, prediction: np.ndarray, owner: np.ndarray, config: YOLOv4Config
) -> dict[str, float]:
    """One detection of every class that meets in a place, where the owner of that place is."""
    number = shown.kept
    classes = shown.sample.target_boxes.classes[number]
    trained = np.flatnonzero(owner >= 0)
    detected, first = np.unique(np.stack([owner[trained], classes[trained]]), axis=1, return_index=True)
    owning, of_class = detected
    image = shown.image[number[owning]]
    decoded = encode_and_decode(shown.boxes[number[owning]], prediction[trained[first]], config)
    return ap_ceiling.score(shown.sample, image, shown.in_original(decoded, image), of_class)


def encode_and_decode(boxes: np.ndarray, prediction: np.ndarray, config: YOLOv4Config) -> np.ndarray:
    """The raw outputs that stand for boxes (K, 4) in these predictions (K,), decoded: float32 (K, 4)."""
    decoded, first = np.zeros((len(boxes), 4), np.float32), 0
    for head, mask in enumerate(config.masks):
        rows, columns = _grid_size(config, head)
        mine = (prediction >= first) & (prediction < first + rows * columns * len(mask))
        row, column, k = np.unravel_index(prediction[mine] - first, (rows, columns, len(mask)))
        first += rows * columns * len(mask)
        sizes = np.array([config.anchor_sizes[anchor] for anchor in mask], np.float32)[k]
        cell = np.stack([column, row], axis=1)
        offsets = encode_offsets(boxes[mine], cell, sizes, config, head)
        decoded[mine] = decode_offsets(
            offsets, row, column, sizes, config.scale_xy[head], (rows, columns), config.image_size
        ).numpy()
    return decoded


def encode_offsets(
    boxes: np.ndarray, cell: np.ndarray, anchor_sizes: np.ndarray, config: YOLOv4Config, head: int
) -> np.ndarray:
    """The inverse of `decoding.decode_offsets`: the raw x, y, width and height that stand for boxes.

    Args:
        boxes: float32 (K, 4), ltrb normalised to the network input, each with its centre in its cell.
        cell: int (K, 2), column and row.
        anchor_sizes: (K, 2), width and height in pixels of the network input.
        config: holds scale_xy and image_size.
        head: number of the head.

    Returns:
        float32 (K, 4).
    """
    grid, scale = np.array(_grid_size(config, head)[::-1]), config.scale_xy[head]
    centers = (boxes[:, :2] + boxes[:, 2:]).astype(np.float64) / 2 * grid - cell
    shares = np.clip((centers + 0.5 * (scale - 1.0)) / scale, _EDGE, 1 - _EDGE)
    sizes = (boxes[:, 2:] - boxes[:, :2]) * np.array(config.image_size[::-1]) / anchor_sizes
    return np.concatenate([np.log(shares / (1 - shares)), np.log(sizes)], axis=1).astype(np.float32)


def _grid_size(config: YOLOv4Config, head: int) -> tuple[int, int]:
    """(rows, columns)."""
    height, width = config.image_size
    return height // config.strides[head], width // config.strides[head]
