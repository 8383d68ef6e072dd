"""Draws what a trained EfficientDet finds in images.

    python efficientdet/infer.py --weights=runs/demo-efficientdet --images='photos/*.jpg' --output_dir=found

Writes one picture per image and detections.json (original pixels, original category ids). With --annotations
the truth is drawn beside the detections.
"""

import collections
import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import PIL.Image
from absl import flags

from common import boxes as box_ops
from common import coco_metrics, devices, drawing, errors
from common import flags as shared_flags
from common.annotations import Annotations, load_coco
from common.labels import LabelMap
from common.run_directory import make_output_directory
from common.sources import ImageListSource, list_images
from efficientdet.loaders import make_loader, refuse_synthetic
from efficientdet.predict import load_trained, make_detect, predict

SHEET = "contact_sheet"
SHEET_PICTURES = 6


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "weights", None, "A weights file or a run directory (its best weights).", flag_values=fv
    )
    flags.DEFINE_string("images", None, "An image, a directory of images, or a glob.", flag_values=fv)
    flags.DEFINE_string("annotations", None, "COCO json: draw its boxes beside ours.", flag_values=fv)
    flags.DEFINE_string("output_dir", None, "Where pictures and detections.json go.", flag_values=fv)
    flags.DEFINE_float(
        "score_threshold",
        0.3,
        "Least score of a detection.",
        lower_bound=0.0,
        upper_bound=1.0,
        flag_values=fv,
    )
    flags.DEFINE_string("image_size", None, "N or HxW in pixels. Default: the trained size.", flag_values=fv)
    shared_flags.define_hparams_flag(fv)
    shared_flags.define_loader_flags(fv)


def infer(
    *,
    weights: str | None,
    images: str | None,
    annotations: str | None = None,
    output_dir: str | None = None,
    score_threshold: float = 0.3,
    image_size: str | None = None,
    hparams: str | None = None,
    pipeline_type: str = "auto",
    batch_size: int = 8,
    num_threads: int = 2,
    prefetch: int = 2,
) -> list[dict]:
    """Detects, draws and writes; see the flags of the same names. Returns the detections (COCO results)."""
    if not images:
        raise errors.UserError("--images is missing: name an image, a directory or a glob")
    if not output_dir:
        raise errors.UserError("--output_dir is missing: name a directory for the pictures")
    devices.share_gpu_memory()
    refuse_synthetic(pipeline_type)
    files = list_images(images)
    model, config, categories, _ = load_trained(weights, image_size, hparams)
    truth = load_coco(annotations, None) if annotations else None
    names = _names(files)
    truth_rows = _truth_rows(names, truth)
    directory = make_output_directory(output_dir)
    if any(file.resolve().parent == directory.resolve() for file in files):
        raise errors.UserError(f"--output_dir={output_dir} holds the images: pictures would replace them")
    source = ImageListSource(files)
    loader = make_loader(
        pipeline_type,
        source=source,
        config=config,
        batch_size=batch_size,
        training=False,
        num_threads=num_threads,
        prefetch=prefetch,
        with_targets=False,
    )
    found = predict(make_detect(model, config), loader, source, categories, title="detecting")
    by_image: list[list[dict]] = [[] for _ in files]
    for result in found:
        if result["score"] >= score_threshold:
            by_image[result["image_id"]].append(result)

    sheet = []
    for file, name, results, row in zip(files, _picture_names(names), by_image, truth_rows, strict=True):
        picture = _draw(file, results, categories, truth, row)
        drawing.save_png(picture, directory / f"{name}.png")
        if len(sheet) < SHEET_PICTURES:
            sheet.append(picture)
    drawing.save_png(drawing.contact_sheet(sheet, columns=2), directory / f"{SHEET}.png")
    # ids as in the annotations, or positions in the sorted list of files
    image_ids = [i if row is None else int(truth.image_ids[row]) for i, row in enumerate(truth_rows)]
    results = [
        result | {"image_id": image_id, "file_name": name}
        for name, image_id, results in zip(names, image_ids, by_image, strict=True)
        for result in results
    ]
    coco_metrics.write_detections(results, directory / "detections.json")
    print(
        f"{len(results)} detections in {len(files)} images: pictures and detections.json are in {directory}"
    )
    return results


def _names(files: list[pathlib.Path]) -> list[str]:
    """The files' paths below the directory that they have in common."""
    base = os.path.commonpath([file.parent for file in files])
    return [os.path.relpath(file, base) for file in files]


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
    ltwh_px = np.array([result["bbox"] for result in found], np.float32).reshape(-1, 4)
    classes = [label_map.class_of(result["category_id"]) for result in found]
    ours = drawing.draw_boxes(
        image, box_ops.ltwh_to_ltrb(ltwh_px), classes, label_map.names, [result["score"] for result in found]
    )
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


def _truth_rows(names: list[str], truth: Annotations | None) -> list[int | None]:
    """Which image of the annotations each file is: by its path below the common directory, or by its name."""
    if truth is None:
        return [None] * len(names)
    row_of = {name: row for row, name in enumerate(truth.file_names)}
    rows = [row_of.get(name, row_of.get(os.path.basename(name))) for name in names]
    missing = [name for name, row in zip(names, rows, strict=True) if row is None]
    if missing:
        raise errors.UserError(f"--annotations knows no image {missing[0]!r} ({len(missing)} such files)")
    return rows


def main() -> None:
    infer(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
