"""Computes COCO metrics from detections with pycocotools or faster-coco-eval, and checks the input of both.

pycocotools computes AP 1.0 for NaN boxes, raises IndexError for an empty list, never matches an annotation
with id 0, and counts repeated images twice. `to_results` and `score` prevent these errors. The optional
faster-coco-eval (github.com/MiXaiLL76/faster_coco_eval) has the same algorithm in C++.

Metrics and files do not depend on the order of the detections.
"""

import collections
import contextlib
import importlib.metadata
import io
import json
import os
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.data.annotations import MAX_DETECTIONS, records
from common.data.labels import LabelMap
from common.errors import UserError
from common.files import write_bytes
from common.progress import log_once

FASTER_VERSION = "1.8.0"  # tested against pycocotools

# The order of COCOeval.stats (pycocotools cocoeval.py: _summarizeDets).
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
NO_TRUTH = -1.0  # pycocotools' value of a metric without ground truth


def to_results(
    boxes: np.ndarray,
    scores: np.ndarray,
    classes: np.ndarray,
    image_ids: np.ndarray,
    image_sizes: np.ndarray,
    label_map: LabelMap,
    seen: set[int],
) -> list[dict[str, Any]]:
    """Converts a batch of detections to COCO results: original category ids, ltwh boxes in original pixels.

    Images with ids in `seen` are skipped, because shards are padded with repeated images. Boxes are clipped
    to the image, and dropped if they have no area. They are rounded to 0.01 pixel, scores to 6 decimals.

    Args:
        boxes: (B, D, 4) float, ltrb normalised to the original image.
        scores: (B, D) float.
        classes: (B, D) int, 0-based; -1 is padding. Classes that `label_map` lacks are left out.
        image_ids: (B,) int.
        image_sizes: (B, 2) int, (height, width) of the original images in pixels.
        label_map: the category id of each class.
        seen: ids of the images that were reported before; this function adds the new ids.

    Raises:
        ValueError: a box or a score is NaN or infinite; the message names the image.
    """
    first_rows = sorted(np.unique(image_ids, return_index=True)[1])
    rows = [row for row in first_rows if int(image_ids[row]) not in seen]
    image_ids, image_sizes = np.asarray(image_ids)[rows], np.asarray(image_sizes)[rows]
    seen.update(image_ids.tolist())
    boxes, scores, classes = boxes[rows], scores[rows], classes[rows]

    real = (classes >= 0) & (classes < label_map.num_classes)
    image = np.nonzero(real)[0]  # (N,): the row of each real detection's image
    boxes, scores, classes = boxes[real].astype(np.float64), scores[real].astype(np.float64), classes[real]
    finite = np.isfinite(boxes).all(axis=1) & np.isfinite(scores)
    if not finite.all():
        image_id = image_ids[image[finite.argmin()]]
        raise ValueError(f"image {image_id}: a detection has a box or a score that is not finite")
    left, top, right, bottom = (np.clip(boxes, 0, 1) * image_sizes[image][:, [1, 0, 1, 0]]).T
    boxes_ltwh_px = np.round(np.stack([left, top, right - left, bottom - top], axis=-1), 2)
    shown = (boxes_ltwh_px[:, 2:] > 0).all(axis=1)
    ids = image_ids[image[shown]], np.array(label_map.category_ids, np.int64)[classes[shown]]
    return records("image_id category_id bbox score", *ids, boxes_ltwh_px[shown], np.round(scores[shown], 6))


class Evaluation(NamedTuple):
    """Detections and their metrics.

    Attributes:
        metrics: a dict. Each of NAMES has a float in 0..1, or NO_TRUTH without ground truth. `per_class` has,
            for each class name, AP, AP50 and `num_boxes`, the number of ground-truth boxes without crowds.
        results: the detections that were evaluated.
        curves: class name -> 101 floats, the interpolated precision at IoU 0.50 for the recalls 0, 0.01 .. 1.
            Classes without ground truth are left out.
    """

    metrics: dict[str, Any]
    results: list[dict[str, Any]]
    curves: dict[str, list[float]]


