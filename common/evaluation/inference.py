"""What infer.py of both apps does around the detector: opens what --images names, writes what was found.

job = open_job("clip.mp4", output_dir="found", ...)     complains here, before any model is built
found = predict(job.only_wanted(detect), make_loader(job.pipeline_type, source=job.source, ...), ...)
results = job.write(found, label_map)
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from common.datacheck.coco import load_coco
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import open_images
from common.errors import UserError
from common.evaluation import coco_metrics, pictures, submission, video
from common.evaluation.drawing import draw_boxes
from common.evaluation.evaluate import Detect
from common.files import write_file
from common.labels import LabelMap
from common.loading import refuse_synthetic
from common.progress import Bar, log
from common.sources import ImageListSource, Source
from common.training.run_directory import make_output_directory, writing


class Job(Protocol):
    """Images or a video, and what becomes of the detections.

    Attributes:
        source: what the loader reads.
        pipeline_type: who can load it: --pipeline_type, or its default for this kind of source.
    """

    source: Source
    pipeline_type: str

    def check_labels(self, label_map: LabelMap) -> None:
        """UserError where the trained classes cannot be what is asked for."""
        ...

    def only_wanted(self, detect: Detect) -> Detect:
        """The detector without the detections that nobody asked for."""
        ...

    def write(self, found: list[dict[str, Any]], label_map: LabelMap) -> list[dict[str, Any]]:
        """Writes all files, says on stdout which, returns what is in detections.json."""
        ...


def open_job(
    images: str | None,
    *,
    output_dir: str | None,
    annotations: str | None,
    image_info: str | None,
    submission_file: str | None,
    score_threshold: float,
    draw: bool,
    pipeline_type: str,
    policy: ImagePolicy,
) -> Job:
    """The job that the flags of the same names describe.

    Raises:
        UserError: flags missing, or that do not go together; files that cannot be used.
    """
    if not images:
        raise UserError("--images is missing: name an image, a directory, a glob or a video")
    if not output_dir:
        raise UserError("--output_dir is missing: name a directory for the pictures")
    refuse_synthetic(pipeline_type)
    if not video.is_video(images):
        return PicturesJob(
            images,
            output_dir=output_dir,
            annotations=annotations,
            image_info=image_info,
            submission_file=submission_file,
            score_threshold=score_threshold,
            draw=draw,
            pipeline_type=pipeline_type,
            policy=policy,
        )
    for_images = {"annotations": annotations, "image_info": image_info, "submission": submission_file}
    given = [name for name, value in for_images.items() if value]
    if given:
        raise UserError(f"--{given[0]} is for images, and --images={images} is a video")
    if pipeline_type not in ("auto", "tensorflow"):
        raise UserError(f"--pipeline_type={pipeline_type} reads no videos: leave it out")
    return VideoJob(images, output_dir=output_dir, score_threshold=score_threshold, draw=draw)


class PicturesJob:
    """Images: a picture of each, a contact sheet, detections.json, and a submission file on demand."""

    def __init__(
        self,
        images: str,
        *,
        output_dir: str,
        annotations: str | None,
        image_info: str | None,
        submission_file: str | None,
        score_threshold: float,
        draw: bool,
        pipeline_type: str,
        policy: ImagePolicy,
    ) -> None:
        if annotations and image_info:
            raise UserError("--annotations and --image_info both say which image has which id: give one")
        self.pipeline_type = pipeline_type
        self._truth = load_coco(annotations, None) if annotations else None
        self._info = submission.read_image_info(image_info) if image_info else None
        self._truth_path, self._info_path = annotations, image_info
        self.source = open_images(images, policy)
        files = [pathlib.Path(file) for file in self.source.files]
        names = pictures.relative_names(files)
        self._image_ids: Sequence[int] = range(len(names))
        if self._truth:
            rows = pictures.truth_rows(names, self._truth)
            self._image_ids = [int(self._truth.image_ids[row]) for row in rows]
        elif self._info:
            found = submission.rows_in_info(names, self._info, image_info)
            self._image_ids = list(found.values())
            files = [files[row] for row in found]
            self.source = ImageListSource(tuple(files))
        elif submission_file:
            self._image_ids = submission.ids_by_name(names)
        self._files = files
        self._score_threshold, self._draw = score_threshold, draw
        if draw:
            pictures.check_not_over_images(pathlib.Path(output_dir), self._files)
        self._directory = make_output_directory(output_dir)  # before a submission that goes into it
        others = [self._directory / "detections.json", *filter(None, (annotations, image_info))]
        self._submission = submission.check_path(submission_file, others) if submission_file else None

    def check_labels(self, label_map: LabelMap) -> None:
        if self._info:
            submission.check_categories(self._info.categories, label_map, f"--image_info={self._info_path}")
        if self._truth and self._submission:
            origin = f"--annotations={self._truth_path}"
            submission.check_categories(self._truth.label_map, label_map, origin)

    def only_wanted(self, detect: Detect) -> Detect:
        return detect if self._submission else only_above(detect, self._score_threshold)

    def write(self, found: list[dict[str, Any]], label_map: LabelMap) -> list[dict[str, Any]]:
        if self._submission:
            count = submission.write(self._submission, found, self._image_ids)
            print(f"{self._submission}: {count} detections in {len(self._files)} images")
        results = pictures.write_pictures(
            self._files,
            found,
            label_map,
            self._directory,
            image_ids=self._image_ids,
            score_threshold=self._score_threshold,
            truth=self._truth,
            draw=self._draw,
        )
        what = "pictures and detections.json are" if self._draw else "detections.json is"
        print(f"{len(results)} detections in {len(self._files)} images: {what} in {self._directory}")
        return results


class VideoJob:
    """A video: the same video with boxes, and detections.json with the number and time of the frame."""

    pipeline_type = "tensorflow"

    def __init__(self, path: str, *, output_dir: str, score_threshold: float, draw: bool) -> None:
        if draw:
            pictures.check_not_over_images(pathlib.Path(output_dir), [pathlib.Path(path)])
        self.source = video.open_video(path)
        if self.source.promised > self.source.num_frames:
            log(
                f"warning: only {self.source.num_frames} of the {self.source.promised} frames of {path} can "
                "be decoded"
            )
        self._score_threshold, self._draw = score_threshold, draw
        self._directory = make_output_directory(output_dir)

    def check_labels(self, label_map: LabelMap) -> None:
        """Nothing is asked of them."""

    def only_wanted(self, detect: Detect) -> Detect:
        return only_above(detect, self._score_threshold)

    def write(self, found: list[dict[str, Any]], label_map: LabelMap) -> list[dict[str, Any]]:
        name = os.path.basename(self.source.path)
        results = [
            result
            | {
                "frame": result["image_id"],
                "seconds": round(result["image_id"] / self.source.frame_rate, 3),
                "file_name": name,
            }
            for result in found
            if result["score"] >= self._score_threshold
        ]
        with writing(self._directory):
            coco_metrics.write_detections(results, self._directory / "detections.json")
        what = "detections.json is"
        if self._draw:
            target = self._directory / f"{os.path.splitext(name)[0]}.mp4"
            self._write_video(target, results, label_map)
            what = f"{target.name} and detections.json are"
        print(f"{len(results)} detections in {self.source.size} frames: {what} in {self._directory}")
        return results

    def _write_video(self, path: pathlib.Path, results: list[dict[str, Any]], label_map: LabelMap) -> None:
        by_frame: list[list[dict[str, Any]]] = [[] for _ in range(self.source.size)]
        for result in results:
            by_frame[result["frame"]].append(result)

        def write(temporary: pathlib.Path) -> None:
            writer = video.VideoWriter(temporary, self.source)
            bar = Bar("drawing", self.source.size)
            try:
                for frame, of_frame in zip(self.source.frames(), by_frame, strict=True):
                    writer.add(draw_boxes(frame, *pictures.to_draw(of_frame, label_map)))
                    bar.step()
            finally:
                writer.close()

        with writing(path.parent):
            write_file(path, write)


def only_above(detect: Detect, least_score: float) -> Detect:
    """`detect` with its lower scores turned to padding, which evaluation.predict drops early.

    No suppression changes: a box is only ever suppressed by one of a higher score.
    """

    def wanted(images: tf.Tensor, letterbox: tf.Tensor) -> tuple[Any, ...]:
        boxes, scores, classes, finite = (np.asarray(part) for part in detect(images, letterbox))
        return boxes, scores, np.where(scores >= np.float32(least_score), classes, -1), finite

    return wanted
