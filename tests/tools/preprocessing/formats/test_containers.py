import os
import struct
import tarfile

import pytest

from common.data.check.images import ImagePolicy
from common.data.check.issues import DataError
from tests.common.record_writing import PNG, flip, record, write
from tests.tools.preprocessing import source_writing as writing
from tests.tools.preprocessing.reading import check, names_of, opened, refused
from tests.tools.preprocessing.source_writing import COUNT, IMAGES

# --- TFRecord ---


def test_records_of_object_detection(tmp_path):
    file = write(tmp_path / "x.tfrecord", record(source_id=b"3"), record(source_id=b"9", filename=b"b.png"))
    source = opened("tfrecord", file)
    assert names_of(source) == ["x.tfrecord-0", "b.png"]
    check(source, [PNG, PNG], [-1, -1])


REFUSED_RECORDS = [
    (b"text", "x record 1 is not a tf.train.Example"),
    (
        writing.example(IMAGES[0], 2**31),
        "x record 1 has the label 2147483648: a label must be a whole number",
    ),
    (writing.example(IMAGES[0], b"cat"), r"x record 1 needs .* at most one image/class/label \(int64\)"),
    (writing.example(IMAGES[0], [1, 2]), "x record 1 needs one image/encoded"),
    (record(encoded=None), "x record 1 needs one image/encoded"),
    (writing.example(b""), "empty image file: .*x record 1"),
]


@pytest.mark.parametrize(("content", "said"), REFUSED_RECORDS)
def test_records_that_are_refused(tmp_path, content, said):
    refused("tfrecord", write(tmp_path / "x", writing.example(IMAGES[1], 1), content), said)


def test_record_files_that_are_refused(tmp_path):
    damaged, cut = (write(tmp_path / name, *map(writing.example, IMAGES)) for name in "xy")
    flip(damaged, 100)
    refused("tfrecord", damaged, "checksum is wrong: .*x record 0 at byte 0", DataError)
    os.truncate(cut, os.path.getsize(cut) - 3)
    refused("tfrecord", cut, "file that is cut off: .*y record 6", DataError)


def test_a_missing_shard_is_reported(tmp_path):
    reports = []
    write(tmp_path / "x-00001-of-00002", writing.example(IMAGES[0]))
    opened("tfrecord", tmp_path / "x-*", reports.append)
    assert reports[0]["shard-missing"].count == 1


# --- RecordIO ---


def rec(path, *records):
    path.write_bytes(b"".join(records))
    return path


MAGIC = [writing.png(i, extra=bytes(i) + writing.RECORDIO_MAGIC * i + b"end") for i in range(COUNT)]


def test_records_in_parts(tmp_path):
    path = rec(tmp_path / "x.rec", *(writing.image_record(image, i) for i, image in enumerate(MAGIC)))
    assert path.read_bytes().count(writing.RECORDIO_MAGIC) > COUNT + 5
    check(opened("recordio", path), MAGIC, list(range(COUNT)))


def test_only_a_record_with_one_label_has_a_label(tmp_path):
    one = [writing.image_record(image, 0, labels=[i]) for i, image in enumerate(MAGIC)]
    check(opened("recordio", rec(tmp_path / "1.rec", *one)), MAGIC, list(range(COUNT)))
    many = [writing.image_record(image, 0, labels=[i] * (2 + i)) for i, image in enumerate(MAGIC)]
    check(opened("recordio", rec(tmp_path / "2.rec", *many)), MAGIC, [-1] * COUNT)
    mixed = rec(tmp_path / "3.rec", *one[:2], *many[2:])
    check(opened("recordio", mixed), MAGIC, [0, 1, *[-1] * 5], by_python=True)


def test_python_reads_several_files_of_recordio(tmp_path):
    for i in range(3):
        rec(tmp_path / f"{i}.rec", *(writing.image_record(IMAGES[j], j) for j in range(2 * i, 2 * i + 2)))
    source = opened("recordio", tmp_path / "*.rec")
    assert names_of(source)[3] == "1.rec-1"
    check(source, IMAGES[:6], list(range(6)), by_python=True)


