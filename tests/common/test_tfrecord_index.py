"""Indexes: DALI's own tool is the reference; anything stale is made again, anything damaged is refused."""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from common import tfrecord_index
from common.errors import UserError

SIZES = (0, 1, 5, 300, 70_000)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "data.tfrecord", SIZES)


def write(path, sizes):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for size in sizes:
            writer.write(os.urandom(size))
    return path


def index_of(file):
    return pathlib.Path(f"{file}.idx").read_bytes()


def test_equals_the_index_of_dalis_tool(file, tmp_path):
    tool = pathlib.Path(sys.executable).parent / "tfrecord2idx"
    if not tool.exists():
        pytest.skip("DALI's tfrecord2idx is not installed beside python")
    subprocess.run([sys.executable, tool, file, tmp_path / "reference"], check=True, capture_output=True)
    assert tfrecord_index.write_index(file) == f"{file}.idx"
    assert index_of(file) == (tmp_path / "reference").read_bytes()
    assert len(index_of(file).splitlines()) == len(SIZES)


def test_the_checksum_is_that_of_the_published_vector():
    # RFC 3720 appendix B.4 gives CRC-32C of 32 zeros, 0x8a9136aa; the mask is that of crc32c.h.
    crc = 0x8A9136AA
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert tfrecord_index.masked_crc32c(bytes(32)) == masked


def test_a_good_index_is_left_alone(file):
    (path,) = tfrecord_index.ensure_indexes([file])
    before = os.stat(path)
    os.utime(file)  # the index is older now, and still right
    assert tfrecord_index.ensure_indexes([file]) == [path]
    assert os.stat(path).st_ino == before.st_ino


@pytest.mark.parametrize("sizes", [(*SIZES, 9), SIZES[:-1], tuple(reversed(SIZES)), (5, 1, 0, 300, 70_000)])
def test_a_stale_index_is_made_again(file, sizes):
    """Grown, shrunk, and swapped for a file of equal length whose times look older than the index."""
    tfrecord_index.ensure_indexes([file])
    write(file, sizes)
    os.utime(file, (1, 1))
    tfrecord_index.ensure_indexes([file])
    right = index_of(file)
    tfrecord_index.write_index(file)
    assert index_of(file) == right
    assert len(right.splitlines()) == len(sizes)


@pytest.mark.parametrize("content", [b"", b"0 16\n", b"garbage", b"\xff\xff"])
def test_a_wrong_index_is_made_again(file, content):
    tfrecord_index.write_index(file)
    right = index_of(file)
    pathlib.Path(f"{file}.idx").write_bytes(content)
    tfrecord_index.ensure_indexes([file])
    assert index_of(file) == right


def test_where_no_index_can_be_written_it_goes_to_the_cache(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tfrecord_index.write_index(file)
    right = index_of(file)
    os.unlink(f"{file}.idx")
    os.mkdir(f"{file}.idx")  # stands for a read-only directory, which root could write all the same
    (path,) = tfrecord_index.ensure_indexes([file])
    assert path.startswith(str(tmp_path / "cache"))
    assert pathlib.Path(path).read_bytes() == right


@pytest.mark.parametrize("missing", [1, 3, 4, 5, 100, 70_000, 70_004, 70_010, 70_015])
def test_a_truncated_file_is_refused(file, missing):
    content = file.read_bytes()
    file.write_bytes(content[:-missing])
    offset = sum(SIZES[:-1]) + 16 * (len(SIZES) - 1)
    with pytest.raises(UserError, match=f"{file} is cut off.* at byte {offset}"):
        tfrecord_index.ensure_indexes([file])
    assert not os.path.exists(f"{file}.idx")


@pytest.mark.parametrize("byte", [0, 3, 7, 8, 11])
def test_a_flipped_bit_in_a_length_is_found(file, byte):
    content = bytearray(file.read_bytes())
    content[16 + byte] ^= 0x10  # the header of the second record
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} holds no TFRecord at byte 16 .record 1."):
        tfrecord_index.record_spans(file)


def test_files_that_are_no_records(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="empty is empty"):
        tfrecord_index.record_spans(tmp_path / "empty")
    (tmp_path / "text").write_text("no records here, only text")
    with pytest.raises(UserError, match="text holds no TFRecord at byte 0"):
        tfrecord_index.record_spans(tmp_path / "text")
    with pytest.raises(UserError, match="nowhere: No such file"):
        tfrecord_index.record_spans(tmp_path / "nowhere")


def test_patterns(tmp_path):
    for name in ("b-1", "b-0", "b-0.idx", "b.label_map.json", "a-0", "c.pbtxt"):
        (tmp_path / name).touch()
    (tmp_path / "b-dir").mkdir()

    def names(pattern):
        return [os.path.basename(file) for file in tfrecord_index.expand_pattern(pattern)]

    assert names(f"{tmp_path}/b*") == ["b-0", "b-1"]
    assert names(f"{tmp_path}/b*,{tmp_path}/a-?,{tmp_path}/b-0") == ["a-0", "b-0", "b-1"]
    assert names(f"{tmp_path}/a-0") == ["a-0"]
    for pattern in (f"{tmp_path}/z*", f"{tmp_path}/a-0,{tmp_path}/z*", f"{tmp_path}/b-dir"):
        with pytest.raises(
            UserError, match=f"no file matches '{pattern.split(',')[-1]}'".replace("*", r"\*")
        ):
            tfrecord_index.expand_pattern(pattern)
    with pytest.raises(UserError, match="no file matches ','"):
        tfrecord_index.expand_pattern(",")
