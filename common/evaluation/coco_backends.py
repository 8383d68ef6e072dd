"""Who counts: pycocotools, the judge, or faster-coco-eval, which says the same in a fraction of the time.

faster-coco-eval (github.com/MiXaiLL76/faster_coco_eval) is pycocotools' algorithm in C++. It is an optional
package, the extra `faster-coco` of pyproject.toml.

Both get images and categories numbered from 1 in the order of their ids: faster-coco-eval takes ids for
doubles, which are exact to 2**53 only.
"""

import contextlib
import gc
import importlib.metadata
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.args import COCO_BACKENDS
from common.errors import UserError, unknown

FASTER_VERSION = "1.8.0"  # that finds the same: tests/common/evaluation/test_coco_backends.py

_ALL_SIZES = 0  # index into COCOeval's area ranges
_MAX_DETECTIONS = 100  # of one category in one image that count: the last of COCOeval's maxDets


class Objects(NamedTuple):
    """Annotations or detections as columns, by rising image, detections of one image by falling score.

    Attributes:
        images: int64 (N,), 1-based numbers of their images.
        categories: int64 (N,), 1-based numbers of their categories.
        boxes_ltwh_px: float64 (N, 4).
        areas: float64 (N,), square pixels.
        is_crowd: int64 (N,), 0 or 1; detections are no crowds.
        scores: float64 (N,); of annotations anything.
    """

    images: np.ndarray
    categories: np.ndarray
    boxes_ltwh_px: np.ndarray
    areas: np.ndarray
    is_crowd: np.ndarray
    scores: np.ndarray

    def select(self, rows: np.ndarray) -> "Objects":
        """Those of some rows: anything that indexes."""
        return Objects(*(column[rows] for column in self))


def check(backend: str) -> None:
    """UserError unless `backend` is one of flags.COCO_BACKENDS and installed."""
    if backend not in COCO_BACKENDS:
        raise unknown("COCO backend", backend, COCO_BACKENDS)
    if backend == "faster":
        try:
            found = importlib.metadata.version("faster-coco-eval")
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != FASTER_VERSION:
            raise UserError(
                f"--coco_backend=faster needs faster-coco-eval {FASTER_VERSION} (installed: {found}): run "
                f"`pip install faster-coco-eval=={FASTER_VERSION}`, or leave the flag out"
            )


def count(
    backend: str, truth: Objects, found: Objects, *, num_images: int, num_categories: int
) -> tuple[np.ndarray, np.ndarray]:
    """Matches detections with the truth, and counts.

    Args:
        backend: one of flags.COCO_BACKENDS.
        truth: the annotations.
        found: the detections.
        num_images, num_categories: how many the data have.

    Returns:
        float64 (12,), COCOeval.stats in their order; float64 (10, 101, C), the precision at every IoU
        threshold, recall and category, of boxes of all sizes; -1 where no truth counts.

    Raises:
        UserError: see `check`.
    """
    check(backend)
    with contextlib.redirect_stdout(io.StringIO()), without_garbage_collection():  # they report by print
        if backend == "pycocotools":
            judge = _judge(truth, found, num_images, num_categories)
        else:
            judge = _judge_faster(truth, found, num_categories)
        judge.summarize()
    return judge.stats, judge.eval["precision"][:, :, :, _ALL_SIZES, -1]


def _judge(truth: Objects, found: Objects, num_images: int, num_categories: int) -> COCOeval:
    """pycocotools' judge that has accumulated."""

    def index(objects: Objects) -> COCO:
        coco = COCO()
        coco.dataset = {
            "images": [{"id": number} for number in range(1, num_images + 1)],
            "annotations": _to_dicts(objects),
            "categories": [{"id": number} for number in range(1, num_categories + 1)],
        }
        coco.createIndex()
        return coco

    judge = COCOeval(index(truth), index(found), "bbox")
    judge.evaluate()
    judge.accumulate()
    return judge


