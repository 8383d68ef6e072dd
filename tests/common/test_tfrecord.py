"""Records are found by their headers alone, damage is named with its place, and DALI's index is always right.

Oracles: DALI's own tool for indexes, TensorFlow for records, RFC 3720 for checksums.
"""

import gzip
import itertools
import os
import pathlib
import runpy
import struct
import sys

import numpy as np
import pytest
import tensorflow as tf

from common import tfrecord
from common.datacheck.issues import DataError, Issues
from common.datacheck.tfrecord import expand_pattern, index_of, missing_shards, walk_files
from common.errors import UserError
from tests.common.record_writing import flip, write

SIZES = (0, 1, 5, 300, 70_000)
LAST = sum(SIZES[:-1]) + 16 * (len(SIZES) - 1)  # where the last of these records begins


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
    """The single offender of the single kind that was found."""
    (issue,) = issues
    (offender,) = issue.offenders
    return issue.kind, offender


def header(length):
    content = struct.pack("<Q", length)
    return content + struct.pack("<I", tfrecord.masked_crc32c(content))


# --- sound records ---


def test_the_checksum_is_that_of_the_published_vectors():
    # RFC 3720 appendix B.4: CRC-32C of 32 zeros, of 32 ones and of 0 to 31; the mask is that of crc32c.h.
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
    starts = np.cumsum([0, *(size + 16 for size in sizes)]).tolist()
    assert walked.spans.tolist() == [[start, end - start] for start, end in itertools.pairwise(starts)]
    stored = [struct.unpack_from("<I", content, end - 4)[0] for end in starts[1:]]
    assert walked.checksums.tolist() == stored
    assert (walked.path, walked.size) == (path, len(content))
    assert walked.mtime_ns == os.stat(path).st_mtime_ns
    found = [tfrecord.read_record(path, *span) for span in walked.spans.tolist()]
    assert found == contents == list(tf.data.TFRecordDataset(path).as_numpy_iterator())


def test_no_data_are_read(tmp_path):
    """Of a record, nothing but what frames it: this one has a million million bytes."""
    path = tmp_path / "large"
    path.write_bytes(header(2**40))
    os.truncate(path, 2**40 + 16)
    walked, issues = walk(path)
    assert walked.spans.tolist() == [[0, 2**40 + 16]] and not list(issues)


def test_the_digest_stands_for_the_content(tmp_path):
    several = [(b"a", b"bc"), (b"ab", b"c"), (b"a", b"bd"), (b"bc", b"a"), (b"a", b"bc", b""), (b"a",)]
    digests = {walk(write(tmp_path / str(i), *contents))[0].digest for i, contents in enumerate(several)}
    assert len(digests) == 6
    one, other = (walk(write(tmp_path / name, b"a", b"bc"))[0] for name in ("same", "elsewhere"))
    assert one.digest == other.digest and one != other
    os.utime(one.path, (1, 1))
    assert walk(one.path)[0] != one  # a new time is a new state
    os.utime(one.path, ns=(1, one.mtime_ns))
    assert walk(one.path)[0] == one


# --- damage ---


@pytest.mark.parametrize("left", [1, 8, 11, 12, 16, 70_011, 70_015])
def test_a_truncated_record(file, left):
    os.truncate(file, LAST + left)
    walked, issues = walk(file)
    lacks = (
        f"has {left} of the 12 bytes of its header" if left < 12 else f"needs 70016 bytes, {left} are left"
    )
    assert only(issues) == ("record-truncated", f"{file} record 4 at byte {LAST} {lacks}")
    assert len(walked.spans) == len(walked.checksums) == 4  # those before it
    assert walked.checksums[3] == struct.unpack("<I", pathlib.Path(file).read_bytes()[LAST - 4 : LAST])[0]


@pytest.mark.parametrize("byte", range(12))
def test_a_flipped_bit_in_a_header(file, byte):
    flip(file, 16 + 17 + byte)  # the header of the third record
    walked, issues = walk(file)
    kind, text = only(issues)
    assert kind == "not-a-record"
    assert text.startswith(f"{file} record 2 at byte 33 has the length ")
    assert walked.spans.tolist() == [[0, 16], [16, 17]]


def test_a_file_of_zeros_is_left_early(tmp_path):
    path = tmp_path / "zeros"
    path.touch()
    os.truncate(path, 2**40)  # what a crash may leave: sixty-four thousand million empty records
    text = f"{path} record 0 at byte 0 has the length 0 with the checksum 0x00000000"
    assert only(walk(path)[1]) == ("not-a-record", text)


LARGE_LENGTHS = [(header(n) + b"only this", f"needs {n + 16} bytes, 21 are left") for n in (2**31, 2**64 - 1)]


