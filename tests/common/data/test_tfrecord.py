import gzip
import os
import pathlib
import runpy
import struct
import sys

import numpy as np
import pytest
import tensorflow as tf

from common.data import tfrecord
from common.data.check.issues import DataError, Issues
from common.data.check.tfrecord import expand_pattern, index_of, missing_shards, walk_files
from common.errors import UserError
from tests.common.record_writing import write

SIZES = (0, 1, 5, 300, 70_000)


@pytest.fixture
def file(tmp_path):
    return write_random(tmp_path / "data.tfrecord", SIZES)


def write_random(path, sizes):
    return write(path, *map(os.urandom, sizes))


def walk(path):
    issues = Issues("the set")
    (walked,) = walk_files([path], issues)
    return walked, issues


def only(issues):
    """Returns the kind and the offender of the only issue."""
    (issue,) = issues
    (offender,) = issue.offenders
    return issue.kind, offender


def header(length):
    """Returns a record's length and its checksum."""
    return struct.pack("<QI", length, tfrecord.masked_crc32c(struct.pack("<Q", length)))


# --- sound records ---


def test_the_checksum_is_that_of_the_published_vectors():
    # RFC 3720, appendix B.4, lists the CRC-32C of 32 bytes of 0, of 32 bytes of 255, and of 0 to 31.
    rows = [bytes(32), b"\xff" * 32, bytes(range(32))]
    crcs = (0x8A9136AA, 0x62A8AB43, 0x46DD794E)
    masked = [(((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF for crc in crcs]
    assert [tfrecord.masked_crc32c(row) for row in rows] == masked


@pytest.mark.parametrize("sizes", [SIZES, (100,) * 2000, (3 * 2**20, 0)], ids=["few", "small", "one large"])
def test_records_of_any_size_are_found_as_by_tensorflow(tmp_path, sizes):
    contents = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    path = write(tmp_path / "x", *contents)
    walked, issues = walk(path)
    assert not list(issues)
    content = (tmp_path / "x").read_bytes()
    ends = np.cumsum([size + 16 for size in sizes]).tolist()
    assert walked.spans.tolist() == [
        [end - size - 16, size + 16] for end, size in zip(ends, sizes, strict=True)
    ]
    assert walked.checksums.tolist() == [int.from_bytes(content[end - 4 : end], "little") for end in ends]
    assert (walked.path, walked.size) == (path, len(content))
    assert walked.mtime_ns == os.stat(path).st_mtime_ns
    found = [tfrecord.read_record(path, *span) for span in walked.spans.tolist()]
    assert found == contents == list(tf.data.TFRecordDataset(path).as_numpy_iterator())


def test_no_data_are_read(tmp_path):
    """The record claims to have 2**40 bytes."""
    path = tmp_path / "large"
    path.write_bytes(header(2**40))
    os.truncate(path, 2**40 + 16)
    walked, issues = walk(path)
    assert walked.spans.tolist() == [[0, 2**40 + 16]] and not list(issues)


def test_the_digest_stands_for_the_content_and_the_time_for_the_state(tmp_path):
    several = [(b"a", b"bc"), (b"ab", b"c"), (b"a", b"bd"), (b"bc", b"a"), (b"a", b"bc", b""), (b"a",)]
    one, *others = (walk(write(tmp_path / str(i), *contents))[0] for i, contents in enumerate(several))
    assert len({walked.digest for walked in (one, *others)}) == 6
    same = walk(write(tmp_path / "elsewhere", *several[0]))[0]
    assert one.digest == same.digest and one != same
    for time, is_equal in ((1, False), (one.mtime_ns, True)):
        os.utime(one.path, ns=(1, time))
        assert (walk(one.path)[0] == one) == is_equal


# --- damage ---


def flipped(byte):
    """One bit of byte number `byte` is wrong."""
    return bytes(value ^ 16 * (i == byte) for i, value in enumerate(header(17)))


BAD_ENDS = [
    (header(300)[:1], "file-truncated", "has 1 of the 12 bytes of its header"),
    (header(300)[:11], "file-truncated", "has 11 of the 12 bytes of its header"),
    (header(300), "file-truncated", "needs 316 bytes, but only 12 are left"),
    (header(300) + bytes(303), "file-truncated", "needs 316 bytes, but only 315 are left"),
    (header(2**31) + b"only this", "file-truncated", f"needs {2**31 + 16} bytes, but only 21 are left"),
    (header(2**64 - 1) + b"only this", "file-truncated", f"needs {2**64 + 15} bytes, but only 21 are left"),
    (bytes(50), "not-a-record", "has length 0 with the wrong checksum 0x00000000"),
    (b"\x1f\x8b" + bytes(48), "not-a-record", f"has length {0x8B1F} with"),  # begins with gzip's magic number
    *((flipped(i) + bytes(21), "not-a-record", f"has length {17 ^ 16 << 8 * i} with") for i in range(8)),
    *((flipped(i) + bytes(21), "not-a-record", "has length 17 with") for i in range(8, 12)),
]


@pytest.mark.parametrize(("tail", "kind", "text"), BAD_ENDS)
def test_a_bad_end_is_named_with_its_place(tmp_path, tail, kind, text):
    path = write(tmp_path / "x", *[bytes(300_000)] * 5)
    with open(path, "ab") as stream:
        stream.write(tail)
    walked, issues = walk(path)
    assert only(issues)[0] == kind
    assert only(issues)[1].startswith(f"{path} record 5 at byte {5 * 300_016} {text}")
    assert walked.spans[:, 0].tolist() == [i * 300_016 for i in range(5)] and len(walked.checksums) == 5


NO_RECORDS = {
    b"": "file-empty",
    b"no records here, only text": "not-a-record",
    gzip.compress(bytes(1000), mtime=0): "file-gzip",
    b"\x1f\x8b\x08": "file-gzip",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 8\n": "file-lfs-pointer",
}


def test_files_that_are_no_records(tmp_path):
    path = tmp_path / "x.tfrecord"
    for content, kind in NO_RECORDS.items():
        path.write_bytes(content)
        walked, issues = walk(path)
        assert only(issues)[0] == kind and only(issues)[1].startswith(str(path))
        assert walked.spans.shape == (0, 2)


@pytest.mark.parametrize("missing", [0, 1])
def test_records_that_begin_like_gzip_are_records(tmp_path, missing):
    path = write(tmp_path / "x", bytes(0x088B1F))
    os.truncate(path, os.path.getsize(path) - missing)
    walked, issues = walk(path)
    assert [issue.kind for issue in issues] == ["file-truncated"] * missing
    assert len(walked.spans) == 1 - missing


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, monkeypatch):
    def forbidden(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", path)

    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "x", b"abc")
    monkeypatch.setattr("builtins.open", forbidden)  # file modes would not stop root
    for name, words in (
        ("pipe", ": not a regular file"),
        (".", ": not a regular file"),
        ("absent", ": No such file or directory"),
        ("x", ": Permission denied"),
    ):
        path = os.path.join(tmp_path, name)
        assert only(walk(path)[1]) == ("file-unreadable", f"{path}{words}")


# --- indexes ---


def written_index(file):
    return pathlib.Path(f"{file}.idx").read_bytes()


def ensure(file):
    """Returns the index's path and {kind: offenders}."""
    issues = Issues("")
    path = index_of(tfrecord.walk(file), issues)
    return path, {issue.kind: issue.offenders for issue in issues}


@pytest.fixture
def right(file):
    assert tfrecord.write_index(file) == f"{file}.idx"
    return written_index(file)


def test_equals_the_index_of_dalis_tool(file, right, tmp_path, monkeypatch):
    tool = pathlib.Path(sys.executable).parent / "tfrecord2idx"
    if not tool.exists():
        pytest.skip("DALI's tfrecord2idx is not installed beside python")
    monkeypatch.setattr(sys, "argv", [str(tool), file, str(tmp_path / "reference")])
    runpy.run_path(str(tool))
    assert right == (tmp_path / "reference").read_bytes()
    assert len(right.splitlines()) == len(SIZES)


def test_an_index_holds_numbers_of_any_length():
    spans = np.array([[10**12, 40_000], [123_456_789_012, 9], [5, 10**16]])
    expected = b"1000000000000 40000\n123456789012 9\n5 10000000000000000\n"
    assert tfrecord.format_index(spans) == expected
    assert tfrecord.format_index(np.zeros((0, 2), np.int64)) == b""


def test_a_good_index_is_left_alone(file, right):
    before = os.stat(f"{file}.idx")
    os.utime(file)
    assert ensure(file) == (f"{file}.idx", {})
    assert os.stat(f"{file}.idx").st_ino == before.st_ino


@pytest.mark.parametrize("index", [b"", b"\xff\xff", b"0 16\n16 17\n33 21\n54 316\n370 70017\n"])
def test_a_wrong_index_is_made_again_and_said(file, right, index):
    pathlib.Path(f"{file}.idx").write_bytes(index)
    assert ensure(file) == (f"{file}.idx", {"index-stale": [file]})
    assert written_index(file) == right


@pytest.mark.parametrize("sizes", [(*SIZES, 9), SIZES[1:], (5, 1, 0, 300, 70_000)])
def test_the_index_of_a_changed_file_is_made_again_and_said(file, right, sizes):
    write_random(file, sizes)
    os.utime(file, (1, 1))
    assert ensure(file) == (f"{file}.idx", {"index-stale": [file]})
    spans = tfrecord.walk(file).spans.tolist()
    assert written_index(file).decode() == "".join(f"{offset} {size}\n" for offset, size in spans)
    assert len(spans) == len(sizes)


def test_a_missing_index_is_made_and_said_and_a_pipe_in_its_place_is_not_waited_for(file):
    for kind in ("index-made", "index-stale"):
        assert ensure(file) == (f"{file}.idx", {kind: [file]})
        assert len(written_index(file).splitlines()) == len(SIZES)
        os.unlink(f"{file}.idx")
        os.mkfifo(f"{file}.idx")


def test_a_file_that_ends_before_its_index_was_copied_in_part(file, right):
    write_random(file, SIZES[:-2])
    name = pathlib.Path(file).name
    assert only(walk(file)[1]) == ("index-longer", f"{file} has 3 records, {name}.idx lists 5")
    assert written_index(file) == right
    for other in ((*SIZES[:2], 77), (*SIZES, 9), SIZES):
        write_random(file, other)
        assert not list(walk(file)[1])


def test_where_no_index_can_be_written_it_goes_to_the_cache(file, right, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    os.unlink(f"{file}.idx")
    os.mkdir(f"{file}.idx")  # prevents writing, even by root
    path = pathlib.Path(ensure(file)[0])
    assert path.parent == tmp_path / "cache" / "dali-detection" and path.read_bytes() == right


def test_damaged_files_get_no_index(tmp_path):
    file = write_random(tmp_path / "a", SIZES)
    os.truncate(file, 100)
    with pytest.raises(UserError, match=f"{file} record 3 at byte 54 needs 316 bytes, but only 46 are left"):
        tfrecord.write_index(file)
    assert not list(tmp_path.glob("*.idx"))


# --- patterns ---


def test_patterns(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b-1", "b-0", "b-0.idx", "b.label_map.json", "a-0", "c.pbtxt", "deep/er/b-2"):
        (tmp_path / name).touch()

    def names(pattern):
        return [os.path.relpath(file, tmp_path) for file in expand_pattern(pattern)]

    assert names(f"{tmp_path}/b*, {tmp_path}/a-?,{tmp_path}/b-0") == ["a-0", "b-0", "b-1"]
    assert names(f"{tmp_path}/**") == ["a-0", "b-0", "b-1", "deep/er/b-2"]
    # A pattern without `**` also finds directories, pipes and broken links, which give an error when read.
    (tmp_path / "b-3").mkdir()
    os.mkfifo(tmp_path / "b-4")
    (tmp_path / "b-5").symlink_to("nowhere")
    assert names(f"{tmp_path}/b-*") == ["b-0", "b-1", "b-3", "b-4", "b-5"]


def test_patterns_that_match_nothing_are_all_named(tmp_path):
    (tmp_path / "a-0").touch()
    with pytest.raises(DataError) as error:
        expand_pattern(f"{tmp_path}/y*,{tmp_path}/a-0,{tmp_path}/z*")
    assert error.value.issues[0]["no-record-file"].offenders == [f"'{tmp_path}/y*'", f"'{tmp_path}/z*'"]
    for pattern in ("", ",", f"{tmp_path}/*.idx", f"{tmp_path}/z"):
        with pytest.raises(DataError, match=f"no file matches: '{pattern}'".replace("*", r"\*")):
            expand_pattern(pattern)


def test_missing_shards_are_known_by_the_names_of_the_others():
    names = ["a/x-00000-of-00003.tfrecord", "a/x-00002-of-00003.tfrecord", "b-1-of-2", "plain.tfrecord"]
    assert missing_shards(names) == ["a/x-00001-of-00003.tfrecord", "b-0-of-2"]
    assert missing_shards(["x-00000-of-00001.tfrecord"]) == []
