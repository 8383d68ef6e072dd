"""Computes COCO metrics by pycocotools."""

import contextlib
import copy
import io

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval


def by_pycocotools(truth, detections):
    """Returns the 12 metrics, and the precision as an array (IoU, recall, class, area, max detections)."""
    truth, detections = copy.deepcopy((truth, detections))
    for annotation in truth["annotations"]:
        annotation["id"] += 1  # id 0 would mean "no match" in pycocotools
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        judge = COCOeval(coco, coco.loadRes(detections), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats, judge.eval["precision"]
