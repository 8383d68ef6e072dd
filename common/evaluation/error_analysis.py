"""Counts a detector's errors by kind, after TIDE (arXiv 2008.08115). `eval.py --errors` runs this module.

As in COCO at IoU 0.5, the 100 detections with the highest scores in each image and class are matched to boxes
of their class. The highest score comes first. An unmatched detection in a crowd of its class is ignored.
Each remaining detection gets the first kind of this list whose rule holds:

    correct          matched to a box
    localisation     IoU of 0.1 to 0.5 with the box of its class that it overlaps most
    classification   IoU of 0.5 or more with the box of another class that it overlaps most
    duplicate        IoU of 0.5 or more with a box of its class that a higher-scored detection is matched to
    background       IoU below 0.1 with every box
    both             IoU of 0.1 to 0.5 with a box of another class

Each error of localisation or classification belongs to the box in its rule. An unmatched box gets the kind of
the error with the highest score that belongs to the box. An unmatched box without errors is missed.

Detections below a score threshold do not count. The default is the threshold with the highest F1 over all
classes. dAP50 is the gain in AP50 if all errors of one kind are corrected. It uses detections of all scores.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import ImageColor
from pycocotools import mask

from common.data.annotations import MAX_DETECTIONS, Annotations
from common.data.sources import Source
from common.evaluation import coco_metrics, curves, drawing, sheets
from common.progress import counted

FOREGROUND, BACKGROUND_BELOW = 0.5, 0.1  # IoU thresholds; TIDE's t_f and t_b
MATRIX_CLASSES = 80  # classes with most errors in the picture
MATRIX_PERCENT = 12  # rows up to which the cells also have their percentages
NAME_LENGTH = 20  # characters of a class name in the picture
WORST = 8
MATRIX_PICTURE, ERRORS_PICTURE = "confusion_matrix.png", "errors.png"

IGNORED, CORRECT, CLASSIFICATION, LOCALISATION, BOTH, DUPLICATE, BACKGROUND, MISSED = range(-1, 7)
KINDS = {  # kinds from CORRECT on -> meaning, colour of Paul Tol's schemes (personal.sron.nl/~pault)
    "correct": ("", "#228833"),
    "classification": ("good box, wrong class", "#4477aa"),
    "localisation": ("right class, poor box", "#ccbb44"),
    "both": ("wrong class and poor box", "#aa3377"),
    "duplicate": ("another detection of a found object", "#66ccee"),
    "background": ("no object at the box", "#ee7733"),
    "missed": ("object not found, not even with a wrong class or a poor box", "#cc3311"),
}
# `class` is 0-based. `target` is the index of the ground-truth box that belongs to a detection. `box` has
# left, top, width and height in pixels.
_NAMES = ("image", "class", "kind", "target", "score", "box")
ROW = np.dtype({"names": _NAMES, "formats": ("i8", "i8", "i8", "i8", "f8", "4f8")})


def match(annotations: Annotations, results: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Matches detections to ground-truth boxes, and gives each detection its kind.

    Args:
        annotations: the ground truth with M boxes, including crowds.
        results: detections in COCO results format; those of unknown categories are left out.

    Returns:
        The N detections that are not ignored, sorted by image id, then by descending score; and the M
        ground-truth boxes. Both are arrays of the dtype ROW.
    """
    truth = np.zeros(annotations.num_boxes, ROW)
    truth["image"], truth["box"] = annotations.box_image, annotations.boxes_ltwh_px
    truth["class"] = annotations.label_map.classes_of(annotations.category_ids)
    truth["kind"] = np.where(annotations.is_crowd, IGNORED, MISSED)
    images = {image_id: row for row, image_id in enumerate(annotations.image_ids.tolist())}
    classes = {category_id: index for index, category_id in enumerate(annotations.label_map.category_ids)}
    rows = [
        (images[row["image_id"]], classes[row["category_id"]], BOTH, -1, row["score"], row["bbox"])
        for row in sorted(results, key=lambda row: (-row["score"], row["bbox"]))
        if row["category_id"] in classes
    ]
    detections = np.array(rows, ROW)
    detections = detections[np.argsort(detections["image"], kind="stable")]
    splits = np.searchsorted(detections["image"], np.arange(annotations.num_images + 1))
    for image, first in enumerate(annotations.row_splits[:-1]):
        image_detections = detections[splits[image] : splits[image + 1]]
        _judge(image_detections, truth[first : annotations.row_splits[image + 1]])
        image_detections["target"] += first
    detections = detections[np.argsort(annotations.image_ids[detections["image"]], kind="stable")]
    return detections[detections["kind"] != IGNORED], truth


