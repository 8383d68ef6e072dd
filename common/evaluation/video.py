"""Videos: frames for a detector, and the same video with boxes.

OpenCV decodes. Frames reach the network through the plain tf.data twin of the loaders, so that they are
resized and normalised as any image is.
"""

import dataclasses
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import tensorflow as tf

from common import readers
from common.errors import UserError
from common.sources import Source

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv")
_OPENCV = "opencv-python-headless"
_QUIET = {"OPENCV_LOG_LEVEL": "ERROR", "OPENCV_FFMPEG_LOGLEVEL": "-8"}  # AV_LOG_QUIET: we say it ourselves
_CODEC = "mp4v"  # MPEG-4 part 2: every build of OpenCV writes it
_FALLBACK_RATE = 25.0  # frames a second, where a file does not know


def is_video(path: str | os.PathLike) -> bool:
    """Whether a path names a video, by its suffix."""
    return pathlib.Path(path).suffix.lower() in SUFFIXES


@dataclasses.dataclass(frozen=True)
class VideoSource(Source):
    """The frames of one video, in order; image ids are frame numbers, from 0.

    Attributes:
        path: the file.
        num_frames: that can be decoded.
        promised: how many the file says it has; 0 where it does not say.
        frame_rate: frames a second.
        height, width: of the frames in pixels, as they are shown.
    """

    path: str
    num_frames: int
    promised: int
    frame_rate: float
    height: int
    width: int
    name = "video"

    @property
    def size(self) -> int:
        return self.num_frames

    @property
    def annotations(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        with open(self.path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def frames(self) -> Iterator[np.ndarray]:
        """uint8 (H, W, 3) RGB, one frame after the other; `num_frames` of them."""
        cv2 = _opencv()
        capture = cv2.VideoCapture(self.path)
        try:
            for _ in range(self.num_frames):
                there, frame = capture.read()
                if not there:
                    raise UserError(f"--images={self.path}: it has changed while it was read")
                yield frame[..., ::-1]  # BGR
        finally:
            capture.release()

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
    """Looks at a video: what it says of itself, and how many frames can be decoded (all of them are).

    Raises:
        UserError: no decoder is installed, or there is nothing to decode.
    """
    if not os.path.isfile(path):
        raise UserError(f"--images={path}: there is no such file")
    cv2 = _opencv()
    capture = cv2.VideoCapture(path)
    try:
        count, there, first = 0, *(capture.read() if capture.isOpened() else (False, None))
        while there:
            count += 1
            there = capture.grab()
        promised = max(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        rate = capture.get(cv2.CAP_PROP_FPS)
    finally:
        capture.release()
    if not count:
        raise UserError(f"--images={path}: no frame of it can be decoded: it is damaged, or no video")
    rate = rate if np.isfinite(rate) and rate > 0 else _FALLBACK_RATE
    return VideoSource(path, count, promised, rate, *first.shape[:2])


class VideoWriter:
    """Writes frames of one size to an .mp4 file.

    Args:
        path: the file; whoever wants all or nothing gives a temporary one.
        source: of what the frames are; they have its size and rate.

    Raises:
        OSError: OpenCV cannot write there.
    """

    def __init__(self, path: str | os.PathLike, source: VideoSource) -> None:
        cv2 = _opencv()
        code = cv2.VideoWriter_fourcc(*_CODEC)
        self._writer = cv2.VideoWriter(
            os.fspath(path), code, source.frame_rate, (source.width, source.height)
        )
        if not self._writer.isOpened():
            raise OSError(f"OpenCV cannot write a video to {path}")

    def add(self, frame: np.ndarray) -> None:
        """One more frame, uint8 (H, W, 3) RGB."""
        self._writer.write(np.ascontiguousarray(frame[..., ::-1]))

    def close(self) -> None:
        self._writer.release()


def _opencv() -> ModuleType:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import cv2
    except ImportError as error:
        raise UserError(f"videos need OpenCV to decode them: pip install {_OPENCV}") from error
    return cv2


def _to_png(frame: np.ndarray) -> bytes:
    """Without loss and hardly compressed: it lives for a moment."""
    cv2 = _opencv()
    _, png = cv2.imencode(".png", np.ascontiguousarray(frame[..., ::-1]), [cv2.IMWRITE_PNG_COMPRESSION, 0])
    return png.tobytes()
