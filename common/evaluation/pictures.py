"""What infer.py leaves behind: one picture for each image, a contact sheet, and detections.json."""

import collections
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image

from common import boxes as box_ops
from common.annotations import Annotations
from common.errors import UserError
from common.evaluation import coco_metrics, drawing
from common.labels import LabelMap
from common.progress import Bar
from common.training.run_directory import writing

SHEET = "contact_sheet"
SHEET_PICTURES = 6


def relative_names(files: list[pathlib.Path]) -> list[str]:
    """The files' paths below the directory that they have in common."""
    base = os.path.commonpath([file.parent for file in files])
    return [os.path.relpath(file, base) for file in files]


def truth_rows(names: list[str], truth: Annotations | None) -> list[int | None]:
    """Which image of the annotations each file is: by its path below the common directory, or by its name.

    Raises:
        UserError: the annotations do not know one of the images.
    """
    if truth is None:
        return [None] * len(names)
    row_of = {name: row for row, name in enumerate(truth.file_names)}
    rows = [row_of.get(name, row_of.get(os.path.basename(name))) for name in names]
    missing = [name for name, row in zip(names, rows, strict=True) if row is None]
    if missing:
        raise UserError(f"--annotations knows no image {missing[0]!r} ({len(missing)} such files)")
    return rows


def check_not_over_images(directory: pathlib.Path, files: list[pathlib.Path]) -> None:
    """UserError where pictures written to `directory` would replace the images themselves."""
    if any(file.resolve().parent == directory.resolve() for file in files):
        raise UserError(f"--output_dir={directory} holds the images: pictures would replace them")


def write_pictures(
    files: list[pathlib.Path],
    found: list[dict[str, Any]],
    label_map: LabelMap,
    directory: pathlib.Path,
    *,
    image_ids: Sequence[int],
    score_threshold: float,
    truth: Annotations | None = None,
    draw: bool = True,
) -> list[dict[str, Any]]:
    """Draws every image with its detections (beside it the truth, where there is one), and writes them down.

    Args:
        files: the images.
        found: COCO results whose image_id is the position in `files`.
        label_map: of the trained classes.
        directory: where pictures and detections.json go.
        image_ids: what each image is called in detections.json.
        score_threshold: least score of a detection that is drawn and written.
        truth: annotations that know all the images.
        draw: False writes detections.json alone.

    Returns:
        The detections in COCO results format, with the `file_name` of each.
    """
    names = relative_names(files)
    by_image: list[list[dict]] = [[] for _ in files]
    for result in found:
        if result["score"] >= score_threshold:
            by_image[result["image_id"]].append(result)

    if draw:
        _write_all(files, by_image, label_map, directory, truth)
    results = [
        result | {"image_id": image_id, "file_name": name}
        for name, image_id, results in zip(names, image_ids, by_image, strict=True)
        for result in results
    ]
    with writing(directory):
        coco_metrics.write_detections(results, directory / "detections.json")
    return results


def to_draw(
    results: list[dict[str, Any]], label_map: LabelMap
) -> tuple[np.ndarray, list[int], tuple[str, ...], list[float]]:
    """What drawing.draw_boxes is told of one image's COCO results: boxes, classes, names and scores."""
    ltwh_px = np.array([result["bbox"] for result in results], np.float32).reshape(-1, 4)
    classes = [label_map.class_of(result["category_id"]) for result in results]
    return box_ops.ltwh_to_ltrb(ltwh_px), classes, label_map.names, [result["score"] for result in results]


def _write_all(
    files: list[pathlib.Path],
    by_image: list[list[dict[str, Any]]],
    label_map: LabelMap,
    directory: pathlib.Path,
    truth: Annotations | None,
) -> None:
    """A picture of each image, and a contact sheet of the first ones."""
    names = relative_names(files)
    rows = truth_rows(names, truth)
    sheet = []
    bar = Bar("drawing", len(files))
    for file, name, results, row in zip(files, _picture_names(names), by_image, rows, strict=True):
        picture = _draw(file, results, label_map, truth, row)
        with writing(directory):
            drawing.save_png(picture, directory / f"{name}.png")
        if len(sheet) < SHEET_PICTURES:
            sheet.append(picture)
        bar.step()
    with writing(directory):
        drawing.save_png(drawing.contact_sheet(sheet, columns=2), directory / f"{SHEET}.png")


def _picture_names(names: list[str]) -> list[str]:
    """a/dog.jpg -> a_dog, or a_dog.jpg where the shorter name is taken twice."""
    flat = [name.replace(os.sep, "_") for name in names]
    stems = [os.path.splitext(name)[0] for name in flat]
    count = collections.Counter([SHEET, *stems])
    return [stem if count[stem] == 1 else name for stem, name in zip(stems, flat, strict=True)]


def _draw(
    file: pathlib.Path, found: list[dict], label_map: LabelMap, truth: Annotations | None, row: int | None
) -> np.ndarray:
    """One image with its detections, beside the same image with its true boxes where there are any."""
    image = np.asarray(PIL.Image.open(file).convert("RGB"))
    ours = drawing.draw_boxes(image, *to_draw(found, label_map))
    if row is None:
        return ours
    mine = truth.box_image == row
    theirs = drawing.draw_boxes(
        image,
        box_ops.ltwh_to_ltrb(truth.boxes_ltwh_px[mine]),
        truth.label_map.classes_of(truth.category_ids[mine]),
        truth.label_map.names,
    )
    return drawing.side_by_side(theirs, ours)
