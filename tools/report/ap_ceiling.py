"""The AP of a network with perfect outputs: truth made into targets, decoded, scored by pycocotools.

1.000 when all is well. Less is lost before any training, because some true boxes have no target, or because
what comes back from the decoding is not the true box any more.
"""

import collections
from typing import Any

import numpy as np

from common.annotations import Annotations
from common.evaluation import coco_metrics
from tools.report.shown_boxes import ShownBoxes

NAMES = ("AP", "AP50", "APs", "APm", "APl")
PERFECT = 0.9995  # what is written as 1.000
MAX_PER_CLASS = 100  # detections of one class in one image that pycocotools looks at
LAST_IOU = 0.95  # of COCO's thresholds: a box that is clipped to less of itself is missed there


def score(
    annotations: Annotations, image: np.ndarray, boxes: np.ndarray, classes: np.ndarray
) -> dict[str, float]:
    """COCO's numbers of detections that all have the score 1.

    Args:
        annotations: the truth, with at least one box that is no crowd.
        image: int (D,), ascending, the image of each detection; it has a true box of the same class.
        boxes: float (D, 4), ltrb normalised to the original image.
        classes: int (D,), 0-based.

    Returns:
        NAMES -> value; coco_metrics.NO_TRUTH where there is no box of that size.
    """
    truth = annotations.ground_truth()
    image_of = {of["id"]: of for of in truth["images"]}
    truth_of, found_of = (
        _by_category(truth["annotations"]),
        _by_category(_results(annotations, image, boxes, classes)),
    )
    values: dict[str, list[float]] = {name: [] for name in NAMES}
    # Class by class, because pycocotools looks at every class in every image, and there is hardly any class
    # in most images. All classes weigh the same, so their mean is what it says of all together.
    for category in truth["categories"]:
        mine = truth_of[category["id"]]
        if all(annotation["iscrowd"] for annotation in mine):
            continue
        shown = {annotation["image_id"]: image_of[annotation["image_id"]] for annotation in mine}
        document = {"images": list(shown.values()), "annotations": mine, "categories": [category]}
        metrics = coco_metrics.evaluate(document, found_of[category["id"]])
        for name in NAMES:
            if metrics[name] != coco_metrics.NO_TRUTH:
                values[name].append(metrics[name])
    return {name: sum(of) / len(of) if of else coco_metrics.NO_TRUTH for name, of in values.items()}


def reasons(shown: ShownBoxes, without_target: dict[str, int]) -> tuple[str, ...]:
    """What keeps the ceiling below 1, in words with counts; `without_target` says what the anchors do."""
    sample = shown.sample
    is_true = ~sample.is_crowd
    clipped, _ = sample.clipped_boxes
    sizes = sample.image_sizes[sample.box_image][:, ::-1].astype(np.float64)
    left_over = ((clipped[:, 2:] - clipped[:, :2]) * sizes).prod(axis=1)
    whole = sample.boxes_ltwh_px[:, 2:].prod(axis=1)
    cut = is_true & (left_over > 0) & (left_over < LAST_IOU * whole)
    keys = np.stack([sample.box_image, sample.category_ids], axis=1)[is_true]
    _, per_class = np.unique(keys, axis=0, return_counts=True)
    counts = {
        **without_target,
        "beyond max_instances": np.count_nonzero(shown.truncated),
        "smaller than min_box_size in the network": np.count_nonzero(shown.too_small),
        "without area in their image": sample.target_boxes.num_dropped,
        "reaching far outside their image": np.count_nonzero(cut),
        f"beyond the {MAX_PER_CLASS} of a class in an image that pycocotools looks at": np.maximum(
            per_class - MAX_PER_CLASS, 0
        ).sum(),
    }
    return tuple(f"{count:,} {what}" for what, count in counts.items() if count)


def _by_category(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Annotations or results, grouped; an empty list for a category without any."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["category_id"]].append(row)
    return groups


def _results(
    annotations: Annotations, image: np.ndarray, boxes: np.ndarray, classes: np.ndarray
) -> list[dict[str, Any]]:
    """COCO results, through the same door as those of a network: a padded batch of detections."""
    counts = np.bincount(image, minlength=annotations.num_images)
    slot = np.arange(len(image)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = annotations.num_images, int(counts.max(initial=1))
    padded_boxes, padded_classes = np.zeros((*shape, 4), np.float32), np.full(shape, -1)
    padded_boxes[image, slot], padded_classes[image, slot] = boxes, classes
    return coco_metrics.to_results(
        padded_boxes,
        np.ones(shape, np.float32),
        padded_classes,
        annotations.image_ids,
        annotations.image_sizes,
        annotations.label_map,
        set(),
    )
