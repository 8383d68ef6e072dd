"""Detects objects from Python with a trained EfficientDet.

    from efficientdet import detector

    detect = detector.load("runs/mine")
    for boxes_px, scores, class_names in detect(["a.jpg", "b.jpg"]):
        ...

The detections are those of infer.py.
"""

import os

from common.progress import import_tensorflow

import_tensorflow()  # first, because it sets what TensorFlow reads during its import

from common.distributed.start import share_gpu_memory
from common.evaluation.detectors import open_detector
from common.evaluation.image_detector import BATCH_SIZE, ImageDetector
from efficientdet.loaders import make_loader
from efficientdet.predict import APP


def load(
    weights: str | os.PathLike,
    *,
    image_size: str | None = None,
    hparams: str | None = None,
    batch_size: int = BATCH_SIZE,
) -> ImageDetector:
    """Opens a detector. The arguments are those of infer.py's flags.

    Args:
        weights: a run directory, a `.weights.h5` file or an exported file.
        image_size: N or HxW, to run the model at another size.
        hparams: settings of detection, such as "nms_iou=0.5".
        batch_size: images that the network gets at once.

    Raises:
        UserError: the file is missing, damaged or of another app, or an argument cannot be used.
    """
    share_gpu_memory()
    detector = open_detector(APP, os.fspath(weights), image_size, hparams)
    return ImageDetector(detector, make_loader, batch_size)
