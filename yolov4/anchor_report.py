"""What the anchors and cells of YOLOv4 can do with a data set, before anything is trained.

Which boxes train no prediction, which lose theirs to another box, and what AP perfect outputs would get.
Boxes are assigned by targets.py; images are whole, stretched or letterboxed as in evaluation.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from common.annotations import Annotations
from yolov4 import ap_ceiling
from yolov4.ap_ceiling import BoxGroup
from yolov4.config import YOLOv4Config
from yolov4.targets import assign_targets

BATCH = 16  # images that are assigned together


@dataclasses.dataclass(frozen=True, eq=False)
class AnchorReport:
    """What becomes of the boxes of a sample of the images.

    Attributes:
        images: number of images in the sample.
        boxes: true boxes of the sample without crowds; those without area are among them.
        unassigned: boxes that train nothing: the anchor that fits them best belongs to no head.
        lost: boxes that share all their predictions with boxes before them.
        ceiling: ap_ceiling.NAMES -> value.
        reasons: why it is below 1, in words.
    """

    images: int
    boxes: int
    unassigned: BoxGroup
    lost: BoxGroup
    ceiling: dict[str, float]
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        lost = f"{self.lost.count} lose their cell and anchor to another box"
        return [
            f"of {self.boxes} boxes in {self.images} images {lost}",
            *ap_ceiling.ceiling_lines(self.ceiling, self.reasons),
        ]


def examine(
    annotations: Annotations, config: YOLOv4Config, *, max_images: int = 2000, seed: int = 0
) -> AnchorReport:
    """Assigns the boxes of a sample of the images to the predictions of all heads.

    Args:
        annotations: the whole data set; at least one box to train on.
        config: anchors, heads, image_size, and which boxes training drops.
        max_images: size of the sample, of images with boxes.
        seed: chooses the sample.
    """
    network = ap_ceiling.network_boxes(
        ap_ceiling.sample_images(annotations, max_images, np.random.default_rng(seed)),
        config.image_size,
        keep_aspect=config.letterbox,
        centered=True,
        max_instances=config.max_instances,
        min_box_size=config.min_box_size,
    )
    kept = network.kept
    owner = prediction_owners(network.boxes[kept], network.image[kept], config)
    is_lost = (owner >= 0) & (owner != np.arange(len(kept)))
    # Perfect outputs give one detection of every class that meets in a prediction, where its owner is.
    classes = network.sample.target_boxes.classes[kept[owner >= 0]]
    detected = np.unique(np.stack([kept[owner[owner >= 0]], classes]), axis=1)
    ceiling = ap_ceiling.score(network, *detected)
    counts = {
        "without a head": int(np.count_nonzero(owner < 0)),
        "without a cell and anchor": int(np.count_nonzero(is_lost)),
    }
    return AnchorReport(
        images=network.sample.num_images,
        boxes=network.num_true,
        unassigned=network.group(kept[owner < 0]),
        lost=network.group(kept[is_lost]),
        ceiling=ceiling,
        reasons=ap_ceiling.reasons(network, ceiling, counts),
    )


def prediction_owners(boxes: np.ndarray, image: np.ndarray, config: YOLOv4Config) -> np.ndarray:
    """The box whose place each box is found in: the first box that trains the same prediction.

    Args:
        boxes: float32 (K, 4), ltrb normalised to the network input.
        image: int (K,), ascending.
        config: anchors, heads and image_size.

    Returns:
        int64 (K,): the box itself, if it is the first in any of its predictions; else the first box of one
        of them; -1 for a box that trains nothing.
    """
    box, prediction, is_first = _assigned(boxes, image, config)
    places, index = np.unique(np.stack([image[box], prediction]), axis=1, return_inverse=True)
    first = np.empty(places.shape[1], np.int64)
    first[index[is_first]] = box[is_first]
    owner = np.full(len(boxes), -1)
    owner[box[::-1]] = first[index][::-1]  # of several predictions the first counts
    owner[box[is_first]] = box[is_first]
    return owner


def _assigned(
    boxes: np.ndarray, image: np.ndarray, config: YOLOv4Config
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every box with every prediction that it trains: box, prediction, whether it is the first; (T,) each."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))]
    for begin in range(0, int(image.max(initial=-1)) + 1, BATCH):
        start, end = np.searchsorted(image, [begin, begin + BATCH])
        ragged = tf.RaggedTensor.from_value_rowids(boxes[start:end], image[start:end] - begin, nrows=BATCH)
        padded, is_box = ragged.to_tensor(), tf.sequence_mask(ragged.row_lengths())
        classes = tf.where(is_box, 0, -1)  # boxes of all classes meet alike
        before = 0  # predictions of the heads before this one
        for head, stride in enumerate(config.strides):
            grid_size = config.image_size[0] // stride, config.image_size[1] // stride
            assignment = assign_targets(padded, classes, config, head, grid_size=grid_size, num_classes=1)
            assigned, cells, is_first = (
                tf.boolean_mask(values, is_box).numpy()  # (boxes of the batch, anchors of the head)
                for values in (assignment.assigned, assignment.cells, assignment.owner)
            )
            of_box, k = np.nonzero(assigned)
            found.append((start + of_box, before + cells[of_box, k].astype(np.int64), is_first[of_box, k]))
            before += grid_size[0] * grid_size[1] * config.anchors_per_location
    box, prediction, is_first = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return box, prediction, is_first