def _judge(detections: np.ndarray, truth: np.ndarray) -> None:
    """Sets kind and target of the detections in one image."""
    is_late = np.tril(detections["class"][:, None] == detections["class"]).sum(axis=1) > MAX_DETECTIONS
    crowd = np.append(truth["kind"] == IGNORED, True)
    overlap = np.zeros((len(detections), len(crowd)))  # (D, M + 1): the last column means "no box"
    overlap[:, :-1] = np.reshape(
        mask.iou(detections["box"], truth["box"], crowd[:-1]), (len(detections), len(truth))
    )
    same = detections["class"][:, None] == np.append(truth["class"], -1)
    same_class, other_class = np.where(same & ~crowd, overlap, 0), np.where(same | crowd, 0, overlap)
    near, far = same_class.max(axis=1), other_class.max(axis=1)
    in_crowd = np.where(same & crowd, overlap, 0).max(axis=1) >= FOREGROUND
    detections["kind"] = np.select(
        [is_late | in_crowd, (near >= BACKGROUND_BELOW) & (near < FOREGROUND), far >= FOREGROUND]
        + [near >= FOREGROUND, np.maximum(near, far) < BACKGROUND_BELOW],
        [IGNORED, LOCALISATION, CLASSIFICATION, DUPLICATE, BACKGROUND],
        BOTH,
    )
    detections["target"] = np.where(
        detections["kind"] == CLASSIFICATION, other_class.argmax(axis=1), same_class.argmax(axis=1)
    )
    for row in np.flatnonzero((near >= FOREGROUND) & ~is_late):
        *_, best = np.flatnonzero(same_class[row] == same_class[row].max())  # COCO takes the last of equals
        if same_class[row, best] >= FOREGROUND:
            same_class[:, best] = 0
            detections["kind"][row], detections["target"][row] = CORRECT, best


