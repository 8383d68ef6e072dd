"""COCO annotations, parsed strictly before anything else sees them.

DALI's own COCO reader takes a truncated json, an unknown category or a missing key without a word and
trains on what is left, so it only ever gets a json that was written from what `load_coco` accepted
(readers.py).

What is wrong in the structure is an error. What is merely untidy in the boxes is kept here as it is,
because pycocotools must judge by the original, and mended where targets are made
(`Annotations.target_boxes`): boxes that reach outside their image are clipped, boxes without any area are
dropped, crowds are no targets.

Format: https://cocodataset.org/#format-data
"""

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
from typing import Annotated, Any

import msgspec
import numpy as np

from common.errors import UserError
from common.labels import LabelMap

_SHOWN = 3  # offenders that a message lists before it counts the rest


@dataclasses.dataclass(frozen=True, eq=False)
class TargetBoxes:
    """What a network is trained on: clipped boxes with some area, no crowds, grouped by image.

    Attributes:
        boxes: float32 (M, 4) ltrb normalised, within [0, 1], left < right and top < bottom.
        classes: int32 (M,), 0-based.
        row_splits: int64 (I + 1,); image i owns rows row_splits[i] to row_splits[i + 1].
        num_clipped: boxes that reached outside their image.
        num_dropped: boxes without area (inside their image).
        num_crowds: boxes left out because they mark a crowd.
    """

    boxes: np.ndarray
    classes: np.ndarray
    row_splits: np.ndarray
    num_clipped: int
    num_dropped: int
    num_crowds: int