@pytest.mark.parametrize(
    ("tail", "text"),
    [*LARGE_LENGTHS, (header(7)[:-1] + b"?", "has the length 7 with the checksum 0x")],
)
def test_bad_ends_behind_large_records(tmp_path, tail, text):
    """Which are jumped over, not read along. A right length of any size is no crash."""
    path = write(tmp_path / "x", *[bytes(300_000)] * 20)
    with open(path, "ab") as stream:
        stream.write(tail)
    walked, issues = walk(path)
    assert only(issues)[1].startswith(f"{path} record 20 at byte {20 * 300_016} {text}")
    assert len(walked.spans) == 20


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "record-file-empty"),
        (b"no records here, only text", "not-a-record"),
        (gzip.compress(bytes(1000), mtime=0), "record-gzip"),  # its id in all processes alike
        (b"\x1f\x8b\x08", "record-gzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 8\n", "record-lfs-pointer"),
    ],
)
def test_files_that_are_no_records(tmp_path, content, kind):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(content)
    walked, issues = walk(path)
    assert only(issues)[0] == kind
    assert only(issues)[1].startswith(str(path))
    assert walked.spans.shape == (0, 2)


@pytest.mark.parametrize("missing", [0, 1])
def test_records_that_begin_like_gzip_are_records(tmp_path, missing):
    path = write(tmp_path / "x", bytes(0x088B1F))  # this length begins with gzip's magic number
    os.truncate(path, os.path.getsize(path) - missing)
    walked, issues = walk(path)
    assert [issue.kind for issue in issues] == ["record-truncated"] * missing
    assert len(walked.spans) == 1 - missing


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        offender = f"{tmp_path}/{name} is not a regular file"
        assert only(walk(tmp_path / name)[1]) == ("record-file-unreadable", offender)
    offender = f"{tmp_path}/absent: No such file or directory"
    assert only(walk(tmp_path / "absent")[1]) == ("record-file-unreadable", offender)

    def forbidden(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", path)

    path = write(tmp_path / "x", b"abc")
    monkeypatch.setattr("builtins.open", forbidden)  # root may read everything
    assert only(walk(path)[1]) == ("record-file-unreadable", f"{path}: Permission denied")


def test_many_files_are_walked_in_their_order(tmp_path):
    paths = [write(tmp_path / str(i), *([b"x" * i] * i)) for i in range(1, 30)]
    os.truncate(paths[4], 3)
    os.truncate(paths[20], 0)
    issues = Issues("")
    walked = walk_files(paths, issues)
    assert [file.path for file in walked] == paths
    assert [len(file.spans) for file in walked] == [0 if i in (5, 21) else i for i in range(1, 30)]
    assert issues["record-file-empty"].offenders == [f"{paths[20]} (0 bytes)"]
    (offender,) = issues["record-truncated"].offenders
    assert offender == f"{paths[4]} record 0 at byte 0 has 3 of the 12 bytes of its header"


# --- indexes ---


def written_index(file):
    return pathlib.Path(f"{file}.idx").read_bytes()


def ensure(file):
    """The path of its index, and what was found of which kind."""
    issues = Issues("")
    path = index_of(tfrecord.walk(file), issues)
    return path, {issue.kind: issue.offenders for issue in issues}


@pytest.fixture
def right(file):
    """The right index of `file`, which is there."""
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
    os.utime(file)  # the index is older now, and still right
    assert ensure(file) == (f"{file}.idx", {})
    assert os.stat(f"{file}.idx").st_ino == before.st_ino


@pytest.mark.parametrize("sizes", [(*SIZES, 9), SIZES[1:], (5, 1, 0, 300, 70_000)])
def test_a_stale_index_is_made_again_and_said(file, right, sizes):
    """Grown, shrunk, and swapped for a file of equal length whose times look older than the index."""
    write_random(file, sizes)
    os.utime(file, (1, 1))
    assert ensure(file) == (f"{file}.idx", {"index-stale": [file]})
    spans = tfrecord.walk(file).spans.tolist()
    assert written_index(file).decode() == "".join(f"{offset} {size}\n" for offset, size in spans)
    assert len(spans) == len(sizes)


@pytest.mark.parametrize(
    "change", [lambda right: b"", lambda right: b"\xff\xff", lambda right: right[:-2] + b"7\n"]
)
def test_a_wrong_index_is_made_again_and_said(file, right, change):
    pathlib.Path(f"{file}.idx").write_bytes(change(right))
    assert ensure(file) == (f"{file}.idx", {"index-stale": [file]})
    assert written_index(file) == right


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
    for other in ((*SIZES[:2], 77), (*SIZES, 9), SIZES):  # changed, grown, and as it was
        write_random(file, other)
        assert not list(walk(file)[1])


def test_where_no_index_can_be_written_it_goes_to_the_cache(file, right, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


# --- patterns ---


def test_patterns(tmp_path):
    for name in ("b-1", "b-0", "b-0.idx", "b.label_map.json", "a-0", "c.pbtxt"):
        (tmp_path / name).touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b-2").touch()

    def names(pattern):
        return [os.path.relpath(file, tmp_path) for file in expand_pattern(pattern)]

    assert names(f"{tmp_path}/b*,{tmp_path}/a-?,{tmp_path}/b-0") == ["a-0", "b-0", "b-1"]
    assert names(f"{tmp_path}/a-0") == ["a-0"]
    assert names(f"{tmp_path}/**") == ["a-0", "b-0", "b-1", "deep/er/b-2"]
    # What is no file is not dropped.
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
