"""What infer.py detects in, images or a video, and what it writes about them.

job = open_job(args, load_annotations)      rejects invalid flags, before any model is built
found = predict(detect, make_loader(job.pipeline_type, source=job.source, ...), ...)
results = job.write(found, label_map)
"""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from common import boxes as box_ops
from common.annotations import Annotations
from common.errors import UserError
from common.evaluation import coco_metrics, drawing, submission, video
from common.evaluation.args import InferArgs
from common.files import make_output_directory, writing
from common.labels import LabelMap
from common.loader import refuse_synthetic
from common.progress import Bar
from common.sources import ImageListSource

SHEET = "contact_sheet"
SHEET_PICTURES = 6

OpenImages = Callable[[str], ImageListSource]  # --images -> opened and checked
LoadAnnotations = Callable[[str], Annotations]  # a COCO json, without its images


def open_job(
    a: InferArgs, open_images: OpenImages, load_annotations: LoadAnnotations
) -> "PicturesJob | video.VideoJob":
    """The job that the flags of infer.py describe.

    Args:
        a: the flags.
        open_images: opens and checks the images that --images names.
        load_annotations: reads a COCO json without its images.

    Raises:
        UserError: flags missing, or that do not go together; files that cannot be used.
    """
    if not a.images:
        raise UserError("--images is missing: name an image, a directory, a glob or a video")
    if not a.output_dir:
        raise UserError("--output_dir is missing: name a directory for the pictures")
    refuse_synthetic(a.pipeline_type)
    if a.annotations and a.image_info:
        raise UserError("--annotations and --image_info both give the ids of the images: give one of them")
    if not video.is_video(a.images):
        return PicturesJob(a, open_images(a.images), load_annotations)
    for name in ("annotations", "image_info", "submission"):
        if getattr(a, name):
            raise UserError(f"--{name} is for images, and --images={a.images} is a video")
    if a.pipeline_type not in ("auto", "tensorflow"):
        raise UserError(f"--pipeline_type={a.pipeline_type} reads no videos: leave it out")
    if a.draw:
        check_not_over_images(a.output_dir, [pathlib.Path(a.images)])
    source = video.open_video(a.images)
    return video.VideoJob(source, make_output_directory(a.output_dir), a.score_threshold, a.draw)


class _Image(NamedTuple):
    """One image.

    Attributes:
        file: its path.
        name: the path below the directory that all images have in common.
        image_id: in detections.json and the submission.
        row: in the annotations; None without annotations.
    """

    file: pathlib.Path
    name: str
    image_id: int
    row: int | None


