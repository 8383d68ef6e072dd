"""The inputs and outputs of infer.py: images or a video, image ids, detections.json and pictures."""

import collections
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from common.args import VIDEO_SUFFIXES, ImagePolicy, InferArgs
from common.data.annotations import IMAGE_INFO, records
from common.data.coco import load_coco
from common.data.labels import LabelMap
from common.data.open import log_issues, open_images
from common.data.sources import ImageListSource, Source
from common.errors import UserError
from common.evaluation import coco_metrics, drawing, sheets, video
from common.evaluation.drawing import Panel
from common.files import make_output_directory, user_errors, write_bytes, write_file
from common.layers import is_cpu_only
from common.progress import Bar, counted, log
from common.weights import model_metadata

SHEET = "contact_sheet"
MIN_PAIR_WIDTH = 640  # pixels, so that titles fit
_SHOWN_DIFFERENCES = 3
_SLOW = 30.0  # seconds of detection, after which a faster format is worth its export


class InferenceJob:
    """One run of infer.py: opens the images or the video, and writes the results.

    Attributes:
        pipeline_type: --pipeline_type, or "tensorflow" for a video.
        source: the images or the video.

    Raises:
        UserError: flags are missing or contradict each other, or files cannot be used.
    """

    def __init__(self, a: InferArgs) -> None:
        self._a = a
        path = pathlib.Path(a.images)
        self._is_video = path.suffix.lower() in VIDEO_SUFFIXES and not path.is_dir()
        self._unit = "frame" if self._is_video else "image"
        if not a.images:
            raise UserError("--images is missing: give an image, a directory, a glob or a video")
        if not a.output_dir:
            raise UserError("--output_dir is missing: give a directory for the results")
        if a.annotations and a.image_info:
            raise UserError("--annotations and --image_info both define image ids: give one of them")
        for name in ("annotations", "image_info"):
            if self._is_video and getattr(a, name):
                raise UserError(f"--{name} is for images, but --images={a.images} is a video")
        if self._is_video and a.pipeline_type not in ("auto", "tensorflow"):
            raise UserError(f"--pipeline_type={a.pipeline_type} cannot read videos: omit the flag")
        self._truth = load_coco(a.annotations) if a.annotations else None
        if self._truth:
            log_issues(f"--annotations={a.annotations}", self._truth.issues)
        self._categories: LabelMap | None = None
        self._video = video.open_video(a.images) if self._is_video else None
        self.source: Source
        if self._video:
            self.source, self.pipeline_type = self._video, "tensorflow"
            self._images = self._video.frame_facts()  # id and name or time of each image, for detections.json
        else:
            policy = ImagePolicy(a.on_bad_image, a.max_megapixels)
            self.source, self._images = self._with_ids(open_images(a.images, policy=policy))
            self.pipeline_type = a.pipeline_type
        output = pathlib.Path(a.output_dir)
        directories = {pathlib.Path(file).resolve().parent for file in self.source.files}
        if a.draw and output.resolve() in directories:
            raise UserError(f"--output_dir={output} has the input files: choose another directory")
        if a.image_info and pathlib.Path(a.image_info).resolve() == (output / IMAGE_INFO).resolve():
            raise UserError(f"--image_info={a.image_info} would be overwritten: choose another --output_dir")
        self._directory = make_output_directory(output)

    def _with_ids(self, source: ImageListSource) -> tuple[ImageListSource, list[dict[str, Any]]]:
        """Returns the images to read, and the id and name of each image.

        Images that --annotations or --image_info do not list are left out.
        """
        a = self._a
        base = os.path.commonpath([pathlib.Path(file).parent for file in source.files])
        names = [os.path.relpath(file, base) for file in source.files]
        image_ids: Sequence[int | None]
        if self._truth:
            known = dict(zip(self._truth.file_names, self._truth.image_ids.tolist(), strict=True))
            image_ids = look_up(source.files, known, f"--annotations={a.annotations}")
        elif a.image_info:
            known, self._categories = read_image_info(a.image_info)
            image_ids = look_up(source.files, known, f"--image_info={a.image_info}")
        else:
            image_ids = range(len(names))
        listed = [row for row, image_id in enumerate(image_ids) if image_id is not None]
        images: dict[Any, dict[str, Any]] = {}
        for image_id, name in ((image_ids[row], names[row]) for row in listed):
            if image_id in images:
                raise UserError(f"{images[image_id]['file_name']!r} and {name!r} both have the id {image_id}")
            images[image_id] = {"image_id": image_id, "file_name": name}
        sizes = source.annotations.image_sizes[listed].tolist()
        return ImageListSource([source.files[row] for row in listed], sizes), list(images.values())

    def check_categories(self, label_map: LabelMap) -> None:
        """Compares the categories of --annotations and --image_info with those of the weights.

        Logs up to three differences of --annotations, which concern only pictures.

        Raises:
            UserError: --image_info has a category that the weights lack or name otherwise.
        """
        if self._truth:
            differences = label_map.differences(self._truth.label_map, here="in the weights")
            for difference in differences[:_SHOWN_DIFFERENCES]:
                log(f"--annotations={self._a.annotations}: {difference}")
        if self._categories:
            for difference in self._categories.differences(label_map, here=f"in {self._a.image_info}"):
                raise UserError(f"in the weights, {difference}: give weights trained on these categories")

    def print_time(self, seconds: float, weights: pathlib.Path) -> None:
        """Prints how long detection took. If it was slow on a CPU, names an export faster than `weights`."""
        print(f"{counted(self.source.size, self._unit)} in {seconds:.1f} s, compiling included")
        if seconds > _SLOW and is_cpu_only() and not model_metadata.is_exported(weights):
            print(f"a LiteRT file (export.py --format=litert) is faster on a CPU than {weights}")

    def write(self, detections: list[dict[str, Any]], label_map: LabelMap) -> list[dict[str, Any]]:
        """Writes all files, prints their paths, and returns the content of detections.json.

        Args:
            detections: COCO results; image_id is the index of an image in the source.
        """
        results = [result | self._images[result["image_id"]] for result in detections]
        with user_errors(f"--output_dir={self._directory}"):
            coco_metrics.write_detections(results, self._directory / "detections.json")
            if self._is_video:  # a file of earlier images does not describe the frames
                (self._directory / IMAGE_INFO).unlink(missing_ok=True)
            else:
                self._write_image_info(label_map)
            if self._a.draw:
                self._save_pictures(results, label_map)
        images = counted(len(self._images), self._unit)
        print(f"{counted(len(results), 'detection')} in {images}: see {self._directory}")
        return results

    def _write_image_info(self, label_map: LabelMap) -> None:
        """Writes image_info.json: COCO's `images`, those without detections too, and `categories`."""
        ids, names = ([image[key] for image in self._images] for key in ("image_id", "file_name"))
        sizes = self.source.annotations.image_sizes.T
        images = records("id file_name height width", np.array(ids), np.array(names, object), *sizes)
        document = {"images": images, "categories": label_map.categories()}
        write_bytes(self._directory / IMAGE_INFO, msgspec.json.encode(document) + b"\n")

    def _tiles(self, results: list[dict[str, Any]], label_map: LabelMap) -> Iterator[list[Panel]]:
        """Yields a tile for each image: the ground truth, if --annotations is given, and the detections."""
        encoded = map(self.source.encoded, range(self.source.size))
        pixels = self._video.frames() if self._video else map(drawing.read_image, encoded)
        detections, boxes = sheets.by_image(results), self._boxes()
        bar = Bar("drawing", len(self._images), unit=self._unit)
        for image, facts in zip(pixels, self._images, strict=True):
            image_id, name = facts["image_id"], os.path.basename(facts["file_name"])
            title = "detections" if self._truth else name
            tile = [sheets.results_panel(image, detections[image_id], label_map, title)]
            if self._truth:
                title = f"ground truth of {name}"
                tile.insert(0, sheets.results_panel(image, boxes[image_id], self._truth.label_map, title))
            yield tile
            bar.step()

    def _boxes(self) -> Mapping[int, list[Mapping[str, Any]]]:
        return sheets.by_image(self._truth.ground_truth()["annotations"] if self._truth else ())

    def _save_pictures(self, results: list[dict[str, Any]], label_map: LabelMap) -> None:
        """Writes the video. For images, writes each image, and a contact sheet of varied images."""
        tiles = self._tiles(results, label_map)
        if source := self._video:
            target = self._directory / f"{pathlib.Path(self._a.images).stem}{video.suffix_for(source)}"
            frames = (drawing.draw(tile[0]) for tile in tiles)
            write_file(target, lambda temporary: video.write_video(temporary, source, frames))
            return
        objects = self._boxes() if self._truth else sheets.by_image(results)
        image_classes = [[row["category_id"] for row in objects[facts["image_id"]]] for facts in self._images]
        chosen = sheets.varied(image_classes)
        sheet = {}
        for number, (name, tile) in enumerate(zip(_picture_names(self._images), tiles, strict=True)):
            picture = drawing.draw(tile[0])
            if self._truth:
                width = max(2 * picture.shape[1] + sheets.GAP, MIN_PAIR_WIDTH)
                picture = sheets.draw_row([tile], width)
            drawing.save_png(picture, self._directory / f"{name}.png")
            if number in chosen:
                sheet[number] = tile
        picture = sheets.contact_sheet([sheet[number] for number in chosen])
        drawing.save_png(picture, self._directory / f"{SHEET}.png")


