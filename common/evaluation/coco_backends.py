"""Matches detections with ground truth by pycocotools, or by faster-coco-eval, its algorithm in C++.

faster-coco-eval (github.com/MiXaiLL76/faster_coco_eval) is optional: the extra `faster-coco` of
pyproject.toml. It gives pycocotools' numbers to 1e-12 in about a tenth of the time and half the memory.

Both get images and categories numbered from 1 in the order of their ids: faster-coco-eval stores ids as
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

FASTER_VERSION = "1.8.0"  # compared with pycocotools in tests/common/evaluation/test_coco_backends.py

_ALL_SIZES = 0  # index into COCOeval's area ranges


class Objects(NamedTuple):
    """Annotations or detections as columns, by rising image, detections of one image by falling score.

    Attributes:
        images: int64 (N,), 1-based numbers of their images.
        categories: int64 (N,), 1-based numbers of their categories.
        boxes_ltwh_px: float64 (N, 4).
        areas: float64 (N,), square pixels.
        is_crowd: int64 (N,), 0 or 1; 0 for detections.
        scores: float64 (N,); not used for annotations.
    """

    images: np.ndarray
    categories: np.ndarray
    boxes_ltwh_px: np.ndarray
    areas: np.ndarray
    is_crowd: np.ndarray
    scores: np.ndarray


def check(backend: str) -> None:
    """Raises UserError unless `backend` is one of args.COCO_BACKENDS and installed."""
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
    backend: str, ground_truth: Objects, detections: Objects, *, num_images: int, num_categories: int
) -> tuple[np.ndarray, np.ndarray]:
    """Computes COCO's numbers.

    Args:
        backend: one of args.COCO_BACKENDS.
        ground_truth, detections: what to compare.
        num_images, num_categories: how many the data have.

    Returns:
        float64 (12,), COCOeval.stats in their order; float64 (10, 101, C), the precision at every IoU
        threshold, recall and category, of boxes of all sizes; -1 for categories without ground truth.

    Raises:
        UserError: see `check`.
    """
    check(backend)
    evaluator_class = COCOeval
    if backend == "faster":
        from faster_coco_eval import COCOeval_faster as evaluator_class  # an optional package

    def index(objects: Objects) -> COCO:
        coco = COCO()
        coco.dataset = {
            "images": [{"id": number} for number in range(1, num_images + 1)],
            "annotations": _to_dicts(objects),
            "categories": [{"id": number} for number in range(1, num_categories + 1)],
        }
        coco.createIndex()
        return coco

    with contextlib.redirect_stdout(io.StringIO()), without_garbage_collection():  # both print their progress
        evaluator = evaluator_class(index(ground_truth), index(detections), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return np.array(evaluator.stats[:12]), evaluator.eval["precision"][:, :, :, _ALL_SIZES, -1]


def _to_dicts(objects: Objects) -> list[dict[str, Any]]:
    """Annotations of a COCO json. Ids start at 1: COCOeval takes a match with annotation 0 for none."""
    keys = ("image_id", "category_id", "bbox", "area", "iscrowd", "score")
    rows = zip(*(column.tolist() for column in objects), strict=True)
    return [dict(zip(keys, row, strict=True), id=number) for number, row in enumerate(rows, start=1)]


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Around the making of millions of small objects, which looking for cycles would slow down to a half."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
