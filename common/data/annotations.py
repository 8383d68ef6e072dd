"""The annotations of a data set as arrays, read from COCO json or from TFRecords.

`Annotations` keeps the original boxes, which pycocotools needs as ground truth.
`Annotations.target_boxes` has the boxes for training.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from common.data.labels import LabelMap
from common.progress import counted

NONE = -1  # marks a missing id or row
# Detections that COCO's metrics count per image and category (cocoeval.py: setDetParams and evaluateImg).
MAX_DETECTIONS = 100
IMAGE_INFO = "image_info.json"  # infer.py writes COCO's `images` and `categories` next to detections.json
ARRAYS = ("image_ids", "image_sizes", "box_image", "boxes_ltwh_px", "category_ids", "is_crowd", "areas")


@dataclasses.dataclass(frozen=True, eq=False)
class TargetBoxes:
    """The boxes for training, sorted by image and clipped to their image.

    Attributes:
        boxes: float32 (M, 4) ltrb normalised, within [0, 1], left < right and top < bottom.
        classes: int32 (M,), 0-based.
        row_splits: int64 (I + 1,); the boxes of image i are the rows row_splits[i] : row_splits[i + 1].
        num_clipped: number of boxes that were clipped.
        num_dropped: number of boxes left out because they have no area inside their image.
        num_crowds: number of boxes left out because they mark a crowd.
    """

    boxes: np.ndarray
    classes: np.ndarray
    row_splits: np.ndarray
    num_clipped: int
    num_dropped: int
    num_crowds: int


@dataclasses.dataclass(frozen=True, eq=False)
class Annotations:
    """The annotations of a data set.

    Attributes:
        image_ids: int64 (I,), in the order of the file.
        file_names: the path of each image below the image directory; "" if a TFRecord gives no file name.
        image_sizes: int32 (I, 2), (height, width) in pixels.
        box_image: int64 (N,), the index of each box's image, in ascending order.
        boxes_ltwh_px: float64 (N, 4), left, top, width, height as in the file.
        category_ids: int64 (N,), as in the file; COCO's ids have gaps.
        is_crowd: bool (N,), whether a box marks a crowd.
        areas: float64 (N,), the object's area in square pixels; the box's area if the file has none.
        issues: the faults that the data check fixed or warned about (check.issues.Issue).
        checksums: int64 (I,), `ImageFacts.checksum` of the image files; None if they were not read.
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
    issues: Iterable[Any] = ()
    checksums: np.ndarray | None = None

    @property
    def num_images(self) -> int:
        return len(self.image_ids)

    @property
    def num_boxes(self) -> int:
        return len(self.box_image)

    @functools.cached_property
    def row_splits(self) -> np.ndarray:
        """Returns int64 (I + 1,). The boxes of image i are the rows row_splits[i] : row_splits[i + 1]."""
        return np.searchsorted(self.box_image, np.arange(self.num_images + 1)).astype(np.int64)

    @functools.cached_property
    def target_boxes(self) -> TargetBoxes:
        """Returns the boxes for training: without crowds and boxes that have no area inside their image."""
        boxes, clipped, has_area = self.clipped_boxes
        is_target = has_area & ~self.is_crowd
        return TargetBoxes(
            boxes=boxes[is_target],
            classes=self.label_map.classes_of(self.category_ids[is_target]),
            row_splits=np.concatenate([[0], np.cumsum(is_target)])[self.row_splits],
            num_clipped=int(np.count_nonzero(clipped & is_target)),
            num_dropped=int(np.count_nonzero(~has_area & ~self.is_crowd)),
            num_crowds=int(np.count_nonzero(self.is_crowd)),
        )

    @functools.cached_property
    def clipped_boxes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (boxes, is_changed, has_area).

        boxes: float32 (N, 4) ltrb normalised, clipped to [0, 1].
        is_changed: bool (N,), whether clipping changed the box.
        has_area: bool (N,), whether the clipped box has an area above 0.
        """
        left_top, size = np.split(self.boxes_ltwh_px, 2, axis=1)
        limits = self.image_sizes[self.box_image][:, [1, 0, 1, 0]].astype(np.float64)
        with np.errstate(over="ignore"):  # clipping makes infinite numbers 0 or 1
            boxes = (np.concatenate([left_top, left_top + size], axis=1) / limits).astype(np.float32)
        clipped = np.clip(boxes, 0.0, 1.0)
        has_area = np.all(clipped[:, 2:] > clipped[:, :2], axis=1)
        return clipped, np.any(boxes != clipped, axis=1), has_area

    @property
    def box_areas(self) -> np.ndarray:
        """Returns float64 (N,), width times height of each box in square pixels."""
        with np.errstate(over="ignore"):
            return self.boxes_ltwh_px[:, 2] * self.boxes_ltwh_px[:, 3]

    @functools.cached_property
    def is_repeated(self) -> np.ndarray:
        """Returns bool (N,), whether an earlier box has the same image, category, edges, area and mark.

        Two boxes are one object only if their areas are equal: objects of the same box can have two masks.
        """
        fields = (self.box_image, self.category_ids, self.is_crowd, self.areas, *self.boxes_ltwh_px.T)
        # Equal boxes have equal sums, and few other boxes have the same sum. Sums are fast to sort.
        with np.errstate(over="ignore", invalid="ignore"):
            sums = sum(
                (number**0.5 * field for number, field in enumerate(fields, 1)), np.zeros(self.num_boxes)
            )
        ordered = np.sort(sums)
        rows = np.flatnonzero(np.isin(sums, ordered[1:][ordered[1:] == ordered[:-1]]))
        boxes = np.stack([field[rows].astype(np.float64) for field in fields], axis=1)  # (M, 8)
        is_repeated = np.zeros(self.num_boxes, np.bool_)
        is_repeated[np.delete(rows, np.unique(boxes, axis=0, return_index=True)[1])] = True
        return is_repeated

    def limit(self, max_instances: int, images: int = 1) -> int | None:
        """Returns `max_instances` if `images` images can have more boxes than that together, else None."""
        most = int(np.diff(self.target_boxes.row_splits).max(initial=0))
        return max_instances if images * most > max_instances else None

    def ground_truth(self) -> dict[str, Any]:
        """Returns a COCO dict for pycocotools, with original boxes and ids, crowds included.

        Annotation ids start at 1, because pycocotools counts a match with annotation 0 as no match.
        """
        height, width = self.image_sizes.T
        images = (self.image_ids, np.array(self.file_names, object), height, width)
        objects = (np.arange(1, self.num_boxes + 1), self.image_ids[self.box_image], self.category_ids)
        boxes = (self.boxes_ltwh_px, self.areas, self.is_crowd.astype(int))
        return {
            "info": {},
            "images": records("id file_name height width", *images),
            "annotations": records("id image_id category_id bbox area iscrowd", *objects, *boxes),
            "categories": self.label_map.categories(),
        }

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of all fields except `origin`, `issues` and `checksums`."""
        digest = hashlib.sha256(self.label_map.to_json().encode())
        digest.update("\0".join(self.file_names).encode("utf-8", "surrogateescape"))
        for name in ARRAYS:
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return digest.hexdigest()

    def summary(self) -> str:
        """Returns a line for the log with numbers of images and objects."""
        targets = self.target_boxes
        empty = int(np.count_nonzero(np.diff(targets.row_splits) == 0))
        return (
            f"{counted(self.num_images, 'image')} ({empty} without objects), "
            f"{counted(len(targets.boxes), 'object')} of "
            f"{counted(self.label_map.num_classes, 'class', 'es')}; "
            f"{counted(targets.num_crowds, 'crowd')} left out, {counted(targets.num_clipped, 'box', 'es')} "
            f"clipped to their image, {targets.num_dropped} without area dropped"
        )

    def image_name(self, row: int) -> str:
        """Returns a name for messages, such as `image 12 ('a/b.jpg')`."""
        file = f" ({self.file_names[row]!r})" if self.file_names[row] else ""
        return f"image {self.image_ids[row]}{file}"

    def select(self, is_selected: np.ndarray) -> "Annotations":
        """Returns the annotations of the images for which `is_selected`, bool (I,), is true."""
        selection = self.select_boxes(is_selected[self.box_image])
        return dataclasses.replace(
            selection,
            image_ids=self.image_ids[is_selected],
            file_names=list(itertools.compress(self.file_names, is_selected)),
            image_sizes=self.image_sizes[is_selected],
            box_image=(np.cumsum(is_selected) - 1)[selection.box_image],
            checksums=None if self.checksums is None else self.checksums[is_selected],
        )

    def select_boxes(self, is_selected: np.ndarray) -> "Annotations":
        """Returns all images with only the boxes for which `is_selected`, bool (N,), is true."""
        of_boxes = ("box_image", "boxes_ltwh_px", "category_ids", "is_crowd", "areas")
        return dataclasses.replace(self, **{name: getattr(self, name)[is_selected] for name in of_boxes})


