"""Detections to COCO's numbers, by pycocotools, with the doors shut through which it lets nonsense pass.

pycocotools gives AP 1.0 to boxes that are NaN, raises IndexError for an empty list, never matches the
annotation whose id is 0, and counts an image twice that is reported twice. `to_results` and `evaluate` let
none of that through.

The numbers depend on the detections alone, not on the order in which ranks or batches delivered them, and the
two files written here have the same bytes for the same detections.
"""

import contextlib
import io
import json
import math
import os
import pathlib
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common import atomic
from common.errors import UserError
from common.labels import LabelMap

# The order of COCOeval.stats (pycocotools cocoeval.py: _summarizeDets).
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
NO_TRUTH = -1.0  # pycocotools' value where no ground truth counts, say of APs without small boxes

RECALLS = np.linspace(0, 1, 101)  # where COCO reads the precision-recall curve

_BOX_DECIMALS = 2  # of a pixel
_SCORE_DECIMALS = 6
_METRIC_DECIMALS = 6
_ALL_SIZES = 0  # index into COCOeval's area ranges


def to_results(
    boxes: np.ndarray,
    scores: np.ndarray,
    classes: np.ndarray,
    image_ids: np.ndarray,
    image_sizes: np.ndarray,
    label_map: LabelMap,
    seen: set[int],
) -> list[dict[str, Any]]:
    """One batch of detections -> COCO results: original category ids, ltwh boxes in original pixels.

    An image whose id is in `seen` is skipped (evaluation shards are padded with repeated images), the others
    are added to it. Boxes are clipped to the image; what is left without area is dropped. Boxes are rounded
    to 0.01 pixel and scores to 6 decimals here, so that what is evaluated is exactly what is written.

    Args:
        boxes: (B, D, 4) float, ltrb normalised to the original image.
        scores: (B, D) float.
        classes: (B, D) int, 0-based; -1 is padding. Classes beyond the label map (rows that a larger
            `--num_classes` added, of no category) are left out.
        image_ids: (B,) int.
        image_sizes: (B, 2) int, (height, width) of the original images in pixels.
        label_map: gives the category ids.
        seen: image ids that have been reported; updated.

    Raises:
        ValueError: a box or a score is NaN or infinite; the message names the image.
    """
    results = []
    for image_id, size, image_boxes, image_scores, image_classes in zip(
        image_ids.tolist(), image_sizes, boxes, scores, classes, strict=True
    ):
        if image_id in seen:
            continue
        seen.add(image_id)
        real = (image_classes >= 0) & (image_classes < label_map.num_classes)
        detected = np.asarray(image_boxes[real], np.float64)
        if not (np.isfinite(detected).all() and np.isfinite(image_scores[real]).all()):
            raise ValueError(f"image {image_id}: a detection has a box or a score that is not finite")
        height, width = (int(side) for side in size)
        left, top, right, bottom = (np.clip(detected, 0, 1) * [width, height, width, height]).T
        boxes_ltwh_px = np.round(np.stack([left, top, right - left, bottom - top], axis=-1), _BOX_DECIMALS)
        for box, score, index in zip(
            boxes_ltwh_px.tolist(), image_scores[real].tolist(), image_classes[real].tolist(), strict=True
        ):
            if min(box[2:]) > 0:
                results.append(
                    {
                        "image_id": image_id,
                        "category_id": label_map.category_of(index),
                        "bbox": box,
                        "score": round(score, _SCORE_DECIMALS),
                    }
                )
    return results


def evaluate(ground_truth: dict[str, Any], detections: list[dict[str, Any]]) -> dict[str, Any]:
    """COCO's box metrics of `detections`, computed by pycocotools.

    Args:
        ground_truth: a COCO dict: images, annotations, categories. `iscrowd` and `area` may be missing (0,
            and width times height). It is not changed.
        detections: COCO results: image_id, category_id, bbox (ltwh, pixels), score. The list may be empty.
            Those of categories that the ground truth does not have do not count.

    Returns:
        NAMES -> float in 0..1, or NO_TRUTH where no ground truth counts; and `per_class`: class name -> AP,
        AP50, and `num_boxes`, the number of boxes that are no crowds.

    Raises:
        UserError: the ground truth holds no box at all.
        ValueError: a detection is not finite, or of an image that the ground truth does not have. The message
            names the image.
    """
    evaluation = _prepare(ground_truth, detections)
    with _quiet():
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    metrics: dict[str, Any] = dict(zip(NAMES, evaluation.stats.tolist(), strict=True))
    # (IoU thresholds, recalls, categories), -1 everywhere for a category without ground truth
    precision = evaluation.eval["precision"][:, :, :, _ALL_SIZES, -1]
    metrics["per_class"] = {
        category["name"]: {
            "AP": float(precision[:, :, k].mean()),
            "AP50": float(precision[0, :, k].mean()),
            "num_boxes": _count_boxes(ground_truth, category["id"]),
        }
        for k, category in enumerate(_sorted_categories(ground_truth))
    }
    return metrics