def check_backend(coco_backend: str) -> None:
    """Raises UserError if --coco_backend=faster lacks the required version."""
    installed = [package.version for package in importlib.metadata.distributions(name="faster-coco-eval")]
    if coco_backend == "faster" and FASTER_VERSION not in installed:
        raise UserError(
            f"--coco_backend=faster needs faster-coco-eval {FASTER_VERSION} (installed: "
            f"{', '.join(installed) or 'none'}): run `pip install faster-coco-eval=={FASTER_VERSION}`, or "
            "leave the flag out"
        )


def score(
    ground_truth: dict[str, Any], detections: list[dict[str, Any]], coco_backend: str = "pycocotools"
) -> Evaluation:
    """Computes COCO's box metrics and the precision-recall curves of `detections`.

    Args:
        ground_truth: a COCO dict: images, annotations, categories. `iscrowd` (default: 0) and `area`
            (default: width times height) may be missing. The dict is not changed.
        detections: COCO results: image_id, category_id, bbox (ltwh, pixels), score. The list may be empty.
            Detections of categories that are not in the ground truth are ignored.

    Raises:
        UserError: the ground truth has no boxes except crowds; or the backend is not installed.
        KeyError: a detection is of an image that the ground truth does not have.
    """
    check_backend(coco_backend)
    evaluator_class = COCOeval
    if coco_backend == "faster":
        from faster_coco_eval import COCOeval_faster  # an optional package

        evaluator_class = COCOeval_faster

    annotations = ground_truth["annotations"]
    categories = sorted(ground_truth["categories"], key=lambda category: category["id"])
    image_ids = sorted(image["id"] for image in ground_truth["images"])
    num_boxes = collections.Counter(a["category_id"] for a in annotations if not a.get("iscrowd", 0))
    if not num_boxes:
        raise UserError("the evaluation data have no boxes, or only crowds: give other --eval_annotations")
    for line in _limit_lines(ground_truth, detections):
        log_once(line)
    ids = image_ids, [category["id"] for category in categories]
    with contextlib.redirect_stdout(io.StringIO()):  # both packages print their progress
        evaluator = evaluator_class(_index(annotations, *ids), _index(_sorted(detections), *ids), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    # The axes are IoU thresholds, recalls and categories. The values are for boxes of all sizes and at most
    # 100 detections per image. They are -1 for a category without ground truth.
    precision = evaluator.eval["precision"][:, :, :, 0, -1]
    metrics: dict[str, Any] = dict(zip(NAMES, map(float, evaluator.stats[:12]), strict=True))
    metrics["per_class"], curves = {}, {}
    for k, category in enumerate(categories):
        metrics["per_class"][category["name"]] = {
            "AP": float(precision[:, :, k].mean()),
            "AP50": float(precision[0, :, k].mean()),
            "num_boxes": num_boxes[category["id"]],
        }
        if num_boxes[category["id"]]:
            curves[category["name"]] = precision[0, :, k].tolist()
    return Evaluation(metrics, detections, curves)


def _limit_lines(ground_truth: dict[str, Any], detections: list[dict[str, Any]]) -> Iterator[str]:
    """Yields what the limit of 100 detections hides, without numbers that change between evaluations."""
    objects = [a for a in ground_truth["annotations"] if not a.get("iscrowd", 0)]
    of_objects, of_detections = (
        collections.Counter((row["image_id"], row["category_id"]) for row in rows)
        for rows in (objects, detections)
    )
    crowded = [pair for pair, count in of_objects.items() if count > MAX_DETECTIONS]
    limit = f"COCO's metrics count the {MAX_DETECTIONS} best detections of an image and category"
    if crowded:
        pair = max(crowded, key=of_objects.__getitem__)
        name = next(c["name"] for c in ground_truth["categories"] if c["id"] == pair[1])
        bound = f"{MAX_DETECTIONS / of_objects[pair]:.3f}"
        image = (
            f"image {pair[0]} has {of_objects[pair]} objects of {name!r}, so its recall is at most {bound}"
        )
        yield f"{limit}: {image} (image and category pairs with more objects: {len(crowded)})"
    if max(of_detections.values(), default=0) > MAX_DETECTIONS:
        yield f"{limit}: detections.json has more of them, which do not change the AP"


def format_table(metrics: dict[str, Any]) -> str:
    """Returns a text with the 12 metrics and a line per class, in percent; `-`: there is no ground truth."""
    width = max(_columns(name) for name in [*metrics["per_class"], "class"])
    lines = [f"{'':5} {'%':>6}", *(f"{name:5} {_percent(metrics[name])}" for name in NAMES)]
    lines += ["", f"{'class':{width}}   AP % AP50 %   boxes"]
    for name, row in metrics["per_class"].items():
        padded = name + " " * (width - _columns(name))
        lines.append(f"{padded} {_percent(row['AP'])} {_percent(row['AP50'])} {row['num_boxes']:7d}")
    return "\n".join(lines)


def _columns(text: str) -> int:
    """Returns the width of a text in a terminal: 2 for a CJK letter, 0 for a combining mark."""
    return sum(
        2 if unicodedata.east_asian_width(letter) in "WF" else not unicodedata.combining(letter)
        for letter in text
    )


def write_metrics(metrics: dict[str, Any], path: str | os.PathLike) -> None:
    """Writes `metrics` as JSON with sorted keys and 6 decimals."""
    exact = json.dumps(metrics, allow_nan=False)
    rounded = json.loads(exact, parse_float=lambda text: round(float(text), 6))
    write_bytes(path, (json.dumps(rounded, indent=2, sort_keys=True) + "\n").encode())


def write_detections(detections: list[dict[str, Any]], path: str | os.PathLike) -> None:
    """Writes the JSON of `encode_detections`, for https://cocodataset.org/#format-results, to a file."""
    write_bytes(path, encode_detections(detections))


def encode_detections(detections: list[dict[str, Any]]) -> bytes:
    """Encodes COCO results as JSON, one per line, sorted by image, category and descending score."""
    encoder = msgspec.json.Encoder(order="sorted", enc_hook=np.generic.item)  # hook for NumPy's numbers
    lines = encoder.encode_lines(_sorted(detections)).rstrip(b"\n")
    return b"[\n" + lines.replace(b"\n", b",\n") + b"\n]\n"  # JSON values have no line feeds


def _sorted(detections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(detections, key=lambda d: (d["image_id"], d["category_id"], -d["score"], d["bbox"]))


def _index(rows: list[dict[str, Any]], image_ids: list[int], category_ids: list[int]) -> COCO:
    """Builds a pycocotools index of the annotations or detections whose categories are known.

    Ids are renumbered from 1: COCOeval treats a match with annotation 0 as no match.
    """
    images = {image_id: number for number, image_id in enumerate(image_ids, start=1)}
    categories = {category_id: number for number, category_id in enumerate(category_ids, start=1)}
    known = [row for row in rows if row["category_id"] in categories]
    annotations = [
        {"area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0, "score": 0.0, **row}
        | {"id": number, "image_id": images[row["image_id"]], "category_id": categories[row["category_id"]]}
        for number, row in enumerate(known, start=1)
    ]
    coco = COCO()
    coco.dataset = {
        "images": [{"id": number} for number in images.values()],
        "annotations": annotations,
        "categories": [{"id": number} for number in categories.values()],
    }
    coco.createIndex()
    return coco


def _percent(value: float) -> str:
    return f"{'-':>6}" if value == NO_TRUTH else f"{100 * value:6.1f}"
