"""TFRecord, LMDB, RecordIO and WebDataset: odd but sound contents are read, all else is refused in a line."""

import os
import struct
import subprocess
import sys
import tarfile

import lmdb
import pytest

from common.datacheck.images import ImagePolicy
from common.datacheck.issues import DataError
from common.errors import UserError
from tests.common.record_writing import PNG, flip, record, write
from tests.tools.preprocessing import source_writing as writing
from tests.tools.preprocessing.reading import by_dynamic, by_pipeline, flat, names_of
from tests.tools.preprocessing.source_writing import COUNT, IMAGES, LABELS
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.reading import Part

SKIP = ImagePolicy(on_bad_image="skip")


def opened(kind, path, **options):
    return open_image_source(kind, os.fspath(path), on_report=lambda issues: None, **options)


def check(source, images, labels, *, by_python=False):
    """What is read, by both APIs and by Python, and by whom."""
    assert (source.reader is None) == by_python
    want = list(zip(images, labels, strict=True))
    steps = -(-len(want) // 3)
    for read in (flat(by_pipeline(Part(source), steps))[: len(want)], flat(by_dynamic(Part(source)))):
        assert [(image.tobytes(), label) for image, label in read] == want
    assert [(source.load(i).tobytes(), int(source.labels[i])) for i in range(source.size)] == want


def refused(kind, path, said, error=UserError):
    with pytest.raises(error, match=said) as caught:
        opened(kind, path)
    assert "\n" not in str(caught.value)


# --- TFRecord ---


def test_records_of_object_detection(tmp_path):
    file = write(tmp_path / "x.tfrecord", record(source_id=b"3"), record(source_id=b"9", filename=b"b.png"))
    source = opened("tfrecord", file)
    assert names_of(source) == ["x.tfrecord-0", "b.png"]
    check(source, [PNG, PNG], [-1, -1])


def test_records_of_which_some_have_a_label(tmp_path):
    """DALI would give whatever is in memory."""
    records = [writing.example(image, None if i % 2 else i) for i, image in enumerate(IMAGES)]
    source = opened("tfrecord", write(tmp_path / "x", *records))
    check(source, IMAGES, [-1 if i % 2 else i for i in range(COUNT)], by_python=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text", "x record 1 is no tf.train.Example"),
        (writing.example(IMAGES[0], 2**31), "x record 1 has the label 2147483648: labels are whole numbers"),
        (
            writing.example(IMAGES[0], b"cat"),
            r"x record 1 lacks one image/encoded .* at most one image/class/label \(int64\)",
        ),
        (record(encoded=None), "x record 1 lacks one image/encoded"),
        (writing.example(b""), "empty image file: .*x record 1"),
    ],
)
def test_records_that_are_refused(tmp_path, content, said):
    refused("tfrecord", write(tmp_path / "x", writing.example(IMAGES[1], 1), content), said)


def test_record_files_that_are_refused(tmp_path):
    file = write(tmp_path / "x", *map(writing.example, IMAGES))
    refused("tfrecord", tmp_path, "is not a regular file", DataError)
    refused("tfrecord", tmp_path / "no*", "no file matches")
    os.truncate(file, os.path.getsize(file) - 3)
    refused("tfrecord", file, "record file that is cut off: .*x record 6", DataError)
    write(file, *map(writing.example, IMAGES))
    flip(file, 100)
    refused("tfrecord", file, "checksum is wrong: .*x record 0 at byte 0", DataError)


def test_an_index_of_another_file_is_not_used(tmp_path):
    file = write(tmp_path / "x", *map(writing.example, IMAGES))
    (tmp_path / "x.idx").write_text("0 7\n7 9\n")
    check(opened("tfrecord", file), IMAGES, [-1] * COUNT)


# --- LMDB ---


def values(directory, *contents):
    return writing.write_values(directory, {b"%03d" % i: content for i, content in enumerate(contents)})


def test_an_lmdb_is_opened_as_often_as_one_likes_and_in_every_form(tmp_path):
    path = values(tmp_path / "a", *map(writing.datum, IMAGES, LABELS))
    sources = [opened("lmdb", path) for _ in range(3)]
    for source in sources:
        check(source, IMAGES, LABELS)
    check(opened("lmdb", f"{path}/data.mdb"), IMAGES, LABELS)
    one = f"{tmp_path}/one.mdb"  # DALI knows directories only
    with lmdb.open(one, subdir=False, map_size=2**22) as environment, environment.begin(write=True) as put:
        put.put(b"k", writing.datum(IMAGES[2], 4))
    check(opened("lmdb", one), IMAGES[2:3], [4], by_python=True)