REFUSED_FILES = [
    (b"", "is missing, empty"),
    (b"text" * 9, "has no whole RecordIO record at byte 0: copy or write it again"),
    (writing.image_record(IMAGES[0], 1) + b"\x0a", r"has no whole RecordIO record at byte \d\d+"),
    (writing.record(b"short"), r"record 0 \(5 bytes\) is not an image record"),
    (writing.record(struct.pack("<IfQQ", 99, 0, 0, 0)), r"record 0 \(24 bytes\) is not an image record"),
    (writing.image_record(IMAGES[0], 0.5), "record 0 has the label 0.5"),
    (writing.image_record(b"", 1), "empty image file: .*record 0"),
    (writing.RECORDIO_MAGIC + struct.pack("<I", 3 << 29), "has no whole RecordIO record at byte 0"),
    (2 * (writing.RECORDIO_MAGIC + struct.pack("<I", 1 << 29)), "has no whole RecordIO record at byte 8"),
]


@pytest.mark.parametrize(("content", "said"), REFUSED_FILES)
def test_recordio_files_that_are_refused(tmp_path, content, said):
    refused("recordio", rec(tmp_path / "x.rec", content), said)


# --- WebDataset ---


def tar(directory, *files):
    return writing.write_tar(directory / "x.tar", files)


def test_archives_with_all_sorts_of_things_in_them(tmp_path):
    long = "ü " * 80
    files = [
        *(("a", None), ("a/.hidden.png", b"text")),
        *(("a/1.x.json", b"{}"), ("a/1.cls", b"07 \n"), ("a/1.PNG", IMAGES[1])),
        *(("b/1.seg.png", IMAGES[5]), ("b/1.png", IMAGES[2]), ("b/1.jpg", IMAGES[3]), ("b/1.cls", b"12")),
        *((f"{long}/2.png", IMAGES[4]), (f"{long}/2.cls", b"0")),
    ]
    source = opened("webdataset", tar(tmp_path, *files))
    assert names_of(source) == ["a/1.PNG", "b/1.jpg", f"{long}/2.png"]
    check(source, [IMAGES[1], IMAGES[3], IMAGES[4]], [7, 12, 0])


def test_a_sample_without_image_is_named_or_left_out(tmp_path):
    path = tar(tmp_path, ("1.png", IMAGES[0]), ("2.txt", b"no"), ("2.cls", b"1"), ("3.png", IMAGES[1]))
    refused("webdataset", path, r"missing image file: .*x.tar sample '2': it has \.txt, \.cls", DataError)
    check(opened("webdataset", path, policy=ImagePolicy(on_bad_image="skip")), IMAGES[:2], [-1, -1])


def test_a_label_is_digits_within_32_bits(tmp_path):
    for odd in (b"-3", b" 8", b"", b"1.5", b"2147483648", b"9" * 70, "١".encode()):
        path = tar(tmp_path, ("1.png", IMAGES[0]), ("1.cls", odd))
        refused("webdataset", path, r"x\.tar: '1\.cls' ")


def test_archives_that_are_cut_off_are_refused(tmp_path):
    path = tar(tmp_path, *((f"{i}.png", image) for i, image in enumerate(IMAGES)))
    end = sum(512 + -(-len(image) // 512) * 512 for image in IMAGES)
    cases = ((end, f"cut off at byte {end}"), (end - 600, "not a complete"), (0, "is missing, empty"))
    for size, said in cases:
        os.truncate(path, size)
        refused("webdataset", path, said)


def test_archives_that_are_refused(tmp_path):
    path = tar(tmp_path, ("1.png", IMAGES[0]), ("2.png", IMAGES[1]))
    with tarfile.open(path) as content:
        begin = content.getmembers()[1].offset
    flip(path, begin + 5)
    refused("webdataset", path, f"is damaged or cut off at byte {begin}: copy or write it again")
    with tarfile.open(tmp_path / "z.tar", "w:gz") as compressed:
        compressed.add(path)
    refused("webdataset", tmp_path / "z.tar", "is not a complete plain tar archive")
    os.mkfifo(tmp_path / "pipe.tar")
    refused("webdataset", tmp_path / "pipe.tar", "empty or not a regular file")
