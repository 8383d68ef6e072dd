"""Indexes: DALI's own tool is the reference; anything stale is made again, and said."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from common import tfrecord
from common.datacheck.issues import DataError, Issues
from common.datacheck.tfrecord import expand_pattern, index_of, missing_shards, walk_files
from common.errors import UserError
from tests.common.record_writing import write

SIZES = (0, 1, 5, 300, 70_000)


@pytest.fixture
def file(tmp_path):
    return write_random(tmp_path / "data.tfrecord", SIZES)


def write_random(path, sizes):
    return write(path, *map(os.urandom, sizes))


def written_index(file):
    return pathlib.Path(f"{file}.idx").read_bytes()


def ensure(file):
    """The path of its index, and what was found of which kind."""
    issues = Issues("")
    path = index_of(tfrecord.walk(file), issues)
    return path, {issue.kind: issue.offenders for issue in issues}


def test_equals_the_index_of_dalis_tool(file, tmp_path):
    tool = pathlib.Path(sys.executable).parent / "tfrecord2idx"
    if not tool.exists():
        pytest.skip("DALI's tfrecord2idx is not installed beside python")
    subprocess.run([sys.executable, tool, file, tmp_path / "reference"], check=True, capture_output=True)
    assert tfrecord.write_index(file) == f"{file}.idx"
    assert written_index(file) == (tmp_path / "reference").read_bytes()
    assert len(written_index(file).splitlines()) == len(SIZES)


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 0],
        [0, 16, 16, 17],
        [9999, 10_000, 10_001, 99_999_999, 10**8, 10**8 + 1],
        [10**12, 40_000, 123_456_789_012, 9, 5, 10**16],
        [],
    ],
)
def test_numbers_of_any_length(numbers):
    spans = np.array(numbers, np.int64).reshape(-1, 2)
    text = "".join(f"{offset} {size}\n" for offset, size in spans.tolist())
    assert tfrecord.format_index(spans) == text.encode()


def test_a_good_index_is_left_alone(file):
    path = tfrecord.write_index(file)
    before = os.stat(path)
    os.utime(file)  # the index is older now, and still right
    assert ensure(file) == (path, {})
    assert os.stat(path).st_ino == before.st_ino
    assert ensure(file) == (path, {})


def test_a_missing_index_is_made_and_said(file):
    assert ensure(file) == (f"{file}.idx", {"index-made": [file]})
    assert len(written_index(file).splitlines()) == len(SIZES)


@pytest.mark.parametrize("sizes", [(*SIZES, 9), SIZES[1:], tuple(reversed(SIZES)), (5, 1, 0, 300, 70_000)])
def test_a_stale_index_is_made_again_and_said(file, sizes):
    """Grown, shrunk, and swapped for a file of equal length whose times look older than the index."""
    tfrecord.write_index(file)
    write_random(file, sizes)
    os.utime(file, (1, 1))
    assert ensure(file) == (f"{file}.idx", {"index-stale": [file]})
    right = written_index(file)
    tfrecord.write_index(file)
    assert written_index(file) == right
    assert len(right.splitlines()) == len(sizes)


def test_a_file_that_ends_before_its_index_was_copied_in_part(file):
    tfrecord.write_index(file)
    before = written_index(file)
    write_random(file, SIZES[:-2])
    issues = Issues("")
    walk_files([file], issues)
    assert issues["index-longer"].offenders == [
        f"{file} has 3 records, {pathlib.Path(file).name}.idx lists 5"
    ]
    assert written_index(file) == before
    for other in ((*SIZES[:2], 77), (*SIZES, 9), SIZES):  # changed, grown, and as it was
        write_random(file, other)
        issues = Issues("")
        walk_files([file], issues)
        assert not list(issues)


def test_missing_shards_are_known_by_the_names_of_the_others():
    names = ["a/x-00000-of-00003.tfrecord", "a/x-00002-of-00003.tfrecord", "b-1-of-2", "plain.tfrecord"]
    assert missing_shards(names) == ["a/x-00001-of-00003.tfrecord", "b-0-of-2"]
    assert missing_shards(["x-00000-of-00001.tfrecord"]) == []


@pytest.mark.parametrize("content", [b"", b"0 16\n", b"garbage", b"\xff\xff"])
def test_a_wrong_index_is_made_again_and_said(file, content):
    tfrecord.write_index(file)
    right = written_index(file)
    pathlib.Path(f"{file}.idx").write_bytes(content)
    assert ensure(file) == (f"{file}.idx", {"index-stale": [file]})
    assert written_index(file) == right


def test_wrong_in_one_digit_only(file):
    tfrecord.write_index(file)
    right = written_index(file)
    pathlib.Path(f"{file}.idx").write_bytes(right[:-2] + b"7\n")
    assert ensure(file)[1] == {"index-stale": [file]}
    assert written_index(file) == right


def test_a_pipe_in_place_of_an_index_is_not_waited_for(file):
    os.mkfifo(f"{file}.idx")
    assert ensure(file) == (f"{file}.idx", {"index-stale": [file]})
    assert len(written_index(file).splitlines()) == len(SIZES)


def test_where_no_index_can_be_written_it_goes_to_the_cache(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tfrecord.write_index(file)
    right = written_index(file)
    os.unlink(f"{file}.idx")
    os.mkdir(f"{file}.idx")  # stands for a read-only directory, which root could write all the same
    path, _ = ensure(file)
    assert path.startswith(str(tmp_path / "cache"))
    assert pathlib.Path(path).read_bytes() == right


def test_damaged_files_get_no_index(tmp_path):
    file = write_random(tmp_path / "a", SIZES)
    os.truncate(file, 100)
    with pytest.raises(UserError, match=f"{file} record 3 at byte 54 needs 316 bytes, 46 are left"):
        tfrecord.write_index(file)
    assert not list(tmp_path.glob("*.idx"))


def test_patterns(tmp_path):
    for name in ("b-1", "b-0", "b-0.idx", "b.label_map.json", "a-0", "c.pbtxt"):
        (tmp_path / name).touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b-2").touch()

    def names(pattern):
        return [os.path.relpath(file, tmp_path) for file in expand_pattern(pattern)]

    assert names(f"{tmp_path}/b*") == ["b-0", "b-1"]
    assert names(f"{tmp_path}/b*,{tmp_path}/a-?,{tmp_path}/b-0") == ["a-0", "b-0", "b-1"]
    assert names(f"{tmp_path}/a-0") == ["a-0"]
    assert names(f"{tmp_path}/**") == ["a-0", "b-0", "b-1", "deep/er/b-2"]
    assert names(f"{tmp_path}/**/b-*") == ["b-0", "b-1", "deep/er/b-2"]


def test_patterns_that_match_nothing_are_all_named(tmp_path):
    (tmp_path / "a-0").touch()
    with pytest.raises(UserError, match=f"no file matches: '{tmp_path}/z'"):
        expand_pattern(f"{tmp_path}/z")
    with pytest.raises(DataError) as error:
        expand_pattern(f"{tmp_path}/y*,{tmp_path}/a-0,{tmp_path}/z*")
    assert error.value.issues[0]["no-record-file"].offenders == [f"'{tmp_path}/y*'", f"'{tmp_path}/z*'"]
    for pattern in ("", ",", f"{tmp_path}/*.idx"):
        with pytest.raises(DataError, match=f"no file matches: '{pattern}'".replace("*", r"\*")):
            expand_pattern(pattern)


def test_what_is_no_file_is_not_dropped(tmp_path):
    (tmp_path / "b-0").touch()
    (tmp_path / "b-1").mkdir()
    os.mkfifo(tmp_path / "b-2")
    (tmp_path / "b-3").symlink_to("nowhere")
    files = expand_pattern(f"{tmp_path}/b-*")
    assert [os.path.basename(file) for file in files] == ["b-0", "b-1", "b-2", "b-3"]
