"""Reads the frames of a video as a data source for infer.py, and writes the video with boxes.

OpenCV decodes the frames on a CPU. If there is a GPU, DALI decodes them there (never run on a GPU).
"""

import fractions
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common.dali_ops import Nodes
from common.data.annotations import without_objects
from common.data.loader import gpu_visible
from common.data.sources import Source
from common.errors import UserError
from common.progress import log

# OpenCV logs only errors and FFmpeg nothing (-8: AV_LOG_QUIET).
_QUIET = {"OPENCV_LOG_LEVEL": "ERROR", "OPENCV_FFMPEG_LOGLEVEL": "-8"}
# The codec, which every build of OpenCV has: MPEG-4 part 2, or Motion JPEG for frames with an odd side, of
# which OpenCV's FFmpeg would cut off a row or a column.
_CODECS = {".mp4": "mp4v", ".avi": "MJPG"}
_LARGEST_AVI = 2**32 - 2**20  # bytes; sizes in an AVI file have 32 bits
_UNEVEN = 0.5  # difference of a frame's duration, relative to the others, that makes a frame rate variable
_FALLBACK_RATE = 25.0  # frames per second, if the file has no frame rate


class VideoSource(Source):
    """The frames of one video, in order, for the tf.data loader.

    Args:
        seconds: the time of each frame that can be decoded.
        frame_rate: frames per second of the video with boxes.
        height, width: size of the decoded frames in pixels.
    """

    name = "video"

    def __init__(
        self, path: str, seconds: Sequence[float], frame_rate: float, height: int, width: int
    ) -> None:
        self.path, self.frame_rate, self.height, self.width = path, frame_rate, height, width
        self.seconds = seconds
        self.annotations = without_objects([os.path.basename(path)] * len(seconds), path)
        self.files = [path]

    def read(self, *, training: bool, **options: Any) -> Nodes:
        raise UserError(f"--images={self.path}: DALI reads no videos; use --pipeline_type=tensorflow")

    def frame_facts(self) -> list[dict[str, Any]]:
        """Returns facts about each frame for detections.json."""
        name = os.path.basename(self.path)
        return [
            {"image_id": i, "frame": i, "seconds": round(seconds, 3), "file_name": name}
            for i, seconds in enumerate(self.seconds)
        ]

    def frames(self) -> Iterator[np.ndarray]:
        """Yields the frames in order, uint8 (H, W, 3) RGB."""
        if gpu_visible():
            frames = dali_frames(self.path, self.size, "gpu")
            try:
                first = next(frames)
            except RuntimeError as error:
                log(f"DALI cannot decode {self.path}, so OpenCV does: {' '.join(str(error).split())[:200]}")
            else:
                yield first
                yield from frames
                return
        capture = _opencv().VideoCapture(self.path)
        for _ in range(self.size):
            success, frame = capture.read()
            if not success:
                raise UserError(f"--images={self.path} changed during the run: try again")
            yield frame[..., ::-1]  # BGR -> RGB

    def examples(self, **_: Any) -> tf.data.Dataset:
        """Returns the frames in the format of tf_readers.examples."""
        frame_spec = tf.TensorSpec((self.height, self.width, 3), tf.uint8)
        frames = tf.data.Dataset.from_generator(self.frames, output_signature=frame_spec)
        boxes, labels = tf.zeros((0, 4)), tf.zeros((0,), tf.int32)

        def example(number: tf.Tensor, frame: tf.Tensor) -> dict[str, tf.Tensor]:
            png = tf.io.encode_png(frame, compression=0)  # lossless; the loader decodes it again
            return {"encoded": png, "boxes": boxes, "labels": labels, "image_id": number}

        return frames.enumerate().map(example)


def dali_frames(path: str, num_frames: int, device: str) -> Iterator[np.ndarray]:
    """Yields the frames that DALI decodes, uint8 (H, W, 3) RGB.

    Args:
        num_frames: the number of frames that OpenCV counted.
        device: "gpu"; or "cpu", which can only decode VP8, VP9 and Motion JPEG.

    Raises:
        RuntimeError: DALI cannot decode the file, or counts other frames.
    """

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=0 if device == "gpu" else None)  # type: ignore
    def graph() -> Any:
        return fn.experimental.readers.video(device=device, filenames=[path], sequence_length=1, name="video")

    pipeline = graph()
    pipeline.build()
    if (count := pipeline.epoch_size("video")) != num_frames:
        raise RuntimeError(f"DALI counts {count} frames instead of {num_frames}")
    for _ in range(num_frames):
        (sequences,) = pipeline.run()
        yield np.array(sequences.as_cpu().at(0)[0])


