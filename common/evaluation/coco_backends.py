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
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.args import COCO_BACKENDS
from common.errors import UserError, unknown

FASTER_VERSION = "1.8.0"  # compared with pycocotools in tests/common/evaluation/test_coco_backends.py

_ALL_SIZES = 0  # index into COCOeval's area ranges


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
    backend: str,
    ground_truth: list[dict[str, Any]],
    detections: list[dict[str, Any]],
    *,
    num_images: int,
    num_categories: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes COCO's numbers.

    Args:
        backend: one of args.COCO_BACKENDS.
        ground_truth, detections: what to compare, as annotations of a COCO json, detections with a score. All
            ids are numbers from 1.
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

    def index(rows: list[dict[str, Any]]) -> COCO:
        coco = COCO()
        coco.dataset = {
            "images": [{"id": number} for number in range(1, num_images + 1)],
            "annotations": rows,
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