class PicturesJob:
    """Images: a picture of each, a contact sheet, detections.json, and a submission file on demand.

    Attributes:
        source: what the loader reads.
        pipeline_type: --pipeline_type, or the only one that can load this kind of source.
        least_score: of the detections that `write` needs.
    """

    def __init__(self, a: InferArgs, source: ImageListSource, load_annotations: LoadAnnotations) -> None:
        self.pipeline_type = a.pipeline_type
        self._a = a
        self._truth = load_annotations(a.annotations) if a.annotations else None
        self._info = submission.read_image_info(a.image_info) if a.image_info else None
        self._images = self._with_ids([pathlib.Path(file) for file in source.files])
        self.source = dataclasses.replace(source, files=tuple(image.file for image in self._images))
        self.least_score = 0.0 if a.submission else a.score_threshold
        if a.draw:
            check_not_over_images(a.output_dir, [image.file for image in self._images])
        self._directory = make_output_directory(a.output_dir)  # before a submission that goes into it
        others = [self._directory / "detections.json", *filter(None, (a.annotations, a.image_info))]
        self._submission = submission.check_path(a.submission, others) if a.submission else None

    def _with_ids(self, files: list[pathlib.Path]) -> list[_Image]:
        """The images, without those that --image_info does not list."""
        base = os.path.commonpath([file.parent for file in files])
        names = [os.path.relpath(file, base) for file in files]
        rows: list[int | None] = [None] * len(files)
        image_ids: list[int | None] = list(range(len(files)))
        if self._truth:
            rows = look_up(names, {name: row for row, name in enumerate(self._truth.file_names)})
            missing = [name for name, row in zip(names, rows, strict=True) if row is None]
            if missing:
                raise UserError(f"--annotations knows no image {missing[0]!r} ({len(missing)} such files)")
            image_ids = [int(self._truth.image_ids[row]) for row in rows]
        elif self._info:
            image_ids = look_up(names, self._info.image_ids)
            submission.check_listed(names, image_ids, self._info, self._a.image_info)
        elif self._a.submission:
            image_ids = submission.ids_by_name(names)
        images = zip(files, names, image_ids, rows, strict=True)
        return [_Image(*image) for image in images if image[2] is not None]

    def check_labels(self, label_map: LabelMap) -> None:
        """Raises UserError where the trained classes are not those of the given files."""
        if self._info:
            submission.check_categories(
                self._info.categories, label_map, f"--image_info={self._a.image_info}"
            )
        if self._truth and self._submission:
            submission.check_categories(
                self._truth.label_map, label_map, f"--annotations={self._a.annotations}"
            )

    def write(self, found: list[dict[str, Any]], label_map: LabelMap) -> list[dict[str, Any]]:
        """Writes all files, prints which, returns the content of detections.json."""
        if self._submission:
            count = submission.write(self._submission, found, [image.image_id for image in self._images])
            print(f"{self._submission}: {count} detections in {len(self._images)} images")
        by_image: list[list[dict[str, Any]]] = [[] for _ in self._images]
        for result in found:
            if result["score"] >= self._a.score_threshold:
                by_image[result["image_id"]].append(result)
        results = [
            result | {"image_id": image.image_id, "file_name": image.name}
            for image, of_image in zip(self._images, by_image, strict=True)
            for result in of_image
        ]
        with writing(self._directory):
            if self._a.draw:
                self._draw_all(by_image, label_map)
            coco_metrics.write_detections(results, self._directory / "detections.json")
        what = "pictures and detections.json are" if self._a.draw else "detections.json is"
        print(f"{len(results)} detections in {len(self._images)} images: {what} in {self._directory}")
        return results

    def _draw_all(self, by_image: list[list[dict[str, Any]]], label_map: LabelMap) -> None:
        """A picture of each image, and a contact sheet of the first ones."""
        names = _picture_names([image.name for image in self._images])
        bar = Bar("drawing", len(names))
        sheet = []
        for image, name, results in zip(self._images, names, by_image, strict=True):
            picture = self._draw(image, results, label_map)
            drawing.save_png(picture, self._directory / f"{name}.png")
            if len(sheet) < SHEET_PICTURES:
                sheet.append(picture)
            bar.step()
        drawing.save_png(drawing.contact_sheet(sheet, columns=2), self._directory / f"{SHEET}.png")

    def _draw(self, image: _Image, results: list[dict[str, Any]], label_map: LabelMap) -> np.ndarray:
        """One image with its detections, to the right of its ground truth where there is any."""
        pixels = np.asarray(PIL.Image.open(image.file).convert("RGB"))
        detections = drawing.draw_results(pixels, results, label_map)
        truth = self._truth
        if truth is None:
            return detections
        rows = truth.box_image == image.row
        ground_truth = drawing.draw_boxes(
            pixels,
            box_ops.ltwh_to_ltrb(truth.boxes_ltwh_px[rows]),
            truth.label_map.classes_of(truth.category_ids[rows]),
            truth.label_map.names,
        )
        return drawing.side_by_side(ground_truth, detections)


def look_up(names: list[str], known: Mapping[str, int]) -> list[int | None]:
    """The values of files, by their path below their common directory, else by name; None if unknown."""
    return [known.get(name, known.get(os.path.basename(name))) for name in names]


def check_not_over_images(directory: str, files: list[pathlib.Path]) -> None:
    """Raises UserError where pictures written to `directory` would replace the images themselves."""
    if any(file.resolve().parent == pathlib.Path(directory).resolve() for file in files):
        raise UserError(f"--output_dir={directory} holds the images: pictures would replace them")


def _picture_names(names: list[str]) -> list[str]:
    """a/dog.jpg -> a_dog, or a_dog.jpg where the shorter name is taken twice."""
    flat = [name.replace(os.sep, "_") for name in names]
    stems = [os.path.splitext(name)[0] for name in flat]
    count = collections.Counter([SHEET, *stems])
    return [stem if count[stem] == 1 else name for stem, name in zip(stems, flat, strict=True)]