def precision_recall(ground_truth: dict[str, Any], detections: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The curves whose area is AP50: class name -> interpolated precision (101,) at RECALLS and IoU 0.50.

    Classes without ground truth are left out. Arguments and errors are those of `evaluate`; it takes a
    fraction of its time.
    """
    evaluation = _prepare(ground_truth, detections)
    parameters = evaluation.params
    parameters.iouThrs = np.array([0.5])
    parameters.areaRng, parameters.areaRngLbl = parameters.areaRng[:1], parameters.areaRngLbl[:1]
    parameters.maxDets = parameters.maxDets[-1:]
    with _quiet():
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, 0]  # (recalls, categories)
    return {
        category["name"]: precision[:, k]
        for k, category in enumerate(_sorted_categories(ground_truth))
        if _count_boxes(ground_truth, category["id"])
    }


def format_table(metrics: dict[str, Any]) -> str:
    """The 12 numbers and one line a class, for people. `-` stands where there is no ground truth."""
    width = max(len(name) for name in [*metrics["per_class"], "class"])
    lines = [f"{name:5} {_percent(metrics[name])}" for name in NAMES]
    lines += ["", f"{'class':{width}}     AP   AP50   boxes"]
    for name, row in metrics["per_class"].items():
        lines.append(f"{name:{width}} {_percent(row['AP'])} {_percent(row['AP50'])} {row['num_boxes']:7d}")
    return "\n".join(lines)


def write_metrics(metrics: dict[str, Any], path: str | os.PathLike) -> None:
    """Writes `metrics` as JSON with sorted keys, numbers to 6 decimals; atomic, the same bytes every time."""
    text = json.dumps(_rounded(metrics), indent=2, sort_keys=True, allow_nan=False)
    atomic.write_bytes(path, (text + "\n").encode())


def read_metrics(path: str | os.PathLike) -> dict[str, Any] | None:
    """What `write_metrics` wrote; None where there is no such file."""
    path = pathlib.Path(path)
    return json.loads(path.read_text()) if path.exists() else None


def write_detections(detections: list[dict[str, Any]], path: str | os.PathLike) -> None:
    """Writes COCO results as JSON, one a line, ordered by image, category and falling score; atomic.

    The file does not depend on the order of the list: any number of ranks writes the same bytes.
    """
    lines = [json.dumps(d, sort_keys=True, allow_nan=False) for d in sorted(detections, key=_order)]
    atomic.write_bytes(path, ("[\n" + ",\n".join(lines) + "\n]\n").encode())


def _prepare(ground_truth: dict[str, Any], detections: list[dict[str, Any]]) -> COCOeval:
    images, categories = ground_truth["images"], ground_truth["categories"]
    _check(detections, {image["id"] for image in images})
    truth = [  # ids from 1: COCOeval takes a match with annotation 0 for none
        {
            "id": number,
            "image_id": annotation["image_id"],
            "category_id": annotation["category_id"],
            "bbox": annotation["bbox"],
            "area": annotation.get("area", annotation["bbox"][2] * annotation["bbox"][3]),
            "iscrowd": annotation.get("iscrowd", 0),
        }
        for number, annotation in enumerate(ground_truth["annotations"], start=1)
    ]
    if all(annotation["iscrowd"] for annotation in truth):
        raise UserError(
            "the evaluation data hold no box (crowds do not count): give other --eval_annotations"
        )
    found = [  # what COCO.loadRes makes of results, for an empty list too
        {**detection, "id": number, "area": detection["bbox"][2] * detection["bbox"][3], "iscrowd": 0}
        for number, detection in enumerate(sorted(detections, key=_order), start=1)
    ]
    with _quiet():
        return COCOeval(_index(images, truth, categories), _index(images, found, categories), "bbox")


def _check(detections: list[dict[str, Any]], image_ids: set[int]) -> None:
    for detection in detections:
        image_id, numbers = detection["image_id"], [*detection["bbox"], detection["score"]]
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"image {image_id}: the detection {detection} is not finite")
        if image_id not in image_ids:
            raise ValueError(f"image {image_id} has a detection but is not in the ground truth")


def _sorted_categories(ground_truth: dict[str, Any]) -> list[dict[str, Any]]:
    """COCOeval's order of categories."""
    return sorted(ground_truth["categories"], key=lambda category: category["id"])


def _count_boxes(ground_truth: dict[str, Any], category_id: int) -> int:
    return sum(
        annotation["category_id"] == category_id and not annotation.get("iscrowd", 0)
        for annotation in ground_truth["annotations"]
    )


def _order(detection: dict[str, Any]) -> tuple:
    return detection["image_id"], detection["category_id"], -detection["score"], detection["bbox"]


def _index(images: list[dict], annotations: list[dict], categories: list[dict]) -> COCO:
    coco = COCO()
    coco.dataset = {"images": images, "annotations": annotations, "categories": categories}
    coco.createIndex()
    return coco


def _quiet() -> contextlib.AbstractContextManager:
    """pycocotools reports by print."""
    return contextlib.redirect_stdout(io.StringIO())


def _percent(value: float) -> str:
    return f"{'-':>6}" if value == NO_TRUTH else f"{100 * value:6.1f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, _METRIC_DECIMALS) if isinstance(value, float) else value