@dataclasses.dataclass(frozen=True, eq=False)
class Annotations:
    """The annotations of a data set, as found: original ids, boxes, areas and crowds.

    Attributes:
        label_map: the categories.
        image_ids: int64 (I,), in the order of the file.
        file_names: one per image, relative to the image directory; records may have none ("").
        image_sizes: int32 (I, 2), (height, width) in pixels.
        box_image: int64 (N,) index of the image that a box belongs to, ascending.
        boxes_ltwh_px: float64 (N, 4) left, top, width, height; they may reach outside and have no area.
        category_ids: int64 (N,), COCO's sparse ids.
        is_crowd: bool (N,).
        areas: float64 (N,) square pixels of the object's outline, or of the box where there is none.
        origin: where they were read from, for messages.
    """

    label_map: LabelMap
    image_ids: np.ndarray
    file_names: list[str]
    image_sizes: np.ndarray
    box_image: np.ndarray
    boxes_ltwh_px: np.ndarray
    category_ids: np.ndarray
    is_crowd: np.ndarray
    areas: np.ndarray
    origin: str

    @property
    def num_images(self) -> int:
        return len(self.image_ids)

    @property
    def num_boxes(self) -> int:
        return len(self.box_image)

    @functools.cached_property
    def row_splits(self) -> np.ndarray:
        """int64 (I + 1,): image i owns the boxes row_splits[i] to row_splits[i + 1]."""
        return np.searchsorted(self.box_image, np.arange(self.num_images + 1)).astype(np.int64)

    @functools.cached_property
    def target_boxes(self) -> TargetBoxes:
        """The boxes as training wants them."""
        boxes, clipped = self.clipped_boxes
        has_area = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        kept = has_area & ~self.is_crowd
        return TargetBoxes(
            boxes=boxes[kept],
            classes=self.label_map.classes_of(self.category_ids[kept]),
            row_splits=np.concatenate([[0], np.cumsum(kept)])[self.row_splits],
            num_clipped=int(np.count_nonzero(clipped & kept)),
            num_dropped=int(np.count_nonzero(~has_area & ~self.is_crowd)),
            num_crowds=int(np.count_nonzero(self.is_crowd)),
        )

    @functools.cached_property
    def clipped_boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """All boxes float32 (N, 4) ltrb normalised and clipped to [0, 1], and bool (N,) whether that
        changed them."""
        left_top, size = self.boxes_ltwh_px[:, :2], self.boxes_ltwh_px[:, 2:]
        limits = self.image_sizes[self.box_image][:, [1, 0, 1, 0]].astype(
            np.float64
        )  # (N, 4) width, height, ...
        boxes = (np.concatenate([left_top, left_top + size], axis=1) / limits).astype(np.float32)
        clipped = np.clip(boxes, 0.0, 1.0)
        return clipped, np.any(boxes != clipped, axis=1)

    def ground_truth(self) -> dict[str, Any]:
        """A COCO dict that pycocotools accepts: original boxes, image ids and category ids, crowds included.

        Annotation ids are counted from 1: pycocotools takes an annotation with id 0 for no match at all.
        """
        rows = zip(
            self.image_ids[self.box_image].tolist(),
            self.category_ids.tolist(),
            self.boxes_ltwh_px.tolist(),
            self.areas.tolist(),
            self.is_crowd.astype(int).tolist(),
            strict=True,
        )
        keys = ("image_id", "category_id", "bbox", "area", "iscrowd")
        return {
            "info": {},
            "images": [
                {"id": image_id, "file_name": name, "height": height, "width": width}
                for image_id, name, (height, width) in zip(
                    self.image_ids.tolist(), self.file_names, self.image_sizes.tolist(), strict=True
                )
            ],
            "annotations": [{"id": i, **dict(zip(keys, row, strict=True))} for i, row in enumerate(rows, 1)],
            "categories": self.label_map.categories(),
        }

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything but `origin`: equal for equal annotations, wherever they were read."""
        digest = hashlib.sha256(self.label_map.to_json().encode())
        digest.update("\0".join(self.file_names).encode("utf-8", "surrogateescape"))
        for array in (
            self.image_ids,
            self.image_sizes,
            self.box_image,
            self.boxes_ltwh_px,
            self.category_ids,
            self.is_crowd,
            self.areas,
        ):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def summary(self) -> str:
        """One line for the log, with what was mended."""
        targets = self.target_boxes
        empty = int(np.count_nonzero(np.diff(targets.row_splits) == 0))
        return (
            f"{self.num_images} images ({empty} without objects), {len(targets.boxes)} objects of"
            f" {self.label_map.num_classes} classes; {targets.num_crowds} crowds left out,"
            f" {targets.num_clipped} boxes clipped to their image, {targets.num_dropped} without area dropped"
        )


# What of COCO's json is used. Strict: "12" is no number, 1.5 no id, true no number. Unknown keys are skipped.
_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Side = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Length = Annotated[float, msgspec.Meta(ge=0)]


class _Image(msgspec.Struct, gc=False):
    id: _Id
    file_name: Annotated[str, msgspec.Meta(min_length=1)]
    width: _Side
    height: _Side


class _Object(msgspec.Struct, gc=False):
    image_id: _Id
    category_id: _Id
    bbox: tuple[float, float, _Length, _Length]
    id: _Id | None = None
    iscrowd: Annotated[int, msgspec.Meta(ge=0, le=1)] | bool = 0
    area: _Length | None = None


class _Document(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Object]
    categories: list[dict[str, Any]]


def load_coco(json_path: str | os.PathLike, images_dir: str | os.PathLike | None) -> Annotations:
    """Reads and checks a COCO json of instances.

    `area` (default: of the box), `iscrowd` (default: 0) and the annotations' `id` may be missing. Boxes
    that reach outside or have no area are accepted; boxes with a negative side are not.

    Args:
        json_path: the annotations.
        images_dir: the directory that `file_name` refers to; None leaves the image files unchecked.

    Raises:
        UserError: the first problem found, with file, record, value and what to do.
    """
    path = os.fspath(json_path)
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"annotations {path}: {error.strerror}") from error
    try:
        document = msgspec.json.decode(content, type=_Document)
    except msgspec.ValidationError as error:
        raise UserError(f"annotations {path}: {_explain(error, content)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"annotations {path}: {_locate(error, content)}") from error
    del content
    try:
        label_map = LabelMap.from_categories(document.categories)
        annotations = _as_arrays(document, label_map, path)
        if images_dir is not None:
            _check_files(annotations.file_names, os.fspath(images_dir), annotations.image_ids)
    except UserError as error:
        raise UserError(f"annotations {path}: {error}") from error
    return annotations


def _as_arrays(document: _Document, label_map: LabelMap, origin: str) -> Annotations:
    images, objects = document.images, document.annotations
    if not images:
        raise UserError("`images` is empty: there is nothing to read")
    if not objects:
        raise UserError("`annotations` is empty: there is nothing to train on or to compare with")
    image_ids = np.fromiter((image.id for image in images), np.int64, len(images))
    _refuse_repeats(image_ids, "image id")
    _refuse_repeats([o.id for o in objects if o.id is not None], "annotation id")

    row_of = {image_id: row for row, image_id in enumerate(image_ids.tolist())}
    known_categories = set(label_map.category_ids)
    for number, an_object in enumerate(objects):
        if an_object.image_id not in row_of:
            raise UserError(
                f"{_name(an_object, number)} has image_id {an_object.image_id}, which no image has"
            )
        if an_object.category_id not in known_categories:
            raise UserError(
                f"{_name(an_object, number)} has category_id {an_object.category_id}, which no category has"
            )
    box_image = np.fromiter((row_of[o.image_id] for o in objects), np.int64, len(objects))
    boxes_ltwh_px = np.array([o.bbox for o in objects], np.float64)
    areas = [o.bbox[2] * o.bbox[3] if o.area is None else o.area for o in objects]
    order = np.argsort(box_image, kind="stable")  # grouped by image, otherwise in the order of the file
    return Annotations(
        label_map=label_map,
        image_ids=image_ids,
        file_names=[image.file_name for image in images],
        image_sizes=np.array([(image.height, image.width) for image in images], np.int32),
        box_image=box_image[order],
        boxes_ltwh_px=boxes_ltwh_px[order],
        category_ids=np.fromiter((o.category_id for o in objects), np.int64, len(objects))[order],
        is_crowd=np.fromiter((bool(o.iscrowd) for o in objects), np.bool_, len(objects))[order],
        areas=np.array(areas, np.float64)[order],
        origin=origin,
    )


def _name(an_object: _Object, number: int) -> str:
    return f"annotations[{number}]" if an_object.id is None else f"annotation {an_object.id}"


def _refuse_repeats(ids: np.ndarray | list[int], kind: str) -> None:
    if len(ids) == len(set(np.asarray(ids).tolist())):
        return
    repeated = [i for i, count in collections.Counter(np.asarray(ids).tolist()).items() if count > 1]
    shown = ", ".join(map(str, repeated[:_SHOWN]))
    raise UserError(f"{kind} {shown} is given more than once ({len(repeated)} such ids): ids must be unique")


def _check_files(file_names: list[str], images_dir: str, image_ids: np.ndarray) -> None:
    """Every file is a regular file below `images_dir`. One listing per directory: one stat per file is slow
    on NFS."""
    if not os.path.isdir(images_dir):
        raise UserError(f"the image directory {images_dir} does not exist")
    names_by_directory: dict[str, set[str]] = {}
    missing = []
    for name, image_id in zip(file_names, image_ids.tolist(), strict=True):
        parts = pathlib.PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\0" in name or "\n" in name:
            raise UserError(
                f"image {image_id} has file_name {name!r}, which leaves the image directory {images_dir}"
            )
        directory, base = os.path.split(os.path.join(images_dir, name))
        if directory not in names_by_directory:
            names_by_directory[directory] = _regular_files(directory)
        if base not in names_by_directory[directory]:
            missing.append((name, image_id))
    if missing:
        shown = ", ".join(f"{name!r} (image {image_id})" for name, image_id in missing[:_SHOWN])
        raise UserError(f"{len(missing)} of {len(file_names)} image files are not in {images_dir}: {shown}")


def _regular_files(directory: str) -> set[str]:
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries if entry.is_file()}  # a pipe would hang DALI for ever
    except OSError:
        return set()


def _explain(error: msgspec.ValidationError, content: bytes) -> str:
    """msgspec says which type is wrong and where by position; add the offending value and the record's id."""
    reason, _, where = str(error).partition(" - at ")
    where = where.strip("`")
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", where)
    try:
        value: Any = msgspec.json.decode(content)
    except msgspec.DecodeError as malformed:  # it is both ill-typed and malformed further on
        return _locate(malformed, content)
    record_id = None
    for key, index in steps:
        value = value[key] if key else value[int(index)]
        if isinstance(value, dict) and "id" in value:
            record_id = value["id"]
    shown = (
        repr(value) if not isinstance(value, dict | list) or len(repr(value)) < 80 else type(value).__name__
    )
    name = "" if record_id is None else f" (id {record_id!r})"
    return f"{where.removeprefix('$').removeprefix('.') or 'the file'}{name} is {shown}: {reason}"


def _locate(error: Exception, content: bytes) -> str:
    """A message for bytes that are no JSON: what stands there."""
    if not content.strip():
        return "the file is empty"
    position = re.search(r"byte (\d+)", str(error))
    if position is None:
        tail = content[-30:].decode("utf-8", "replace")
        return f"{error} after {len(content)} bytes (the file ends in {tail!r}): copy or export it again"
    at = int(position[1])
    return f"{error}, near {content[max(at - 20, 0) : at + 20].decode('utf-8', 'replace')!r}"