def _judge_faster(truth: Objects, found: Objects, num_categories: int) -> COCOeval:
    """pycocotools' judge with what faster-coco-eval has accumulated.

    Category by category, and of the images only those that matter to it: it takes time and memory for every
    pair of the two, and few categories are in an image. Precision is right at _MAX_DETECTIONS only.
    """
    from faster_coco_eval import COCOeval_faster  # an optional package

    judge = COCOeval(iouType="bbox")
    parameters = judge.params
    shape = len(parameters.areaRng), len(parameters.maxDets)
    recall = np.full((len(parameters.iouThrs), num_categories, *shape), -1.0)
    precision = np.full((len(parameters.iouThrs), len(parameters.recThrs), num_categories, *shape), -1.0)
    for k, (of_truth, of_found) in enumerate(
        zip(_by_category(truth, num_categories), _by_category(found, num_categories), strict=True)
    ):
        if len(of_truth.images):
            of_truth, of_found = _with_fewer_images(of_truth, of_found)
            images = np.union1d(of_truth.images, of_found.images).tolist()
            one = COCOeval_faster(
                _OneCategory(of_truth, images, k + 1), _OneCategory(of_found, images, k + 1), "bbox"
            )
            one.evaluate()
            one.accumulate()
            recall[:, k] = one.eval["recall"][:, 0]
            precision[:, :, k] = one.eval["precision"][:, :, 0]
    judge.eval = {"recall": recall, "precision": precision}
    return judge


def _with_fewer_images(truth: Objects, found: Objects) -> tuple[Objects, Objects]:
    """One category with images renumbered, so that those without truth that follow each other become one.

    Whatever is found in them is false, and where does not matter; but among equal scores their order does,
    and stays. No image gets more than the _MAX_DETECTIONS that count.
    """
    found = found.select(_place(found.images) < _MAX_DETECTIONS)
    true_images = np.unique(truth.images)
    step = len(found.images) + 1  # between the numbers of two images with truth: room for those without
    truth = truth._replace(images=step * (1 + np.searchsorted(true_images, truth.images)))
    before = np.searchsorted(true_images, found.images)  # how many images with truth come before
    images = step * (1 + before)
    false = ~np.isin(found.images, true_images)
    images[false] = step * before[false] + 1 + _place(before[false]) // _MAX_DETECTIONS
    return truth, found._replace(images=images)


def _place(values: np.ndarray) -> np.ndarray:
    """How many of the same value come before, in an ascending array."""
    return np.arange(len(values)) - np.searchsorted(values, values)


class _OneCategory:
    """As much of the class COCO as COCOeval_faster asks for, which here always wants everything."""

    def __init__(self, objects: Objects, images: list[int], category: int) -> None:
        self._annotations = _to_dicts(objects)
        self._images = images
        self._category = category

    def getImgIds(self) -> list[int]:  # noqa: N802
        return self._images

    def getCatIds(self) -> list[int]:  # noqa: N802
        return [self._category]

    def getAnnIds(self, imgIds: list[int], catIds: list[int]) -> range:  # noqa: N802, N803
        return range(len(self._annotations))

    def loadAnns(self, ids: range) -> list[dict[str, Any]]:  # noqa: N802
        return self._annotations


def _by_category(objects: Objects, num_categories: int) -> Iterator[Objects]:
    order = np.argsort(objects.categories, kind="stable")
    splits = np.searchsorted(objects.categories[order], np.arange(2, num_categories + 1))
    for rows in np.split(order, splits):
        yield objects.select(rows)


def _to_dicts(objects: Objects) -> list[dict[str, Any]]:
    """As the annotations of a COCO json. Ids from 1: COCOeval takes a match with annotation 0 for none."""
    return [
        {
            "id": number,
            "image_id": image,
            "category_id": category,
            "bbox": box,
            "area": area,
            "iscrowd": crowd,
            "score": score,
        }
        for number, (image, category, box, area, crowd, score) in enumerate(
            zip(*(column.tolist() for column in objects), strict=True), start=1
        )
    ]


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Where millions of small objects are made without a cycle: to look for some would double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