class _Image(msgspec.Struct):
    id: int
    file_name: str


class _ImageInfo(msgspec.Struct):
    images: list[_Image]
    categories: list[dict[str, Any]] = []


def read_image_info(path: str | os.PathLike) -> tuple[dict[str, int], LabelMap | None]:
    """Reads a json with COCO's `images`, such as image_info_test-dev2017.json.

    Returns:
        A dict of file name -> image id, and the categories. The categories are None if the file has none.

    Raises:
        UserError: the file is missing or has no `images`.
    """
    try:
        document = msgspec.json.decode(pathlib.Path(path).read_text("utf-8-sig"), type=_ImageInfo)
        categories = LabelMap.from_categories(document.categories) if document.categories else None
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"--image_info={path} is not a json with COCO's images: {error}") from error
    return {image.file_name: image.id for image in document.images}, categories


def look_up(files: Sequence[str], known: Mapping[str, int], origin: str) -> list[int | None]:
    """Returns the image id of each file, or None for a file that is not in `known`.

    A file has the id of the longest end of its path that is in `known`: data/a/1.jpg may be a/1.jpg or 1.jpg.

    Raises:
        UserError: none of the files is in `known`.
    """
    parts = [os.path.abspath(file).split(os.sep) for file in files]
    suffixes = [["/".join(of_one[start:]) for start in range(len(of_one))] for of_one in parts]
    image_ids = [next((known[end] for end in of_one if end in known), None) for of_one in suffixes]
    if (left_out := image_ids.count(None)) == len(files):
        raise UserError(f"{origin} lists none of the files in --images ({files[0]!r}, ...): check both flags")
    log(f"{origin} lists {len(files) - left_out} of {len(files)} files in --images; {left_out} are skipped")
    return image_ids


def _picture_names(images: list[dict[str, Any]]) -> list[str]:
    """Names the output images: a_dog for a/dog.jpg. Equal names keep their extension, or get a number too."""
    flat = [image["file_name"].replace(os.sep, "_") for image in images]
    stems = [os.path.splitext(name)[0] for name in flat]
    count = collections.Counter([SHEET, *stems, *flat])
    choices = zip(stems, flat, (f"{number}_{name}" for number, name in enumerate(flat)), strict=True)
    return [next(name for name in names if count[name] < 2) for names in choices]