def kinds_of_boxes(detections: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kinds of ground-truth boxes: IGNORED, CORRECT, CLASSIFICATION, LOCALISATION or MISSED.

    Args:
        detections: the detections from `match`, or some of them.
        truth: the M boxes from `match`.

    Returns:
        kinds: int (M,), the kind of each box.
        deciding: int (K,), indices of the detections from which boxes get their kinds.
    """
    order = np.lexsort((-detections["score"], detections["kind"] != CORRECT))
    order = order[np.isin(detections["kind"][order], (CORRECT, CLASSIFICATION, LOCALISATION))]
    boxes, first = np.unique(detections["target"][order], return_index=True)
    kinds = truth["kind"].copy()
    kinds[boxes] = detections["kind"][order[first]]
    return kinds, order[first]


def ap50(detections: np.ndarray, truth: np.ndarray, without: int | None = None) -> float:
    """Returns AP50 from 0 to 1, as pycocotools computes it. Errors of the kind `without` are corrected."""
    kinds, deciding = kinds_of_boxes(detections, truth)
    detections, fixed = detections.copy(), deciding[detections["kind"][deciding] == without]
    detections["class"][fixed] = truth["class"][detections["target"][fixed]]
    detections["kind"][fixed] = CORRECT
    detections = detections[np.argsort(-detections["score"], kind="stable")]
    detections = detections[detections["kind"] != without]
    aps = []
    for index in np.unique(truth["class"][kinds != IGNORED]):
        class_kinds = kinds[truth["class"] == index]
        num_boxes = np.count_nonzero(
            (class_kinds != IGNORED) & ((class_kinds != MISSED) | (without != MISSED))
        )
        correct = np.cumsum(detections["kind"][detections["class"] == index] == CORRECT)
        precision = np.maximum.accumulate((correct / np.arange(1, len(correct) + 1))[::-1])[::-1]
        places = np.searchsorted(correct / max(num_boxes, 1), np.linspace(0, 1, 101))
        aps.append(np.append(precision, 0.0)[places].mean() if num_boxes else 1.0)
    return float(np.mean(aps)) if aps else 0.0


def best_score(detections: np.ndarray, truth: np.ndarray) -> float:
    """Returns the score threshold with the highest F1; 0 without detections."""
    scores = np.sort(detections["score"])[::-1]
    counts = np.searchsorted(-scores, -scores, side="right")  # detections with this score or a higher one
    correct_scores = np.sort(detections["score"][detections["kind"] == CORRECT])[::-1]
    correct = np.searchsorted(-correct_scores, -scores, side="right")
    f1 = 2 * correct / (counts + np.count_nonzero(truth["kind"] != IGNORED))
    return float(scores[f1.argmax()]) if len(scores) else 0.0


def confusion_matrix(detections: np.ndarray, truth: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts how often boxes of each class are detected as each class.

    Correct detections and classification errors count in the row of their box's class, other detections in
    the background's row. A box without a correct detection or classification error counts in the last column.

    Returns:
        int (C + 1, C + 1): rows are ground-truth classes, columns detected classes; the background is last.
    """
    matrix = np.zeros((num_classes + 1, num_classes + 1), int)
    hits = np.isin(detections["kind"], (CORRECT, CLASSIFICATION))
    np.add.at(matrix, (truth["class"][detections["target"][hits]], detections["class"][hits]), 1)
    np.add.at(matrix[-1], detections["class"][~hits], 1)
    others = np.setdiff1d(np.flatnonzero(truth["kind"] != IGNORED), detections["target"][hits])
    np.add.at(matrix[:, -1], truth["class"][others], 1)
    return matrix


def draw_matrix(matrix: np.ndarray, names: Sequence[str], path: pathlib.Path) -> None:
    """Draws a confusion matrix, int (C + 1, C + 1): counts on the colours of their shares of the row.

    Leaves out classes without boxes and detections; draws the MATRIX_CLASSES with most errors.
    """
    sums = matrix.sum(axis=0) + matrix.sum(axis=1)
    errors = np.where(sums > 0, sums - 2 * matrix.diagonal(), -1)[:-1]
    most = np.argsort(-errors, kind="stable")[:MATRIX_CLASSES]
    shown = [*np.sort(most[errors[most] >= 0]).tolist(), len(errors)]
    matrix, labels = matrix[np.ix_(shown, shown)], [names[index][:NAME_LENGTH] for index in shown]
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    cell = 0.3 + 2 / len(shown)  # inches
    side = cell * len(shown)
    figure = Figure(figsize=(side, side))
    axes = figure.add_axes(  # fills the figure; `save_figure` adds the room for the texts
        (0, 0, 1, 1),
        xlabel="detected as\n(background: box without a match)",
        ylabel="ground truth\n(background: detection without a match)",
    )
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    beside = axes.inset_axes((1 + 0.15 / side, 0, 0.2 / side, 1))
    figure.colorbar(image, cax=beside, label="share of the row", format=PercentFormatter(1, 0))
    axes.set_xticks(range(len(shown)), labels, rotation=90)
    axes.set_yticks(range(len(shown)), labels)
    for row, column in np.argwhere(matrix):
        count, share = matrix[row, column], shares[row, column]
        text = f"{count}\n{share:.0%}" if len(shown) <= MATRIX_PERCENT else f"{count}"
        colour, size = "white" if share > 0.6 else "black", min(20 * cell, 12)
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    curves.save_figure(figure, path)


def worst_sheet(detections: np.ndarray, truth: np.ndarray, source: Source) -> np.ndarray:
    """Draws the images with most errors: the ground truth on the left, the detections on the right.

    Boxes have the colours of their kinds. Only errors have labels. Returns uint8 (H, W, 3).
    """
    wrong = detections["image"][detections["kind"] != CORRECT], truth["image"][truth["kind"] == MISSED]
    errors = np.bincount(np.concatenate(wrong), minlength=source.size)
    worst = [image for image in np.argsort(-errors, kind="stable")[:WORST].tolist() if errors[image]]
    names, tiles = source.label_map.names, []
    for image in worst:
        pixels, title = sheets.read(source, image), f"ground truth of {sheets.short_name(source, image)}"
        tile = [_panel(pixels, truth[truth["image"] == image], names, title, with_scores=False)]
        title = f"detections: {counted(errors[image], 'error')}"
        tile += [_panel(pixels, detections[detections["image"] == image], names, title, with_scores=True)]
        tiles.append(tile)
    legend = sheets.legend({kind: _rgb(index) for index, kind in enumerate(KINDS)})
    return sheets.stack([legend, *([sheets.contact_sheet(tiles)] if tiles else [])])


def _panel(
    image: np.ndarray, boxes: np.ndarray, names: Sequence[str], title: str, *, with_scores: bool
) -> drawing.Panel:
    """Makes a panel of rows of the dtype ROW. Errors are drawn on top, those with the best scores last."""
    boxes = boxes[boxes["kind"] != IGNORED]
    boxes = boxes[np.lexsort((boxes["score"], boxes["kind"] != CORRECT))]
    labels = [
        "" if box["kind"] == CORRECT else names[box["class"]] + with_scores * f" {box['score']:.2f}"
        for box in boxes
    ]
    left_top, sides = np.split(boxes["box"], 2, axis=1)
    boxes_px = np.hstack([left_top, left_top + sides])
    return drawing.Panel(image, boxes_px, labels, [_rgb(kind) for kind in boxes["kind"]], title)


def _rgb(kind: int) -> tuple[int, ...]:
    """Returns the colour of a kind from CORRECT on."""
    return ImageColor.getrgb(list(KINDS.values())[kind][1])


def report(
    source: Source, results: Sequence[dict[str, Any]], directory: pathlib.Path, min_score: float | None = None
) -> tuple[str, list[str]]:
    """Analyses detections and writes errors.json, confusion_matrix.png and errors.png.

    Args:
        min_score: detections with lower scores do not count; None: the threshold with the highest F1.

    Returns:
        The table of errors, to print, and the names of the written files; a picture that cannot be drawn only
        gives a warning.
    """
    label_map = source.label_map
    every, truth = match(source.annotations, results)
    ap = ap50(every, truth)
    gains = {name: ap50(every, truth, without=kind) - ap for kind, name in enumerate(KINDS) if kind}
    origin = "best F1" if min_score is None else "given"
    min_score = best_score(every, truth) if min_score is None else min_score
    detections = every[every["score"] >= min_score]
    truth["kind"] = kinds_of_boxes(detections, truth)[0]
    boxes = np.bincount(truth["kind"][truth["kind"] != IGNORED], minlength=len(KINDS))
    counts = np.bincount(detections["kind"], minlength=len(KINDS))
    counts[MISSED] = boxes[MISSED]
    matrix = confusion_matrix(detections, truth, label_map.num_classes)
    names = [*label_map.names, "background"]
    document: dict[str, Any] = {
        "AP50": ap,
        "dAP50": gains,
        "least_score": min_score,
        "counts": dict(zip(KINDS, counts.tolist(), strict=True)),
        "num_boxes": int(boxes.sum()),
        "confusion_matrix": {"classes": names, "counts": matrix.tolist()},
    }
    coco_metrics.write_metrics(document, directory / "errors.json")
    files = ["errors.json"]
    with drawing.warn_if_undrawable(directory / MATRIX_PICTURE):
        draw_matrix(matrix, names, directory / MATRIX_PICTURE)
        files.append(MATRIX_PICTURE)
    with drawing.warn_if_undrawable(directory / ERRORS_PICTURE):
        drawing.save_png(worst_sheet(detections, truth, source), directory / ERRORS_PICTURE)
        files.append(ERRORS_PICTURE)
    lines = [
        f"{len(detections)} detections with a score of at least {min_score:g} ({origin}), "
        f"{counts[CORRECT]} correct",
        f"{boxes.sum()} boxes, {boxes[CORRECT]} found, {boxes[CLASSIFICATION]} only with a wrong class, "
        f"{boxes[LOCALISATION]} only with a poor box, {boxes[MISSED]} missed",
        "errors           count  dAP50",
    ]
    for (name, gain), (meaning, _) in zip(gains.items(), list(KINDS.values())[1:], strict=True):
        lines.append(f"{name:16} {document['counts'][name]:5d} {100 * gain:6.1f}  {meaning}")
    return "\n".join(lines), files
