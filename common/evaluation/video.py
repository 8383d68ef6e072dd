"""Videos for infer.py: the frames as a data source, and the same video with boxes.

OpenCV decodes. Frames reach the network through the tf.data loader, which resizes and normalises them like
images.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from common import readers
from common.errors import UserError
from common.evaluation import coco_metrics, drawing
from common.files import write_file, writing
from common.labels import LabelMap
from common.progress import Bar, log
from common.sources import Source

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv")
_OPENCV = "opencv-python-headless"
_QUIET = {"OPENCV_LOG_LEVEL": "ERROR", "OPENCV_FFMPEG_LOGLEVEL": "-8"}  # AV_LOG_QUIET: the errors are ours
_CODEC = "mp4v"  # MPEG-4 part 2: every build of OpenCV writes it
_FALLBACK_RATE = 25.0  # frames a second, where the file names none


def is_video(path: str | os.PathLike) -> bool:
    """Whether a path names a video, by its suffix."""
    return pathlib.Path(path).suffix.lower() in SUFFIXES


@dataclasses.dataclass(frozen=True)
class VideoSource(Source):
    """The frames of one video, in order; image ids are frame numbers, from 0.

    Attributes:
        path: the file.
        num_frames: that can be decoded.
        frame_rate: frames a second.
        height, width: of the frames in pixels, as they are shown.
    """

    path: str
    num_frames: int
    frame_rate: float
    height: int
    width: int
    name = "video"
    annotations = None

    @property
    def size(self) -> int:
        return self.num_frames

    @property
    def fingerprint(self) -> str:
        return self.path  # no run is resumed on a video

    def frames(self) -> Iterator[np.ndarray]:
        """uint8 (H, W, 3) RGB, one frame after the other; `num_frames` of them."""
        with _open(self.path) as capture:
            for _ in range(self.num_frames):
                success, frame = capture.read()
                if not success:
                    raise UserError(f"--images={self.path}: the file has changed while it was read")
                yield frame[..., ::-1]  # BGR

    def encoded(self, row: int) -> bytes:
        return _to_png(next(itertools.islice(self.frames(), row, None)))

    def read(
        self, *, shard_id: int, num_shards: int, training: bool, seed: int, name: str = "reader"
    ) -> readers.Nodes:
        raise ValueError("a DALI graph given to TensorFlow cannot read from Python: use `examples`")

    def examples(self, *, shard_id: int, num_shards: int, training: bool, seed: int) -> tf.data.Dataset:
        if training or num_shards != 1:
            raise ValueError("a video is for inference, in one piece")
        encoded = tf.data.Dataset.from_generator(
            lambda: map(_to_png, self.frames()), output_signature=tf.TensorSpec((), tf.string)
        )
        return encoded.enumerate().map(
            lambda number, png: {
                "encoded": png,
                "boxes": tf.zeros((0, 4)),
                "labels": tf.zeros((0,), tf.int32),
                "image_id": number,
            }
        )


def open_video(path: str) -> VideoSource:
    """Decodes a whole video once, to count its frames.

    Raises:
        UserError: no decoder is installed, or there is nothing to decode.
    """
    if not os.path.isfile(path):
        raise UserError(f"--images={path}: there is no such file")
    cv2 = _opencv()
    with _open(path) as capture:
        success, first = capture.read()
        if not success:
            raise UserError(f"--images={path}: no frame of it can be decoded: it is damaged, or not a video")
        count = 1
        while capture.grab():
            count += 1
        promised = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        rate = capture.get(cv2.CAP_PROP_FPS)
    if promised > count:
        log(f"warning: only {count} of the {promised} frames of {path} can be decoded")
    rate = rate if np.isfinite(rate) and rate > 0 else _FALLBACK_RATE
    return VideoSource(path, count, rate, *first.shape[:2])


def write_video(path: str | os.PathLike, source: VideoSource, frames: Iterable[np.ndarray]) -> None:
    """Writes frames, uint8 (H, W, 3) RGB, of the size and rate of `source` to an .mp4 file.

    Raises:
        OSError: OpenCV cannot write there.
    """
    cv2 = _opencv()
    size = source.width, source.height
    writer = cv2.VideoWriter(os.fspath(path), cv2.VideoWriter_fourcc(*_CODEC), source.frame_rate, size)
    try:
        if not writer.isOpened():
            raise OSError(f"OpenCV cannot write a video to {path}")
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[..., ::-1]))
    finally:
        writer.release()


class VideoJob:
    """A video: the same video with boxes, and detections.json with the number and time of the frame.

    It has the attributes and methods of inference.PicturesJob.

    Args:
        source: the video.
        directory: for the results.
        least_score: of a detection that is drawn and written.
        draw: False writes detections.json alone.
    """

    pipeline_type = "tensorflow"

    def __init__(self, source: VideoSource, directory: pathlib.Path, least_score: float, draw: bool) -> None:
        self.source, self.least_score = source, least_score
        self._directory, self._draw = directory, draw

    def check_labels(self, label_map: LabelMap) -> None:
        """Any classes can be drawn."""

    def write(self, found: list[dict[str, Any]], label_map: LabelMap) -> list[dict[str, Any]]:
        path = pathlib.Path(self.source.path)
        results, by_frame = [], [[] for _ in range(self.source.size)]
        for result in found:
            frame = result["image_id"]
            if result["score"] >= self.least_score:
                by_frame[frame].append(result)
                seconds = round(frame / self.source.frame_rate, 3)
                results.append(result | {"frame": frame, "seconds": seconds, "file_name": path.name})
        what = "detections.json is"
        with writing(self._directory):
            coco_metrics.write_detections(results, self._directory / "detections.json")
            if self._draw:
                target = self._directory / f"{path.stem}.mp4"
                what = f"{target.name} and detections.json are"
                frames = self._with_boxes(by_frame, label_map)
                write_file(target, lambda temporary: write_video(temporary, self.source, frames))
        print(f"{len(results)} detections in {self.source.size} frames: {what} in {self._directory}")
        return results

    def _with_boxes(self, by_frame: list[list[dict[str, Any]]], label_map: LabelMap) -> Iterator[np.ndarray]:
        bar = Bar("drawing", self.source.size)
        for frame, results in zip(self.source.frames(), by_frame, strict=True):
            yield drawing.draw_results(frame, results, label_map)
            bar.step()


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """A cv2.VideoCapture; one that cannot open its file reads no frame."""
    capture = _opencv().VideoCapture(path)
    try:
        yield capture
    finally:
        capture.release()


def _opencv() -> ModuleType:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import cv2
    except ImportError as error:
        raise UserError(f"videos need OpenCV to decode them: pip install {_OPENCV}") from error
    return cv2


def _to_png(frame: np.ndarray) -> bytes:
    """PNG without compression: fast, and decoded again at once."""
    cv2 = _opencv()
    _, png = cv2.imencode(".png", np.ascontiguousarray(frame[..., ::-1]), [cv2.IMWRITE_PNG_COMPRESSION, 0])
    return png.tobytes()
