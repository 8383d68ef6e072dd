"""Detects objects from Python, in image files and in arrays. Each app's detector.py makes the detector."""

import dataclasses
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from nvidia.dali import fn, types

from common.args import ImagePolicy, InferArgs
from common.dali_ops import Nodes
from common.data.annotations import without_objects
from common.data.check.images import inspect
from common.data.check.issues import KINDS
from common.data.sources import Source
from common.errors import UserError
from common.evaluation import coco_metrics
from common.evaluation.detectors import Detector
from common.files import user_errors

Image = str | os.PathLike | np.ndarray
MIN_SCORE = InferArgs.score_threshold
BATCH_SIZE = InferArgs.batch_size


class Detections(NamedTuple):
    """The objects in one image, the highest score first.

    Attributes:
        boxes_px: float32 (N, 4), left, top, right, bottom in pixels of the image, rounded to 0.01.
        scores: float32 (N,).
        class_names: str (N,).
    """

    boxes_px: np.ndarray
    scores: np.ndarray
    class_names: np.ndarray


class ImageDetector:
    """A trained detector. It gives the detections of infer.py. Calls from other threads wait for each other.

    Attributes:
        class_names: the names of all trained classes, in order.
        image_size: (height, width) of the network input.

    Args:
        detector: the opened weights or exported file.
        make_loader: the app's function in loaders.py. DALI decodes and resizes on the CPU.
        batch_size: images that the network gets at once.

    Raises:
        UserError: `batch_size` is not a positive integer.
    """

    def __init__(
        self, detector: Detector, make_loader: Callable[..., Any], batch_size: int = BATCH_SIZE
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"batch_size={batch_size!r}: give an integer of at least 1")
        self._detect, config, self._label_map, _ = detector
        self._batch_size = batch_size
        self._lock = threading.Lock()  # two threads in one DALI pipeline would wait for each other for ever
        self._loader = make_loader(
            "dali_cpu",
            source=_EncodedImages(),
            config=config,
            batch_size=batch_size,
            training=False,
            with_targets=False,
            prefetch=1,  # DALI must not wait for the next images
        )
        self.class_names, self.image_size = self._label_map.names, config.image_size

    def __call__(
        self, images: Image | Iterable[Image], score_threshold: float = MIN_SCORE
    ) -> list[Detections]:
        """Detects objects.

        Args:
            images: paths of image files, or arrays, uint8 (h, w, 3) RGB, or one array (B, h, w, 3). A single
                path or array is a list of one. Like infer.py, this ignores the EXIF orientation of files.
            score_threshold: the lowest score to return, from 0 to 1.

        Returns:
            The detections of each image, in the order of `images`.

        Raises:
            UserError: a file cannot be read, an array has another shape or dtype, `score_threshold` is not
                from 0 to 1, or the network's output is not finite.
        """
        if not 0 <= score_threshold <= 1:  # or NaN
            raise UserError(f"score_threshold={score_threshold}: give a number from 0 to 1")
        if (
            isinstance(images, str | os.PathLike)
            or (isinstance(images, np.ndarray) and images.ndim != 4)
            or not isinstance(images, Iterable)
        ):
            images = [images]
        images, detections = list(images), []
        for start in range(0, len(images), self._batch_size):
            with self._lock:
                detections += self._detect_batch(images[start : start + self._batch_size], score_threshold)
        return detections

    def _detect_batch(self, images: Sequence[Image], score_threshold: float) -> list[Detections]:
        encoded = list(map(_encode, images))
        pipeline = self._loader.pipeline
        pipeline.feed_input(_EncodedImages.name, encoded)
        try:
            outputs = dict(zip(self._loader.element_spec, pipeline.run(), strict=True))
        except RuntimeError:
            self._loader = dataclasses.replace(self._loader)  # DALI's pipeline is no longer usable
            for image, each in zip(images, encoded, strict=True):
                if not isinstance(image, np.ndarray):
                    _check(image, each.tobytes(), ImagePolicy(decode=True))
            raise
        batch = {name: np.array(outputs[name].as_array()) for name in ("images", "image_sizes", "letterbox")}
        boxes, scores, classes, finite = map(np.asarray, self._detect(batch["images"], batch["letterbox"]))
        if not finite.all():
            raise UserError("the network's output is not finite: the weights are damaged or diverged")
        rows = np.arange(len(encoded))
        results = coco_metrics.to_results(
            boxes, scores, classes, rows, batch["image_sizes"], self._label_map, seen=set()
        )
        return [self._detections(results, row, score_threshold) for row in rows.tolist()]

    def _detections(self, results: list[dict[str, Any]], row: int, score_threshold: float) -> Detections:
        """Returns the detections of image `row`, from COCO results."""
        objects = [each for each in results if each["image_id"] == row and each["score"] >= score_threshold]
        boxes_ltwh_px = np.array([each["bbox"] for each in objects]).reshape(-1, 4)
        left_top, sides = np.split(boxes_ltwh_px, 2, axis=1)
        names = dict(zip(self._label_map.category_ids, self._label_map.names, strict=True))
        return Detections(
            boxes_px=np.concatenate([left_top, left_top + sides], axis=1).astype(np.float32),
            scores=np.array([each["score"] for each in objects], np.float32),
            class_names=np.array([names[each["category_id"]] for each in objects], np.str_),
        )


class _EncodedImages(Source):
    """Encoded images that are fed to the DALI graph, instead of files that it reads."""

    name = "encoded"

    def __init__(self) -> None:
        self.files, self.annotations = [], without_objects([], "images")

    def read(self, **_: Any) -> Nodes:
        encoded = fn.external_source(name=self.name, dtype=types.UINT8, ndim=1)
        boxes, labels = fn.zeros(shape=[0, 4], dtype=types.FLOAT), fn.zeros(shape=[0], dtype=types.INT32)
        return encoded, boxes, labels, fn.zeros(shape=[], dtype=types.INT64)


def _encode(image: Image) -> np.ndarray:
    """Returns the bytes of an image file, or of an array as a PPM file; raises UserError."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise UserError(
                f"an array has the shape {image.shape} and dtype {image.dtype}: give uint8 (h, w, 3) RGB, or "
                "(B, h, w, 3)"
            )
        header = b"P6 %d %d 255\n" % (image.shape[1], image.shape[0])
        return np.frombuffer(header + image.tobytes(), np.uint8)
    if not isinstance(image, str | os.PathLike):
        raise UserError(f"an image is a {type(image).__name__}: give paths of image files, or NumPy arrays")
    path = pathlib.Path(image)
    with user_errors(f"{path} cannot be read"):
        if not path.is_file():
            kind = "a directory" if path.is_dir() else "no file"
            raise UserError(f"{path} is {kind}: give paths of image files")
        encoded = path.read_bytes()
    _check(path, encoded)
    return np.frombuffer(encoded, np.uint8)


def _check(path: str | os.PathLike, encoded: bytes, policy: ImagePolicy = ImagePolicy()) -> None:
    """Raises UserError if DALI cannot decode the file."""
    facts = inspect(encoded, policy)
    if facts.fault:
        kind = KINDS[facts.fault]
        detail = f" ({facts.detail})" if facts.detail else ""
        raise UserError(f"{os.fspath(path)}: {kind.what}{detail}: {kind.remedy}")