def test_labels_of_every_form(tmp_path):
    none = [-1] * COUNT
    check(opened("lmdb", values(tmp_path / "1", *(writing.datum(i, None) for i in IMAGES))), IMAGES, none)
    check(opened("lmdb", values(tmp_path / "2", *(writing.tensors(i, None) for i in IMAGES))), IMAGES, none)
    negative = [-5, -(2**31), 2**31 - 1, 0, 1, -1, 7]
    check(opened("lmdb", values(tmp_path / "3", *map(writing.datum, IMAGES, negative))), IMAGES, negative)
    check(opened("lmdb", values(tmp_path / "4", *map(writing.tensors, IMAGES, negative))), IMAGES, negative)


@pytest.mark.parametrize(
    ("odd", "label"),
    [
        (lambda image: writing.datum(image, None), -1),  # DALI would hand on the label before
        (lambda image: writing.tensors(image, 6), 6),
        (lambda image: writing.tensors(image, 6, data_type=10, int64_data=[6]), 6),
        (lambda image: writing.tensors(image, 6, data_type=1, float_data=[6.0]), 6),
        (lambda image: writing.tensors(image, 6, data_type=2, int32_data=[6, 7]), -1),
        (lambda image: writing.Datum(data=image, label=6).SerializeToString(), 6),
        (
            lambda image: writing.tensor_protos(
                writing.TensorProto(data_type=4, string_data=[image]),
                writing.TensorProto(data_type=2, int32_data=[6]),
                writing.TensorProto(data_type=2, int32_data=[1, 2, 3, 4]),  # a box
            ),
            6,
        ),
    ],
)
def test_values_of_several_forms_are_fed_by_python(tmp_path, odd, label):
    contents = [*map(writing.datum, IMAGES[:3], [1, 2, 3]), odd(IMAGES[3])]
    source = opened("lmdb", values(tmp_path, *contents))
    # A Datum that does not say that it is encoded is taken to be, by DALI as well.
    same = odd(IMAGES[3]).startswith(b"\x22")
    check(source, IMAGES[:4], [1, 2, 3, label], by_python=not same)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xff", "record '001' is neither Caffe's Datum nor Caffe2's TensorProtos"),
        (
            writing.Datum(channels=3, height=1, width=1, data=b"abc", encoded=False).SerializeToString(),
            "file that is not an image: .*record '001'",
        ),
        (
            writing.tensor_protos(writing.TensorProto(data_type=1, float_data=[1.0])),
            "empty image file: .*record '001'",
        ),
        (writing.tensors(IMAGES[0], 0, data_type=1, float_data=[0.5]), "record '001' has the label 0.5"),
        (b"", "empty image file: .*record '001'"),
    ],
)
def test_values_that_are_refused(tmp_path, content, said):
    refused("lmdb", values(tmp_path, writing.datum(IMAGES[0], 1), content), said)


def test_lmdbs_that_are_refused(tmp_path):
    refused("lmdb", tmp_path / "nowhere", "nowhere is missing, empty")
    refused("lmdb", tmp_path, r"data\.mdb is missing, empty")
    (tmp_path / "data.mdb").write_bytes(b"text" * 5000)
    refused("lmdb", tmp_path, "cannot be read as LMDB .*: copy or write it again")
    with lmdb.open(os.fspath(tmp_path / "empty")):
        pass
    refused("lmdb", tmp_path / "empty", "no usable image", DataError)


