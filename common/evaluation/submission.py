"""A results file for the COCO server, for test-dev and for any other image list without annotations.

    python efficientdet/infer.py --weights=d0.weights.h5 --images=coco/test2017 --nodraw --output_dir=found \
        --image_info=coco/annotations/image_info_test-dev2017.json \
        --submission=detections_test-dev2017_d0_results.zip

A list of {"image_id", "category_id", "bbox": [left, top, width, height], "score"} in original pixels, as a
.json or alone in a .zip: https://cocodataset.org/#format-results and https://cocodataset.org/#upload
"""

import collections
import operator
import os
import pathlib
import re
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from common import atomic
from common.errors import UserError
from common.evaluation import coco_metrics
from common.labels import LabelMap
from common.progress import log

MAX_DETECTIONS = 100  # an image: pycocotools cocoeval.py, Params.setDetParams: the last of maxDets
_NAME = re.compile(r"detections_(test-dev|test|val)20\d\d_.+_results")  # https://cocodataset.org/#upload
_END_OF_IDS = 2**63


class ImageInfo(NamedTuple):
    """An image list.

    Attributes:
        image_ids: by file name.
        categories: those that the file names; None where it names none.
    """

    image_ids: dict[str, int]
    categories: LabelMap | None


class _Image(msgspec.Struct):
    id: int
    file_name: str


class _Document(msgspec.Struct):
    images: list[_Image]
    categories: list[dict[str, Any]] = []


def read_image_info(path: str | os.PathLike) -> ImageInfo:
    """Ids of images from a json with COCO's `images`, which needs no annotations: image_info_test-dev2017.

    Raises:
        UserError: the file is missing, is something else, or names an id or a file twice.
    """
    try:
        document = msgspec.json.decode(pathlib.Path(path).read_bytes(), type=_Document)
        categories = LabelMap.from_categories(document.categories) if document.categories else None
    except OSError as error:
        raise UserError(f"--image_info={path}: {error.strerror}") from error
    except (msgspec.DecodeError, UserError) as error:
        raise UserError(f"--image_info={path} is not a json with COCO's images: {error}") from error
    for key in ("id", "file_name"):
        counts = collections.Counter(getattr(image, key) for image in document.images)
        for value, times in counts.most_common(1):
            if times > 1:
                raise UserError(f"--image_info={path}: {times} images have the {key} {value!r}")
    return ImageInfo({image.file_name: image.id for image in document.images}, categories)


def check_listed(names: Sequence[str], image_ids: Sequence[int | None], info: ImageInfo, path: str) -> None:
    """Reports files that are not listed, and listed images that are absent.

    A directory may hold more files: test2017 has 40,670 images, of which test-dev is a half.

    Args:
        names: of files.
        image_ids: of the same files; None where the list does not name the file.
        info: the list.
        path: of the list.

    Raises:
        UserError: it names none of the files, or two files are the same image.
    """
    left_out = [name for name, image_id in zip(names, image_ids, strict=True) if image_id is None]
    count = len(names) - len(left_out)
    if not count:
        raise UserError(f"--image_info={path} knows none of the {len(names)} images, not even {names[0]!r}")
    if left_out:
        log(f"{len(left_out)} images are not in {path} and are left out, {left_out[0]!r} the first")
    if count < len(info.image_ids):
        absent = len(info.image_ids) - count
        log(f"warning: {absent} of the {len(info.image_ids)} images of {path} are not among --images")
    _refuse_repeated(names, image_ids)


def ids_by_name(names: Sequence[str]) -> list[int]:
    """Ids that the file names are, as COCO's: 000000000139.jpg is image 139.

    Raises:
        UserError: a name is no number, or two are the same one.
    """
    stems = [os.path.splitext(os.path.basename(name))[0] for name in names]
    for name, stem in zip(names, stems, strict=True):
        if not (stem.isascii() and stem.isdecimal() and int(stem) < _END_OF_IDS):
            raise UserError(
                f"--submission needs the ids of images, and {name!r} is not a number: give "
                "--image_info=FILE, a json that lists images with id and file_name"
            )
    ids = [int(stem) for stem in stems]
    _refuse_repeated(names, ids)
    return ids


def _refuse_repeated(names: Sequence[str], image_ids: Sequence[int | None]) -> None:
    first: dict[int | None, str] = {}
    for name, image_id in zip(names, image_ids, strict=True):
        if first.setdefault(image_id, name) != name and image_id is not None:
            raise UserError(f"--submission: {first[image_id]!r} and {name!r} are both image {image_id}")


def check_path(path: str | os.PathLike, others: Iterable[str | os.PathLike] = ()) -> pathlib.Path:
    """The file of --submission; logs a name that the server would not take.

    Args:
        path: as it was given.
        others: files that the same command reads or writes.

    Raises:
        UserError: neither .json nor .zip, in no directory, or one of `others`.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".json", ".zip"):
        raise UserError(f"--submission={path} must end in .json or .zip")
    if not path.parent.is_dir():
        raise UserError(f"--submission={path}: there is no directory {path.parent}")
    for other in map(pathlib.Path, others):
        if path.resolve() == other.resolve():
            raise UserError(f"--submission={path} and {other} are one file: name another one")
    if not _NAME.fullmatch(path.stem):
        log(f"the COCO server expects a name like detections_test-dev2017_mine_results.zip, not {path.name}")
    return path


def check_categories(categories: LabelMap | None, label_map: LabelMap, origin: str) -> None:
    """UserError where the model's categories are not of the image list: they would all count as wrong.

    Args:
        categories: of the image list; None where it names none.
        label_map: of the trained classes.
        origin: where the list comes from, as messages begin: "--image_info=f.json".
    """
    if categories is None:
        return
    there = dict(zip(categories.category_ids, categories.names, strict=True))
    for category_id, name in zip(label_map.category_ids, label_map.names, strict=True):
        if there.get(category_id) != name:
            own = repr(there[category_id]) if category_id in there else "not known"
            raise UserError(f"{origin}: category {category_id} is {own} there and {name!r} in the weights")


def write(path: pathlib.Path, found: Sequence[dict[str, Any]], image_ids: Sequence[int]) -> int:
    """Writes the best MAX_DETECTIONS of each image, atomically.

    Args:
        path: ends in .json, or .zip, in which there is one .json of the same name.
        found: COCO results whose image_id is a position in `image_ids`.
        image_ids: as the server knows them.

    Returns:
        How many detections were written.

    Raises:
        UserError: it cannot be written.
    """
    count: collections.Counter[int] = collections.Counter()
    kept = []
    for result in sorted(found, key=operator.itemgetter("score"), reverse=True):
        row = result["image_id"]
        if count[row] < MAX_DETECTIONS:
            count[row] += 1
            kept.append(result | {"image_id": image_ids[row]})
    content = coco_metrics.encode_detections(kept)
    try:
        if path.suffix == ".json":
            atomic.write_bytes(path, content)
        else:
            atomic.write(path, lambda temporary: _zip(temporary, f"{path.stem}.json", content))
    except OSError as error:
        raise UserError(f"--submission={path}: {error.strerror}") from error
    return len(kept)


def _zip(path: pathlib.Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # no date: the same bytes
