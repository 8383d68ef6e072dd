"""Writes a results file for the COCO server, for test-dev or another image list without annotations.

    python efficientdet/infer.py --weights=d0.weights.h5 --images=coco/test2017 --nodraw --output_dir=found \
        --image_info=coco/annotations/image_info_test-dev2017.json \
        --submission=detections_test-dev2017_d0_results.zip

The file lists {"image_id", "category_id", "bbox": [left, top, width, height], "score"} in original pixels.
It is a .json or the only file in a .zip: https://cocodataset.org/#format-results, https://cocodataset.org/#upload
"""

import collections
import io
import os
import pathlib
import re
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import coco_metrics
from common.files import user_errors, write_bytes

MAX_DETECTIONS = 100  # per image: the last of maxDets in pycocotools cocoeval.py, Params.setDetParams


class _Image(msgspec.Struct):
    id: int
    file_name: str


class _Document(msgspec.Struct):
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
        document = msgspec.json.decode(pathlib.Path(path).read_text("utf-8-sig"), type=_Document)
        categories = LabelMap.from_categories(document.categories) if document.categories else None
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"--image_info={path} is not a json with COCO's images: {error}") from error
    return {image.file_name: image.id for image in document.images}, categories


def ids_by_name(names: Sequence[str]) -> list[int]:
    """Returns the ids in file names like COCO's: 000000000139.jpg is image 139.

    Raises:
        UserError: a file name is not a number.
    """
    for name in names:
        if not re.fullmatch(r"[0-9]{1,18}", pathlib.Path(name).stem):
            raise UserError(
                f"--submission needs image ids, but the file name {name!r} is not a number: give "
                "--image_info=FILE, a json that lists images with id and file_name"
            )
    return [int(pathlib.Path(name).stem) for name in names]


def check_path(path: str, others: Iterable[str | os.PathLike]) -> None:
    """Raises UserError if `path` is not a .json or .zip in an existing directory, or is one of `others`."""
    file = pathlib.Path(path)
    if file.suffix not in (".json", ".zip"):
        raise UserError(f"--submission={path} must end in .json or .zip")
    if not file.parent.is_dir():
        raise UserError(f"--submission={path}: the directory {file.parent} is missing")
    if file.resolve() in [pathlib.Path(other).resolve() for other in others]:
        raise UserError(f"--submission={path} would overwrite another file of this run: choose another name")


def check_categories(categories: LabelMap, label_map: LabelMap, file: str) -> None:
    """Raises UserError if a trained class is not a category of `file`."""
    for difference in categories.differences(label_map, here=f"in {file}"):
        raise UserError(f"in the weights, {difference}: give weights that were trained on these categories")


def write(path: str, results: Iterable[dict[str, Any]]) -> int:
    """Writes the best MAX_DETECTIONS of each image.

    Args:
        path: a path that ends in .json, or in .zip for an archive of one .json with the same name.
        results: COCO results with the image ids of the server.

    Returns:
        The number of detections that were written.

    Raises:
        UserError: the file cannot be written.
    """
    count: collections.Counter[int] = collections.Counter()
    kept = []
    for result in sorted(results, key=lambda result: -result["score"]):
        count[result["image_id"]] += 1
        if count[result["image_id"]] <= MAX_DETECTIONS:
            kept.append({key: result[key] for key in ("image_id", "category_id", "bbox", "score")})
    content = coco_metrics.encode_detections(kept)
    file = pathlib.Path(path)
    if file.suffix == ".zip":
        archived = io.BytesIO()
        with zipfile.ZipFile(archived, "w") as archive:  # no dates: equal bytes every time
            archive.writestr(zipfile.ZipInfo(f"{file.stem}.json"), content, zipfile.ZIP_DEFLATED)
        content = archived.getvalue()
    with user_errors(f"--submission={path}"):
        write_bytes(file, content)
    return len(kept)