def test_a_truncated_lmdb_is_refused_and_kills_nobody(tmp_path):
    """LMDB maps its file: reading behind its end is a signal, in Python and in DALI alike."""
    path = values(tmp_path, *map(writing.datum, IMAGES * 9, LABELS * 9))
    code = (
        "import os, sys\nfrom common.errors import UserError\n"
        "from tools.preprocessing.image_source import open_image_source\n"
        "for size in sys.argv[2:]:\n"
        "    os.truncate(sys.argv[1], int(size))\n"
        "    try:\n        print(open_image_source('lmdb', sys.argv[1], on_report=id).size)\n"
        "    except UserError as error:\n        print(error)"
    )
    whole = os.path.getsize(f"{path}/data.mdb")
    sizes = [whole, whole - 1, whole - 4096, whole // 2, 3 * 4096, 8192, 4096, 100, 0]
    command = [sys.executable, "-c", code, f"{path}/data.mdb", *map(str, sizes)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == len(sizes) and told[0].isdigit()
    assert all("is cut off" in line for line in told[1:6]), told
    assert all("cannot be read as LMDB" in line for line in told[6:8]), told
    assert "is missing, empty" in told[8]


def test_a_damaged_page_of_an_lmdb_is_said(tmp_path):
    path = values(tmp_path, *map(writing.datum, IMAGES * 9, LABELS * 9))
    with open(f"{path}/data.mdb", "r+b") as stream:
        stream.seek(2 * 4096 + 10)  # the kind of the first page behind the two of the header
        content = stream.read()
        stream.seek(2 * 4096 + 10)
        stream.write(b"".join(b"\x08\x00" + content[i + 2 : i + 4096] for i in range(0, len(content), 4096)))
    refused("lmdb", path, r"data\.mdb cannot be read as LMDB \(.*\): copy or write it again")


# --- RecordIO ---


def rec(path, *records):
    path.write_bytes(b"".join(records))
    return path


MAGIC = [writing.png(i, extra=bytes(i) + writing.RECORDIO_MAGIC * i + b"end") for i in range(COUNT)]


def test_records_in_parts(tmp_path):
    """The magic number at every distance, some of them at multiples of four bytes."""
    path = rec(tmp_path / "x.rec", *(writing.image_record(image, i) for i, image in enumerate(MAGIC)))
    assert path.read_bytes().count(writing.RECORDIO_MAGIC) > COUNT + 5
    check(opened("recordio", path), MAGIC, list(range(COUNT)))


def test_records_with_many_labels(tmp_path):
    one = [writing.image_record(image, 0, labels=[i]) for i, image in enumerate(MAGIC)]
    check(opened("recordio", rec(tmp_path / "1.rec", *one)), MAGIC, list(range(COUNT)))
    many = [writing.image_record(image, 0, labels=[i] * (2 + i)) for i, image in enumerate(MAGIC)]
    check(opened("recordio", rec(tmp_path / "2.rec", *many)), MAGIC, [-1] * COUNT)
    mixed = rec(tmp_path / "3.rec", *one[:2], *many[2:])
    check(opened("recordio", mixed), MAGIC, [0, 1, *[-1] * 5], by_python=True)


def test_several_files(tmp_path):
    for i in range(3):
        rec(tmp_path / f"{i}.rec", *(writing.image_record(IMAGES[j], j) for j in range(2 * i, 2 * i + 2)))
    source = opened("recordio", tmp_path / "*.rec")
    assert names_of(source)[3] == "1.rec-1"
    check(source, IMAGES[:6], list(range(6)), by_python=True)


def test_an_index_beside_a_file_is_not_used(tmp_path):
    path, _ = writing.write_recordio(tmp_path, IMAGES, LABELS)
    (tmp_path / "x.idx").write_text("0\t0\n1\t4\n")
    check(opened("recordio", path), IMAGES, LABELS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is missing, empty"),
        (b"text" * 9, "has no whole RecordIO record at byte 0: copy or write it again"),
        (writing.image_record(IMAGES[0], 1) + b"\x0a", r"has no whole RecordIO record at byte \d\d+"),
        (writing.record(b"short"), r"record 0 \(5 bytes\) is no image record"),
        (writing.record(struct.pack("<IfQQ", 99, 0, 0, 0)), r"record 0 \(24 bytes\) is no image record"),
        (writing.image_record(IMAGES[0], 0.5), "record 0 has the label 0.5"),
        (writing.image_record(IMAGES[0], float("nan")), "record 0 has the label nan"),
        (writing.image_record(b"", 1), "empty image file: .*record 0"),
        (writing.RECORDIO_MAGIC + struct.pack("<I", 3 << 29), "has no whole RecordIO record at byte 0"),
        (2 * (writing.RECORDIO_MAGIC + struct.pack("<I", 1 << 29)), "has no whole RecordIO record at byte 8"),
    ],
)
def test_recordio_files_that_are_refused(tmp_path, content, said):
    refused("recordio", rec(tmp_path / "x.rec", content), said)


# --- WebDataset ---


def tar(directory, *files, name="x.tar"):
    return writing.write_tar(directory / name, files)


def test_archives_with_all_sorts_of_things_in_them(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        link = tarfile.TarInfo("a/0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
        archive.addfile(link)
    files = [
        ("a", None),
        ("a/.hidden.png", b"text"),
        ("a/1.x.json", b"{}"),
        ("a/1.cls", b"07 \n"),
        ("a/1.PNG", IMAGES[1]),
        ("b", None),
        ("b/1.seg.png", IMAGES[5]),
        ("b/1.png", IMAGES[2]),
        ("b/1.jpg", IMAGES[3]),
        ("b/1.cls", b"12"),
        ("ü " * 80 + "/2.png", IMAGES[4]),
        ("ü " * 80 + "/2.cls", b"0"),
    ]
    writing.write_tar(tmp_path / "y.tar", files)
    source = opened("webdataset", tmp_path / "y.tar")
    assert names_of(source) == ["a/1.PNG", "b/1.jpg", "ü " * 80 + "/2.png"]
    check(source, [IMAGES[1], IMAGES[3], IMAGES[4]], [7, 12, 0])
    refused("webdataset", path, "no usable image", DataError)


def test_a_sample_without_image_is_named_or_left_out(tmp_path):
    path = tar(tmp_path, ("1.png", IMAGES[0]), ("2.txt", b"no"), ("2.cls", b"1"), ("3.png", IMAGES[1]))
    refused("webdataset", path, r"missing image file: .*x.tar sample '2': it has \.txt, \.cls", DataError)
    source = opened("webdataset", path, policy=SKIP)
    check(source, IMAGES[:2], [-1, -1])


def test_archives_in_which_some_have_a_label(tmp_path):
    path = tar(tmp_path, ("1.png", IMAGES[0]), ("1.cls", b"5"), ("2.png", IMAGES[1]))
    check(opened("webdataset", path), IMAGES[:2], [5, -1], by_python=True)


@pytest.mark.parametrize(
    "odd", [b"-3", b" 8", b"+1", b"cat", b"", b"1.5", b"2147483648", b"9" * 70, "١".encode()]
)
def test_labels_that_are_none(tmp_path, odd):
    path = tar(tmp_path, ("1.png", IMAGES[0]), ("1.cls", odd))
    refused("webdataset", path, r"x\.tar: '1\.cls' ")


def test_an_index_beside_an_archive_is_not_used(tmp_path):
    path = tar(tmp_path, *((f"{i}.png", image) for i, image in enumerate(IMAGES)))
    (tmp_path / "x.idx").write_text("v1.1 6\n")
    check(opened("webdataset", path), IMAGES, [-1] * COUNT)


def test_archives_cut_off_anywhere_are_refused(tmp_path):
    path = tar(tmp_path, *((f"{i}.png", image) for i, image in enumerate(IMAGES)))
    whole = (tmp_path / "x.tar").read_bytes()
    end = sum(512 + -(-len(image) // 512) * 512 for image in IMAGES)  # headers and images, in blocks
    assert not any(whole[end:])
    for size in [*range(0, end, 600), *range(0, end, 1024), end]:
        os.truncate(path, 0)
        (tmp_path / "x.tar").write_bytes(whole[:size])
        refused("webdataset", path, "cut off|is missing, empty|no whole, plain tar archive")


def test_archives_that_are_refused(tmp_path):
    path = tar(tmp_path, *((f"{i}.png", image) for i, image in enumerate(IMAGES)))
    with tarfile.open(path) as archive:
        begin = archive.getmembers()[3].offset
    flip(path, begin + 5)  # the header's checksum does not fit any more
    refused("webdataset", path, f"is damaged or cut off at byte {begin}: copy or write it again")
    with tarfile.open(tmp_path / "z.tar", "w:gz") as archive:
        archive.add(path)
    refused("webdataset", tmp_path / "z.tar", "is no whole, plain tar archive")
    os.mkfifo(tmp_path / "pipe.tar")
    refused("webdataset", tmp_path / "pipe.tar", "empty or no regular file")
    refused("webdataset", tmp_path / "none*.tar", "no file matches")


# --- all of them ---


@pytest.mark.parametrize("case", ["lmdb-caffe", "recordio", "webdataset"])
def test_files_whose_names_are_no_utf_8(tmp_path, case):
    kind, write_case = writing.WRITERS[case]
    (tmp_path / "\udcff ü").mkdir()
    path, _ = write_case(tmp_path / "\udcff ü", IMAGES, LABELS)
    check(opened(kind, path), IMAGES, LABELS, by_python=True)
