"""Records are found by their headers alone, of any size; what is damaged is named with its place."""

import gzip
import os
import pathlib
import struct

import numpy as np
import pytest
import tensorflow as tf

from common import tfrecord
from common.datacheck.issues import Issues
from common.datacheck.tfrecord import walk_files
from tests.common.record_writing import flip, write

SIZES = (0, 1, 5, 300, 70_000)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "data.tfrecord", *map(os.urandom, SIZES))


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


def test_the_checksum_is_that_of_the_published_vectors():
    # RFC 3720 appendix B.4: CRC-32C of 32 zeros, of 32 ones and of 0 to 31; the mask is that of crc32c.h.
    rows = [bytes(32), b"\xff" * 32, bytes(range(32))]
    crcs = (0x8A9136AA, 0x62A8AB43, 0x46DD794E)
    masked = [(((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF for crc in crcs]
    assert [tfrecord.masked_crc32c(row) for row in rows] == masked


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        (100,) * 2000,
        (3 * 2**20, 0),
    ],
    ids=["few", "small", "one large"],
)
def test_records_of_any_size_are_found(tmp_path, sizes):
    contents = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    path = write(tmp_path / "x", *contents)
    walked, issues = walk(path)
    assert not list(issues)
    content = (tmp_path / "x").read_bytes()
    ends = np.cumsum([size + 16 for size in sizes])
    assert walked.spans.tolist() == [
        [end - size - 16, size + 16] for end, size in zip(ends, sizes, strict=True)
    ]
    stored = [struct.unpack_from("<I", content, end - 4)[0] for end in ends.tolist()]
    assert walked.checksums.tolist() == stored
    assert (walked.path, walked.size) == (path, len(content))
    assert walked.mtime_ns == os.stat(path).st_mtime_ns


def test_no_data_are_read(file, monkeypatch):
    """Of large records, nothing but what frames them."""
    path = write(f"{file}-large", *(bytes(100_000) for _ in range(50)))
    seen = []
    for name in ("pread", "preadv"):
        real = getattr(os, name)

        def counted(descriptor, what, offset, real=real):
            got = real(descriptor, what, offset)
            seen.append(got if isinstance(got, int) else len(got))
            return got

        monkeypatch.setattr(os, name, counted)
    walked, _ = walk(path)
    assert len(walked.spans) == 50
    assert sum(seen) < 50 * 16 + 100


def test_the_digest_stands_for_the_content(tmp_path):
    digests = {
        walk(write(tmp_path / str(i), *contents))[0].digest
        for i, contents in enumerate(
            [(b"a", b"bc"), (b"ab", b"c"), (b"a", b"bd"), (b"bc", b"a"), (b"a", b"bc", b""), (b"a",)]
        )
    }
    assert len(digests) == 6
    one, other = (walk(write(tmp_path / name, b"a", b"bc"))[0] for name in ("same", "elsewhere"))
    assert one.digest == other.digest and one != other
    os.utime(one.path, (1, 1))
    assert walk(one.path)[0] != one  # a new time is a new state
    os.utime(one.path, ns=(1, one.mtime_ns))
    assert walk(one.path)[0] == one


@pytest.mark.parametrize("missing", [1, 3, 4, 5, 100, 69_999, 70_000, 70_004])
def test_a_truncated_record(file, missing):
    os.truncate(file, os.path.getsize(file) - missing)
    walked, issues = walk(file)
    offset = sum(SIZES[:-1]) + 16 * (len(SIZES) - 1)
    assert only(issues) == (
        "record-truncated",
        f"{file} record 4 at byte {offset} needs 70016 bytes, {70_016 - missing} are left",
    )
    assert len(walked.spans) == len(walked.checksums) == 4  # those before it
    assert walked.checksums[3] == struct.unpack("<I", pathlib.Path(file).read_bytes()[offset - 4 : offset])[0]


@pytest.mark.parametrize("left", [1, 7, 8, 11])
def test_a_truncated_header(file, left):
    offset = sum(SIZES[:-1]) + 16 * (len(SIZES) - 1)
    os.truncate(file, offset + left)
    walked, issues = walk(file)
    text = f"{file} record 4 at byte {offset} has {left} of the 12 bytes of its header"
    assert only(issues) == ("record-truncated", text)
    assert len(walked.spans) == 4


@pytest.mark.parametrize("byte", [0, 3, 7, 8, 11])
def test_a_flipped_bit_in_a_length(file, byte):
    flip(file, 16 + 17 + byte)  # the header of the third record
    walked, issues = walk(file)
    kind, text = only(issues)
    assert kind == "not-a-record"
    assert text.startswith(f"{file} record 2 at byte 33 has the length ")
    assert walked.spans.tolist() == [[0, 16], [16, 17]]


def test_a_flipped_bit_far_into_a_file(tmp_path):
    """A wrong length may lead to other bytes that look like lengths: the first wrong one counts."""
    for name, size in (("small", 1000), ("large", 20_000)):
        path = write(tmp_path / name, *(bytes(size) for _ in range(3000)))
        flip(path, 2000 * (size + 16))
        walked, issues = walk(path)
        kind, text = only(issues)
        assert kind == "not-a-record" and f"record 2000 at byte {2000 * (size + 16)} " in text
        assert len(walked.spans) == 2000


def test_a_file_of_zeros_is_left_early(tmp_path):
    path = tmp_path / "zeros"
    path.touch()
    os.truncate(path, 2**40)  # what a crash may leave: sixty-four thousand million empty records
    kind, text = only(walk(path)[1])
    assert kind == "not-a-record"
    assert text == f"{path} record 0 at byte 0 has the length 0 with the checksum 0x00000000"


def test_a_right_length_of_any_size_is_no_crash(tmp_path):
    for length in (2**31, 2**62, 2**63, 2**64 - 1, 2**64 - 16):
        path = tmp_path / str(length)
        path.write_bytes(header(3) + b"abc\0\0\0\0" + header(length) + b"only this")
        kind, text = only(walk(path)[1])
        assert kind == "record-truncated"
        assert text == f"{path} record 1 at byte 19 needs {length + 16} bytes, 21 are left"


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (b"12345", "has 5 of the 12 bytes of its header"),
        (header(7) + b"1234", "needs 23 bytes, 16 are left"),
        (header(2**63), "needs 9223372036854775824 bytes, 12 are left"),
        (header(2**64 - 16), "needs 18446744073709551616 bytes, 12 are left"),
        (header(7)[:-1] + b"?", "has the length 7 with the checksum 0x"),
    ],
)
def test_bad_ends_of_large_records(tmp_path, tail, text):
    """Which are jumped over, not read along."""
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
        (b"abc", "record-truncated"),
        (b"no records here, only text", "not-a-record"),
        (b"PK\3\4" + bytes(range(256)) * 9, "not-a-record"),
        (gzip.compress(bytes(1000), mtime=0), "record-gzip"),  # its id in all processes alike
        (b"\x1f\x8b\x08", "record-gzip"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 84977953\n",
            "record-lfs-pointer",
        ),
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
    (tmp_path / "dangling").symlink_to("nowhere")
    expected = {
        "pipe": "pipe is not a regular file",
        "directory": "directory is not a regular file",
        "dangling": "dangling: No such file or directory",
        "absent": "absent: No such file or directory",
    }
    for name, text in expected.items():
        kind, offender = only(walk(tmp_path / name)[1])
        assert (kind, offender) == ("record-file-unreadable", f"{tmp_path}/{text}")

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
    assert {issue.kind: issue.offenders for issue in issues} == {
        "record-file-empty": [f"{paths[20]} (0 bytes)"],
        "record-truncated": [f"{paths[4]} record 0 at byte 0 has 3 of the 12 bytes of its header"],
    }


def test_tensorflow_finds_the_same_records(tmp_path):
    random = np.random.default_rng(3)
    contents = [random.bytes(int(size)) for size in random.integers(0, 30_000, 300)]
    path = write(tmp_path / "x", *contents)
    walked, _ = walk(path)
    content = (tmp_path / "x").read_bytes()
    found = [content[offset + 12 : offset + size - 4] for offset, size in walked.spans.tolist()]
    assert found == contents == list(tf.data.TFRecordDataset(path).as_numpy_iterator())
