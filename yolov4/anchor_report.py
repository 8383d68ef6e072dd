"""What the anchors and cells of YOLOv4 can do with a data set, before anything is trained.

Which boxes train no prediction, which lose theirs to another box, and which training drops. Boxes are
assigned by targets.py; images are whole, stretched or letterboxed as in evaluation.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from common.annotations import Annotations
from yolov4.config import YOLOv4Config
from yolov4.network_boxes import network_boxes, sample_images
from yolov4.targets import assign_targets

BATCH = 16  # images that are assigned together


@dataclasses.dataclass(frozen=True)
class AnchorReport:
    """What becomes of the boxes of a sample of the images.

    Attributes:
        images: number of images in the sample.
        boxes: true boxes of the sample without crowds; those without area are among them.
        unassigned: number of boxes that train nothing: the anchor that fits them best belongs to no head.
        lost: boxes that share all their predictions with boxes before them.
        too_small: boxes dropped because a side is below min_box_size.
        over_limit: boxes beyond max_instances.
    """

    images: int
    boxes: int
    unassigned: int
    lost: int
    too_small: int
    over_limit: int

    @property
    def share_without_place(self) -> float:
        """Of the boxes, those that are unassigned or lost."""
        return (self.unassigned + self.lost) / max(self.boxes, 1)

    def __str__(self) -> str:
        return (
            f"of {self.boxes} boxes in {self.images} images {self.unassigned} have no head, {self.lost} lose "
            f"their cell and anchor to another box, {self.too_small} are smaller than min_box_size, "
            f"{self.over_limit} are beyond max_instances"
        )


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
    network = network_boxes(
        sample_images(annotations, max_images, np.random.default_rng(seed)),
        config.image_size,
        keep_aspect=config.letterbox,
        centered=True,
        max_instances=config.max_instances,
        min_box_size=config.min_box_size,
    )
    kept = network.kept
    box, is_first = _assigned(network.boxes[kept], network.image[kept], config)
    return AnchorReport(
        images=network.sample.num_images,
        boxes=network.num_true,
        unassigned=len(np.delete(kept, box)),
        lost=len(np.setdiff1d(box, box[is_first])),
        too_small=int(network.too_small.sum()),
        over_limit=int(network.over_limit.sum()),
    )


def _assigned(boxes: np.ndarray, image: np.ndarray, config: YOLOv4Config) -> tuple[np.ndarray, np.ndarray]:
    """Every box once for each prediction that it trains, and whether it is the first box there.

    Args:
        boxes: float32 (K, 4), ltrb normalised to the network input.
        image: int (K,), ascending.
        config: anchors, heads and image_size.

    Returns:
        int (T,), the boxes; bool (T,).
    """
    found = [(np.zeros(0, np.int64), np.zeros(0, bool))]
    for begin in range(0, int(image.max(initial=-1)) + 1, BATCH):
        start, end = np.searchsorted(image, [begin, begin + BATCH])
        ragged = tf.RaggedTensor.from_value_rowids(boxes[start:end], image[start:end] - begin, nrows=BATCH)
        padded, is_box = ragged.to_tensor(), tf.sequence_mask(ragged.row_lengths())
        classes = tf.where(is_box, 0, -1)  # boxes of all classes meet alike
        for head, stride in enumerate(config.strides):
            grid_size = config.image_size[0] // stride, config.image_size[1] // stride
            assignment = assign_targets(padded, classes, config, head, grid_size=grid_size, num_classes=1)
            assigned, is_first = (
                tf.boolean_mask(values, is_box).numpy()  # (boxes of the batch, anchors of the head)
                for values in (assignment.assigned, assignment.owner)
            )
            found.append((start + np.nonzero(assigned)[0], is_first[assigned]))
    box, is_first = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return box, is_first