def without_objects(
    file_names: Sequence[str], origin: str, sizes: Iterable[tuple[int, int]] | None = None
) -> Annotations:
    """Returns annotations without boxes. Image ids are 0, 1, 2, ...

    Args:
        sizes: (height, width) of each image in pixels; default: 0, 0.
    """
    rows = zip(file_names, sizes or [(0, 0)] * len(file_names), strict=True)
    images = [CocoImage(i, name, width, height) for i, (name, (height, width)) in enumerate(rows)]
    return to_annotations(images, table_of([]), np.zeros(0, np.int64), LabelMap((), ()), origin)


def records(keys: str, *columns: np.ndarray) -> list[dict[str, Any]]:
    """Converts columns to one dict per row. `keys` names the columns, separated by spaces."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(keys.split(), row, strict=True)) for row in rows]


# --- COCO json (https://cocodataset.org/#format-data): types are checked, unused keys are ignored ---

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Side = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class CocoImage(msgspec.Struct, gc=False):
    """An entry of the list `images`."""

    id: _Id
    file_name: Annotated[str, msgspec.Meta(min_length=1)]
    width: _Side
    height: _Side


class CocoObject(msgspec.Struct, gc=False):
    """An entry of the list `annotations`; `bbox` is left, top, width, height in pixels."""

    image_id: _Id
    category_id: _Id
    bbox: tuple[float, float, float, float]
    id: _Id | None = None
    iscrowd: Annotated[int, msgspec.Meta(ge=0, le=1)] | bool = 0
    area: Annotated[float, msgspec.Meta(ge=0)] | None = None


class CocoFile(msgspec.Struct):
    """The three lists of a COCO json that this project reads."""

    images: Annotated[list[CocoImage], msgspec.Meta(min_length=1)]
    annotations: list[CocoObject]
    categories: list[Any]


# The dtype of `table_of`. A missing id is NONE, a missing area is NaN.
_FORMATS = ("i8", "i8", "4f8", "i8", "?", "f8")
OBJECT = np.dtype({"names": CocoObject.__struct_fields__, "formats": _FORMATS})


def table_of(objects: Sequence[CocoObject]) -> np.ndarray:
    """Returns a structured array (N,) with the fields of CocoObject."""

    def row(o: CocoObject) -> tuple:
        number, area = NONE if o.id is None else o.id, math.nan if o.area is None else o.area
        return (o.image_id, o.category_id, o.bbox, number, o.iscrowd, area)

    return np.fromiter(map(row, objects), OBJECT, len(objects))


def sizes_of(images: Sequence[CocoImage]) -> np.ndarray:
    """Returns int32 (I, 2), the height and width of each image in pixels."""
    return np.array([(image.height, image.width) for image in images], np.int32).reshape(-1, 2)


def find_rows(ids: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Returns int64 (N,): the index in `known` of each of the `ids`, or NONE if `known` lacks the id."""
    if not len(known):
        return np.full(len(ids), NONE)
    order = np.argsort(known, kind="stable")
    places = np.minimum(np.searchsorted(known[order], ids), len(known) - 1)
    return np.where(known[order][places] == ids, order[places], NONE)


def to_annotations(
    images: Sequence[CocoImage], objects: np.ndarray, image_row: np.ndarray, label_map: LabelMap, origin: str
) -> Annotations:
    """Builds annotations. The boxes of one image keep the order of `objects`.

    Args:
        objects: structured array (N,) of dtype OBJECT, as `table_of` returns it.
        image_row: int64 (N,), the index in `images` of each object's image.
    """
    order = np.argsort(image_row, kind="stable")
    boxes, areas = objects["bbox"][order], objects["area"][order]
    with np.errstate(over="ignore"):
        box_areas = boxes[:, 2] * boxes[:, 3]
    return Annotations(
        label_map=label_map,
        image_ids=np.array([image.id for image in images], np.int64),
        file_names=[image.file_name for image in images],
        image_sizes=sizes_of(images),
        box_image=image_row[order],
        boxes_ltwh_px=boxes,
        category_ids=objects["category_id"][order],
        is_crowd=objects["iscrowd"][order],
        areas=np.where(np.isnan(areas), box_areas, areas),
        origin=origin,
    )
