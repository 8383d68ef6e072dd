"""Draws what a trained EfficientDet finds in images.

    python efficientdet/infer.py --weights=runs/demo-efficientdet --images='photos/*.jpg' --output_dir=found

Writes one picture per image and detections.json (original pixels, original category ids). With --annotations
the truth is drawn beside the detections.
"""

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
from common import coco_metrics, drawing, errors
from common import flags as shared_flags
from common.annotations import Annotations, load_coco
from common.labels import LabelMap
from common.sources import ImageListSource, list_images
from efficientdet.loaders import make_loader
from efficientdet.predict import load_trained, make_detect, predict

SHEET_PICTURES = 6  # pictures on contact_sheet.png


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "weights", None, "A weights file or a run directory (its best weights).", flag_values=fv
    )
    flags.DEFINE_string("images", None, "An image, a directory of images, or a glob.", flag_values=fv)
    flags.DEFINE_string("annotations", None, "COCO json: draw its boxes beside ours.", flag_values=fv)
    flags.DEFINE_string("output_dir", None, "Where pictures and detections.json go.", flag_values=fv)
    flags.DEFINE_float("score_threshold", 0.3, "Least score of a detection.", lower_bound=0.0, flag_values=fv)
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
    files = list_images(images)
    model, config, labels, _ = load_trained(weights, image_size, hparams)
    truth = load_coco(annotations, files[0].parent) if annotations else None
    image_ids = _image_ids(files, truth)
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
    results = predict(make_detect(model, config), loader, labels, title="detecting")
    results = [result for result in results if result["score"] >= score_threshold]

    directory = pathlib.Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    sheet, stems = [], [file.stem for file in files]
    for index, file in enumerate(files):
        found = [result for result in results if result["image_id"] == index]
        picture = _draw(file, found, labels, truth)
        name = file.stem if stems.count(file.stem) == 1 else file.name
        drawing.save_png(picture, directory / f"{name}.png")
        if len(sheet) < SHEET_PICTURES:
            sheet.append(picture)
    drawing.save_png(drawing.contact_sheet(sheet, columns=2), directory / "contact_sheet.png")
    for result in results:
        result["file_name"] = files[result["image_id"]].name
        result["image_id"] = image_ids[result["image_id"]]
    coco_metrics.write_detections(results, directory / "detections.json")
    print(
        f"{len(results)} detections in {len(files)} images: pictures and detections.json are in {directory}"
    )
    return results


def _draw(file: pathlib.Path, found: list[dict], labels: LabelMap, truth: Annotations | None) -> np.ndarray:
    """One image with its detections, beside the same image with its true boxes where there are any."""
    image = np.asarray(PIL.Image.open(file).convert("RGB"))
    ltwh_px = np.array([result["bbox"] for result in found], np.float32).reshape(-1, 4)
    classes = [labels.class_of(result["category_id"]) for result in found]
    ours = drawing.draw_boxes(
        image, box_ops.ltwh_to_ltrb(ltwh_px), classes, labels.names, [result["score"] for result in found]
    )
    if truth is None:
        return ours
    index = truth.file_names.index(file.name)
    mine = truth.box_image == index
    theirs = drawing.draw_boxes(
        image,
        box_ops.ltwh_to_ltrb(truth.boxes_ltwh_px[mine]),
        truth.label_map.classes_of(truth.category_ids[mine]),
        truth.label_map.names,
    )
    return drawing.side_by_side(theirs, ours)


def _image_ids(files: list[pathlib.Path], truth: Annotations | None) -> list[int]:
    """The ids for detections.json: those of the annotations, or positions in the sorted list of files."""
    if truth is None:
        return list(range(len(files)))
    by_name = dict(zip(truth.file_names, truth.image_ids.tolist(), strict=True))
    missing = [file.name for file in files if file.name not in by_name]
    if missing:
        raise errors.UserError(f"--annotations knows no image {missing[0]!r} ({len(missing)} in all)")
    return [by_name[file.name] for file in files]


def main() -> None:
    infer(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    errors.run(main)
