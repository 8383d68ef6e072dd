"""Tests the reading and writing of videos with clips that OpenCV wrote."""

import sys

import numpy as np
import pytest

from common.args import VIDEO_SUFFIXES
from common.evaluation import video
from tests.refusal import refusal

cv2 = pytest.importorskip("cv2")

SIZE = (64, 96)
COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (30, 200, 200)]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("video") / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, SIZE[::-1])
    for colour in COLOURS:
        writer.write(np.full((*SIZE, 3), colour[::-1], np.uint8))
    writer.release()
    return path


def test_video_frames_are_read_in_order_as_rgb(clip):
    source = video.open_video(str(clip))
    assert (source.size, source.height, source.width, source.frame_rate) == (5, 64, 96, 10)
    for frame, colour in zip(source.frames(), COLOURS, strict=True):
        np.testing.assert_allclose(frame.mean((0, 1)), colour, atol=12)


def test_written_video_has_the_frames_size_and_rate_of_its_source(clip, tmp_path):
    source = video.open_video(str(clip))
    video.write_video(tmp_path / "out.mp4", source, source.frames())
    copy = video.open_video(str(tmp_path / "out.mp4"))
    assert (copy.size, copy.height, copy.width, copy.frame_rate) == (5, 64, 96, 10)
    for frame, colour in zip(copy.frames(), COLOURS, strict=True):
        np.testing.assert_allclose(frame.mean((0, 1)), colour, atol=20)


@pytest.mark.parametrize(("size", "rate"), [((63, 97), 30000 / 1001), ((64, 97), 0.4), ((63, 96), 25.0)])
def test_written_video_of_an_odd_size_keeps_its_size_frames_and_rate(tmp_path, size, rate):
    frames = [np.full((*size, 3), colour, np.uint8) for colour in COLOURS]
    source = video.VideoSource("clip.mov", [i / rate for i in range(5)], rate, *size)
    path = str(tmp_path / f"out{video.suffix_for(source)}")
    video.write_video(path, source, frames)
    copy = video.open_video(path)
    assert (copy.size, copy.height, copy.width) == (5, *size)
    assert copy.frame_rate == pytest.approx(rate, rel=1e-6)
    for frame, colour in zip(copy.frames(), COLOURS, strict=True):
        np.testing.assert_allclose(frame.mean((0, 1)), colour, atol=12)


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_of_a_video_with_a_variable_frame_rate_have_their_own_times(tmp_path, suffix, capsys):
    path, ticks = str(tmp_path / f"clip.{suffix}"), [0, 1, 2, 5, 20]  # tenths of a second
    options = [cv2.VIDEOWRITER_PROP_RAW_VIDEO, 1]  # the frames are JPEGs, and have the times that are set
    writer = cv2.VideoWriter(path, cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*"MJPG"), 10, SIZE[::-1], options)
    for tick, colour in zip(ticks, COLOURS, strict=True):
        writer.set(cv2.VIDEOWRITER_PROP_PTS, tick)
        writer.write(cv2.imencode(".jpg", np.full((*SIZE, 3), colour[::-1], np.uint8))[1].reshape(1, -1))
    writer.release()
    source = video.open_video(path)
    assert [facts["seconds"] for facts in source.frame_facts()] == [0.0, 0.1, 0.2, 0.5, 2.0]
    assert source.frame_rate == pytest.approx(4 / 2.0)
    assert "has a variable frame rate: the video with boxes has 2.00 frames" in capsys.readouterr().err
    for frame, colour in zip(source.frames(), COLOURS, strict=True):
        np.testing.assert_allclose(frame.mean((0, 1)), colour, atol=12)


def test_dali_decodes_the_frames_that_opencv_decodes(clip):
    """DALI's CPU decoder runs the graph of the GPU for Motion JPEG."""
    source = video.open_video(str(clip))
    frames = list(video.dali_frames(str(clip), source.size, "cpu"))
    for frame, expected in zip(frames, source.frames(), strict=True):
        assert frame.shape == expected.shape and frame.dtype == np.uint8
        np.testing.assert_allclose(frame.astype(int), expected.astype(int), atol=6)
    with pytest.raises(RuntimeError, match="counts 5 frames instead of 4"):
        next(video.dali_frames(str(clip), 4, "cpu"))


@pytest.mark.parametrize("suffix", ["3gp", "ts", "flv"])
def test_videos_of_phones_cameras_and_the_web_are_read(tmp_path, suffix):
    path = str(tmp_path / f"clip.{suffix}")
    code = cv2.VideoWriter_fourcc(*("FLV1" if suffix == "flv" else "mp4v"))
    writer = cv2.VideoWriter(path, cv2.CAP_FFMPEG, code, 10, SIZE[::-1])
    for colour in COLOURS:
        writer.write(np.full((*SIZE, 3), colour, np.uint8))
    writer.release()
    assert f".{suffix}" in VIDEO_SUFFIXES and video.open_video(path).size == 5


@pytest.mark.parametrize("content", [b"", b"no video at all" * 99, "cut"], ids=["empty", "text", "truncated"])
def test_damaged_video_is_refused_with_its_file_name(clip, tmp_path, content):
    path = tmp_path / "bad.avi"
    path.write_bytes(clip.read_bytes()[:300] if content == "cut" else content)
    assert "bad.avi is damaged or not a video" in refusal(video.open_video, str(path))


def test_truncated_video_is_opened_with_a_warning_about_missing_frames(clip, tmp_path, capsys):
    path = tmp_path / "short.avi"
    content = clip.read_bytes()
    path.write_bytes(content[: content.rindex(b"00dc", 0, content.index(b"idx1"))])
    assert video.open_video(str(path)).size == 4
    assert f"warning: only 4 of the 5 frames of {path} can be decoded" in capsys.readouterr().err


def test_video_without_opencv_is_refused_with_the_package_to_install(clip, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert "pip install opencv-python-headless" in refusal(video.open_video, str(clip))
