"""Reads the detections that infer.py, eval.py and train.py write, as labels to correct.

detections.json has COCO's results format: image_id, category_id, bbox (left, top, width, height in pixels)
and score. The names and sizes of the images, and the categories, are in another json, in COCO's format for
test images: `images` and `categories`. infer.py writes it as image_info.json next to detections.json. For the
detections of eval.py and train.py, it is the json of the evaluation data.

Format: https://cocodataset.org/#format-results
"""

import dataclasses
import os
import pathlib

import msgspec
import numpy as np

from common.args import ImagePolicy
from common.data.annotations import IMAGE_INFO, Annotations, CocoImage
from common.data.check.issues import Issues
from common.data.labels import LabelMap
from common.errors import UserError
from tools.conversion.labels import LabelledImage, require_directory
from tools.conversion.shapes import Shape, annotations_of_shapes, locate


class _Detection(msgspec.Struct, gc=False):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    score: float


class _ImageInfo(msgspec.Struct):
    images: list[CocoImage]


def read_detections(
    path: str,
    *,
    images_dir: str | None = None,
    image_info: str | None = None,
    score_threshold: float = 0.0,
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads detections as annotations. Their ids of images and categories stay.

    Args:
        path: detections.json.
        images_dir: the directory that the file names of the images are relative to.
        image_info: json with `images` and `categories`; default: image_info.json next to `path`.
        score_threshold: detections with a lower score are left out.

    Returns:
        The annotations of all images in `image_info`, also of those without detections; and `images_dir`.

    Raises:
        DataError: the data have errors; the message lists all of them.
        UserError: files or directories do not exist, or a file is not such a json.
    """
    if not images_dir:
        raise UserError("--from=detections needs --images=DIR, the directory of the images")
    require_directory(images_dir)
    info_file = image_info or os.path.join(os.path.dirname(path), IMAGE_INFO)
    if not os.path.isfile(info_file):
        advice = "give --image_info=FILE, a json with COCO's `images` and `categories`"
        raise UserError(f"{info_file} does not exist: {advice}")
    file = path
    try:
        detections = msgspec.json.decode(pathlib.Path(path).read_bytes(), type=list[_Detection])
        file = info_file
        info = msgspec.json.decode(pathlib.Path(info_file).read_bytes(), type=_ImageInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        expected = "a list of detections" if file == path else "a json with COCO's `images`"
        raise UserError(f"{file} is not {expected}: {error}") from error
    label_map = LabelMap.load(info_file)
    names = dict(zip(label_map.category_ids, label_map.names, strict=True))
    issues = Issues(path, policy)
    place = "images[{}]".format
    issues.add_repeats("repeated-image-id", "image", [image.id for image in info.images], place)
    issues.add_repeats("image-labelled-twice", "file", [image.file_name for image in info.images], place)
    images = {
        image.id: LabelledImage(locate(image.file_name, images_dir), info_file, (image.height, image.width))
        for image in info.images
    }
    shapes_of: dict[LabelledImage, list[Shape]] = {image: [] for image in images.values()}
    for number, detection in enumerate(detections, 1):
        location = f"detection {number} (image {detection.image_id})"
        if detection.image_id not in images:
            issues.add("unknown-image", location)
        elif detection.category_id not in names:
            issues.add("unknown-category", f"{location} is of category {detection.category_id}")
        elif detection.score >= score_threshold:
            left, top, width, height = detection.bbox
            box = (left, top, left + width, top + height)
            shapes_of[images[detection.image_id]].append(Shape(location, names[detection.category_id], box))
    if not issues.stopping and not any(shapes_of.values()):
        count = f"none of the {len(detections)} detections" if detections else "no detection"
        raise UserError(
            f"{path} has {count} with a score of at least {score_threshold:g}: nothing to convert"
        )
    annotations = annotations_of_shapes(shapes_of, images_dir, issues, label_map_file=info_file)
    ids = {image.file_name: image_id for image_id, image in images.items()}
    image_ids = np.array([ids[name] for name in annotations.file_names], np.int64)
    return dataclasses.replace(annotations, image_ids=image_ids), images_dir