def open_video(path: str) -> VideoSource:
    """Decodes a whole video once, to count its frames and to read their times.

    Raises:
        UserError: OpenCV is not installed, or no frame can be decoded.
    """
    if not os.path.isfile(path):
        raise UserError(f"--images={path}: no such file")
    cv2 = _opencv()
    capture = cv2.VideoCapture(path)
    success, first = capture.read()
    if not success:
        raise UserError(f"--images={path} is damaged or not a video: no frame can be decoded")
    milliseconds = [capture.get(cv2.CAP_PROP_POS_MSEC)]
    while capture.grab():
        milliseconds.append(capture.get(cv2.CAP_PROP_POS_MSEC))
    count = len(milliseconds)
    rate, promised = capture.get(cv2.CAP_PROP_FPS), int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    if promised > count:
        log(f"warning: only {count} of the {promised} frames of {path} can be decoded")
    rate = rate if np.isfinite(rate) and rate > 0 else _FALLBACK_RATE
    seconds = np.array(milliseconds) / 1000
    steps = np.diff(seconds)
    if not (steps > 0).all():  # a file without times
        seconds = np.arange(count) / rate
    elif count > 1 and np.abs(steps * rate - 1).max() > _UNEVEN:
        rate = (count - 1) / (seconds[-1] - seconds[0])
        log(f"{path} has a variable frame rate: the video with boxes has {rate:.2f} frames per second")
    return VideoSource(path, seconds.tolist(), float(rate), *first.shape[:2])


def suffix_for(source: VideoSource) -> str:
    """Returns the suffix of a file that `write_video` can write with the size of `source`."""
    return ".avi" if source.width % 2 or source.height % 2 else ".mp4"


def write_video(path: str | os.PathLike, source: VideoSource, frames: Iterable[np.ndarray]) -> None:
    """Writes frames, uint8 (H, W, 3) RGB, with the size and frame rate of `source`.

    Args:
        path: a path that ends in `suffix_for(source)`.

    Raises:
        OSError: OpenCV cannot write there.
    """
    cv2 = _opencv()
    suffix, size = suffix_for(source), (source.width, source.height)
    is_avi = suffix == ".avi"
    backend, rate = (cv2.CAP_OPENCV_MJPEG, 1.0) if is_avi else (cv2.CAP_ANY, source.frame_rate)
    codec = cv2.VideoWriter_fourcc(*_CODECS[suffix])
    writer = cv2.VideoWriter(os.fspath(path), backend, codec, rate, size)
    try:
        if not writer.isOpened():
            raise OSError(f"OpenCV cannot write a video to {path}")
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[..., ::-1]))
    finally:
        writer.release()
    if is_avi:
        _set_rate(path, source.frame_rate)


def _set_rate(path: str | os.PathLike, frame_rate: float) -> None:
    """Sets the frames per second of an AVI file, of which OpenCV's writer of Motion JPEG knows only integers.

    Format: https://learn.microsoft.com/windows/win32/directshow/avi-riff-file-reference, AVIMAINHEADER and
    AVISTREAMHEADER.
    """
    if os.path.getsize(path) >= _LARGEST_AVI:
        raise OSError(f"{path} exceeds the 4 GB of an AVI file: cut the video to even sides, or into parts")
    rate, scale = fractions.Fraction(frame_rate).limit_denominator(1001).as_integer_ratio()
    with open(path, "r+b") as file:
        head = file.read(512)
        file.seek(head.index(b"avih") + 8)
        file.write(struct.pack("<I", round(1e6 / frame_rate)))  # microseconds per frame
        file.seek(head.index(b"strh") + 28)
        file.write(struct.pack("<II", scale, rate))


def _opencv() -> ModuleType:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import cv2
    except ImportError as error:
        raise UserError("videos need OpenCV to decode them: pip install opencv-python-headless") from error
    return cv2
