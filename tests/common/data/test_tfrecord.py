"""Record files against TensorFlow's and DALI's own tools: records, damage, indexes and file patterns."""

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
    """A file with random records of SIZES bytes."""
    return write_random(tmp_path / "data.tfrecord", SIZES)


def write_random(path, sizes):
    return write(path, *map(os.urandom, sizes))


def walk(path):
    issues = Issues("the set")
    (walked,) = walk_files([path], issues)
    return walked, issues


def only_issue(issues):
    """Returns the kind and the offender of the only issue."""
    (issue,) = issues
    (offender,) = issue.offenders
    return issue.kind, offender


def header(length):
    """Returns a record's length and its checksum."""
    return struct.pack("<QI", length, tfrecord.masked_crc32c(struct.pack("<Q", length)))


# --- sound records ---


def test_masked_crc32c_of_published_vectors_equals_rfc_3720():
    # RFC 3720, appendix B.4, lists the CRC-32C of 32 bytes of 0, of 32 bytes of 255, and of 0 to 31.
    rows = [bytes(32), b"\xff" * 32, bytes(range(32))]
    crcs = (0x8A9136AA, 0x62A8AB43, 0x46DD794E)
    masked = [(((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF for crc in crcs]
    assert [tfrecord.masked_crc32c(row) for row in rows] == masked


def test_walk_over_a_tfrecord_file_finds_the_records_and_checksums_that_tensorflow_reads(tmp_path):
    sizes = (*SIZES, 3 * 2**20, 0)
    contents = [bytes([i]) * size for i, size in enumerate(sizes)]
    path = write(tmp_path / "x", *contents)
    walked, issues = walk(path)
    assert not list(issues)
    content = (tmp_path / "x").read_bytes()
    frames = [size + 16 for size in sizes]
    stops = np.cumsum(frames).tolist()
    assert walked.spans.tolist() == [[stop - frame, frame] for stop, frame in zip(stops, frames, strict=True)]
    assert walked.checksums.tolist() == [int.from_bytes(content[stop - 4 : stop], "little") for stop in stops]
    assert (walked.path, walked.size) == (path, len(content))
    assert walked.mtime_ns == os.stat(path).st_mtime_ns
    records = [tfrecord.read_record(path, *span) for span in walked.spans.tolist()]
    assert records == contents == list(tf.data.TFRecordDataset(path).as_numpy_iterator())


def test_walk_over_a_tfrecord_file_with_a_record_of_2_to_the_40_bytes_reads_only_its_header(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(header(2**40))
    os.truncate(path, 2**40 + 16)
    walked, issues = walk(path)
    assert walked.spans.tolist() == [[0, 2**40 + 16]] and not list(issues)


def test_tfrecord_file_objects_have_a_digest_of_their_records_and_differ_by_path_or_mtime(tmp_path):
    contents = [(b"a", b"bc"), (b"ab", b"c"), (b"a", b"bd"), (b"bc", b"a"), (b"a", b"bc", b""), (b"a",)]
    files = [walk(write(tmp_path / str(i), *records))[0] for i, records in enumerate(contents)]
    assert len({walked.digest for walked in files}) == 6
    first = files[0]
    copy = walk(write(tmp_path / "elsewhere", *contents[0]))[0]
    assert first.digest == copy.digest and first != copy
    for time, is_equal in ((1, False), (first.mtime_ns, True)):
        os.utime(first.path, ns=(1, time))
        assert (walk(first.path)[0] == first) == is_equal


# --- damage ---


def flipped_header(byte):
    """Returns a header in which one bit of byte number `byte` is wrong."""
    return bytes(value ^ 16 * (i == byte) for i, value in enumerate(header(17)))


BAD_TAILS = {
    "1 byte": (header(300)[:1], "file-truncated", "has 1 of the 12 bytes of its header"),
    "11 bytes": (header(300)[:11], "file-truncated", "has 11 of the 12 bytes of its header"),
    "header only": (header(300), "file-truncated", "needs 316 bytes, but only 12 are left"),
    "1 byte too few": (header(300) + bytes(303), "file-truncated", "needs 316 bytes, but only 315 are left"),
    "length 2**31": (header(2**31), "file-truncated", f"needs {2**31 + 16} bytes, but only 12 are left"),
    "length 2**64 - 1": (header(2**64 - 1), "file-truncated", f"needs {2**64 + 15} bytes, but only"),
    "zeros": (bytes(50), "not-a-record", "has length 0 with the wrong checksum 0x00000000"),
    "magic number of gzip": (b"\x1f\x8b" + bytes(48), "not-a-record", f"has length {0x8B1F} with"),
    "first bit of length": (flipped_header(0) + bytes(21), "not-a-record", "has length 1 with"),
    "last bit of length": (flipped_header(7) + bytes(21), "not-a-record", f"has length {17 + 2**60} with"),
    "first bit of checksum": (flipped_header(8) + bytes(21), "not-a-record", "has length 17 with"),
    "last bit of checksum": (flipped_header(11) + bytes(21), "not-a-record", "has length 17 with"),
}


@pytest.mark.parametrize(("tail", "kind", "reason"), BAD_TAILS.values(), ids=BAD_TAILS)
def test_damage_behind_five_records_is_reported_with_its_byte_and_the_five_records_are_found(
    tmp_path, tail, kind, reason
):
    path = write(tmp_path / "x", *[bytes(300_000)] * 5)
    with open(path, "ab") as stream:
        stream.write(tail)
    walked, issues = walk(path)
    issue_kind, offender = only_issue(issues)
    assert issue_kind == kind
    assert offender.startswith(f"{path} record 5 at byte {5 * 300_016} {reason}")
    assert walked.spans[:, 0].tolist() == [i * 300_016 for i in range(5)] and len(walked.checksums) == 5


FILES_WITHOUT_RECORDS = {
    "empty": (b"", "file-empty"),
    "text": (b"no records here, only text", "not-a-record"),
    "gzip": (gzip.compress(bytes(1000), mtime=0), "file-gzip"),
    "3 bytes of gzip": (b"\x1f\x8b\x08", "file-gzip"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 8\n", "file-lfs-pointer"),
}


@pytest.mark.parametrize(("content", "kind"), FILES_WITHOUT_RECORDS.values(), ids=FILES_WITHOUT_RECORDS)
def test_tfrecord_file_without_records_is_reported_as_empty_gzip_lfs_pointer_or_no_record(
    tmp_path, content, kind
):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(content)
    walked, issues = walk(path)
    issue_kind, offender = only_issue(issues)
    assert issue_kind == kind and offender.startswith(str(path))
    assert walked.spans.shape == (0, 2)


@pytest.mark.parametrize("missing", [0, 1])
def test_record_whose_length_is_the_magic_number_of_gzip_is_not_taken_for_gzip(tmp_path, missing):
    path = write(tmp_path / "x", bytes(0x088B1F))
    os.truncate(path, os.path.getsize(path) - missing)
    walked, issues = walk(path)
    assert [issue.kind for issue in issues] == ["file-truncated"] * missing
    assert len(walked.spans) == 1 - missing


def test_tfrecord_path_that_is_a_pipe_directory_missing_or_forbidden_is_reported_as_unreadable(
    tmp_path, monkeypatch
):
    def forbidden(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", path)

    os.mkfifo(tmp_path / "pipe")  # reading would never return
    write(tmp_path / "x", b"abc")
    monkeypatch.setattr("builtins.open", forbidden)  # file modes would not stop root
    for name, reason in (
        ("pipe", "not a regular file"),
        (".", "not a regular file"),
        ("absent", "No such file or directory"),
        ("x", "Permission denied"),
    ):
        path = os.path.join(tmp_path, name)
        assert only_issue(walk(path)[1]) == ("file-unreadable", f"{path}: {reason}")


# --- indexes ---


def read_index(file):
    return pathlib.Path(f"{file}.idx").read_bytes()


def ensure_index(file):
    """Returns the index's path and {kind: offenders}."""
    issues = Issues("")
    path = index_of(tfrecord.walk(file), issues)
    return path, {issue.kind: issue.offenders for issue in issues}


@pytest.fixture
def index(file):
    """The content of the index of `file`, which is written."""
    assert tfrecord.write_index(file) == f"{file}.idx"
    return read_index(file)


def test_tfrecord_index_equals_that_of_dalis_tfrecord2idx(file, index, tmp_path, monkeypatch):
    tool = pathlib.Path(sys.executable).parent / "tfrecord2idx"
    if not tool.exists():
        pytest.skip("DALI's tfrecord2idx is not installed beside python")
    monkeypatch.setattr(sys, "argv", [str(tool), file, str(tmp_path / "reference")])
    runpy.run_path(str(tool))
    assert index == (tmp_path / "reference").read_bytes()
    assert len(index.splitlines()) == len(SIZES)


def test_tfrecord_index_has_offsets_and_sizes_above_32_bits():
    spans = np.array([[10**12, 40_000], [123_456_789_012, 9], [5, 10**16]])
    expected = b"1000000000000 40000\n123456789012 9\n5 10000000000000000\n"
    assert tfrecord.format_index(spans) == expected
    assert tfrecord.format_index(np.zeros((0, 2), np.int64)) == b""


def test_correct_index_of_a_touched_tfrecord_file_is_not_written_again(file, index):
    before = os.stat(f"{file}.idx")
    os.utime(file)
    assert ensure_index(file) == (f"{file}.idx", {})
    assert os.stat(f"{file}.idx").st_ino == before.st_ino


WRONG_INDEXES = {
    "empty": b"",
    "not ascii": b"\xff\xff",
    "last record missing": b"0 16\n16 17\n33 21\n54 316\n",
    "one wrong size": b"0 16\n16 17\n33 21\n54 316\n370 70017\n",
}


@pytest.mark.parametrize("wrong_index", WRONG_INDEXES.values(), ids=WRONG_INDEXES)
def test_wrong_tfrecord_index_is_replaced_and_reported_as_stale(file, index, wrong_index):
    pathlib.Path(f"{file}.idx").write_bytes(wrong_index)
    assert ensure_index(file) == (f"{file}.idx", {"index-stale": [file]})
    assert read_index(file) == index


def test_missing_tfrecord_index_is_written_and_reported(file):
    assert ensure_index(file) == (f"{file}.idx", {"index-made": [file]})
    assert len(read_index(file).splitlines()) == len(SIZES)


def test_pipe_in_place_of_a_tfrecord_index_is_replaced_without_being_read(file):
    os.mkfifo(f"{file}.idx")
    assert ensure_index(file) == (f"{file}.idx", {"index-stale": [file]})
    assert len(read_index(file).splitlines()) == len(SIZES)


def test_tfrecord_file_with_fewer_records_than_its_index_is_reported_as_partly_copied(file, index):
    write_random(file, SIZES[:-2])
    name = pathlib.Path(file).name
    assert only_issue(walk(file)[1]) == ("index-longer", f"{file} has 3 records, {name}.idx lists 5")
    assert read_index(file) == index


@pytest.mark.parametrize("sizes", [(*SIZES[:2], 77), (*SIZES, 9), SIZES], ids=["changed", "longer", "equal"])
def test_tfrecord_file_with_other_more_or_equal_records_than_its_index_is_not_reported_as_partly_copied(
    file, index, sizes
):
    write_random(file, sizes)
    assert not list(walk(file)[1])


def test_tfrecord_index_that_cannot_be_written_next_to_its_file_goes_to_the_cache(
    file, index, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    os.unlink(f"{file}.idx")
    os.mkdir(f"{file}.idx")  # prevents writing, even by root
    path = pathlib.Path(ensure_index(file)[0])
    assert path.parent == tmp_path / "cache" / "dali-detection" and path.read_bytes() == index


def test_writing_the_index_of_a_damaged_tfrecord_file_is_refused(file, tmp_path):
    os.truncate(file, 100)
    with pytest.raises(UserError, match=f"{file} record 3 at byte 54 needs 316 bytes, but only 46 are left"):
        tfrecord.write_index(file)
    assert not list(tmp_path.glob("*.idx"))


# --- patterns ---


def test_file_pattern_finds_tfrecord_files_but_no_indexes_and_label_maps(tmp_path):
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


def test_all_file_patterns_without_a_match_are_named_in_the_error(tmp_path):
    (tmp_path / "a-0").touch()
    with pytest.raises(DataError) as error:
        expand_pattern(f"{tmp_path}/y*,{tmp_path}/a-0,{tmp_path}/z*")
    assert error.value.issues[0]["no-record-file"].offenders == [f"'{tmp_path}/y*'", f"'{tmp_path}/z*'"]
    for pattern in ("", ",", f"{tmp_path}/*.idx", f"{tmp_path}/z"):
        with pytest.raises(DataError, match=f"no file matches: '{pattern}'".replace("*", r"\*")):
            expand_pattern(pattern)


def test_missing_shards_of_a_numbered_series_of_tfrecord_files_are_named():
    names = ["a/x-00000-of-00003.tfrecord", "a/x-00002-of-00003.tfrecord", "b-1-of-2", "plain.tfrecord"]
    assert missing_shards(names) == ["a/x-00001-of-00003.tfrecord", "b-0-of-2"]
    assert missing_shards(["x-00000-of-00001.tfrecord"]) == []
