import os

import lmdb
import pytest

from common.data.check.issues import DataError
from tests.tools.preprocessing import source_writing as writing
from tests.tools.preprocessing.reading import check, opened, refused
from tests.tools.preprocessing.source_writing import COUNT, IMAGES, LABELS, datum, tensor, tensors

NEGATIVE = [-5, -(2**31), 2**31 - 1, 0, 1, -1, 7]


def values(directory, *contents):
    return writing.write_values(directory, {b"%03d" % i: content for i, content in enumerate(contents)})


FORMS = [
    (lambda image, _: datum(image), [-1] * COUNT),
    (lambda image, _: tensors(image), [-1] * COUNT),
    (datum, NEGATIVE),
    (writing.labelled_tensors, NEGATIVE),
    (lambda image, label: tensors(image, tensor("float", label)), LABELS),
    (lambda image, label: writing.message((4, image), (5, label)), LABELS),  # without the field `encoded`
]


@pytest.mark.parametrize(("make", "labels"), FORMS)
def test_dali_reads_labels_of_every_form_by_directory_or_file(tmp_path, make, labels):
    path = values(tmp_path, *map(make, IMAGES, labels))
    for source in (opened("lmdb", path), opened("lmdb", f"{path}/data.mdb")):
        check(source, IMAGES, labels)


ODD = [
    (datum(IMAGES[3]), -1),
    (tensors(IMAGES[3], tensor("int32", 6)), 6),
    (tensors(IMAGES[3], tensor("float", 6.0)), 6),
    (tensors(IMAGES[3], tensor("int32", 6, 7)), -1),
]


@pytest.mark.parametrize(("odd", "label"), ODD)
def test_python_reads_values_of_several_forms(tmp_path, odd, label):
    path = values(tmp_path, *map(datum, IMAGES[:3], [1, 2, 3]), odd)
    check(opened("lmdb", path), IMAGES[:4], [1, 2, 3, label], by_python=True)


@pytest.mark.parametrize("numbers", [[tensor("int64", 6)], [tensor("int32", 6), tensor("int32", 1, 2, 3, 4)]])
def test_python_reads_what_dali_would_misread_even_if_all_are_alike(tmp_path, numbers):
    path = values(tmp_path, tensors(IMAGES[0], *numbers))
    check(opened("lmdb", path), IMAGES[:1], [6], by_python=True)
    values(tmp_path / "b", datum(IMAGES[0], 6))
    os.rename(tmp_path / "b/data.mdb", tmp_path / "one.mdb")
    check(opened("lmdb", tmp_path / "one.mdb"), IMAGES[:1], [6], by_python=True)


REFUSED = [
    (b"\xff\xff", "record '001' is neither Caffe's Datum nor Caffe2's TensorProtos"),
    (datum(b"abc", 1), "file that is not an image: .*record '001'"),
    (tensors(b"", tensor("int32", 1)), "empty image file: .*record '001'"),
    (tensors(IMAGES[0], tensor("float", 0.5)), "record '001' has the label 0.5"),
    (b"", "empty image file: .*record '001'"),
]


@pytest.mark.parametrize(("content", "said"), REFUSED)
def test_values_that_are_refused(tmp_path, content, said):
    refused("lmdb", values(tmp_path, datum(IMAGES[0], 1), content), said)


def test_files_that_are_no_lmdb_are_refused(tmp_path):
    refused("lmdb", tmp_path / "nowhere", "nowhere is missing, empty")
    refused("lmdb", tmp_path, r"data\.mdb is missing, empty")
    (tmp_path / "data.mdb").write_bytes(b"text" * 5000)
    refused("lmdb", tmp_path, "cannot be read as LMDB .*: copy or write it again")
    with lmdb.open(os.fspath(tmp_path / "empty")):
        pass
    refused("lmdb", tmp_path / "empty", "no usable image", DataError)


ENDS = [
    (-1, r"data\.mdb is cut off after \d+ of \d+ bytes: copy it again"),
    (12288, r"data\.mdb is cut off after 12288 of \d+ bytes: copy it again"),
    (4096, "cannot be read as LMDB"),
]


@pytest.mark.parametrize(("end", "said"), ENDS)
def test_a_truncated_lmdb_is_refused(tmp_path, end, said):
    path = values(tmp_path, *map(datum, IMAGES * 9, LABELS * 9))
    assert opened("lmdb", path).size == 63
    os.truncate(f"{path}/data.mdb", end if end > 0 else os.path.getsize(f"{path}/data.mdb") + end)
    refused("lmdb", path, said)


def test_a_damaged_page_of_an_lmdb_is_said(tmp_path):
    path = values(tmp_path, *map(datum, IMAGES * 9, LABELS * 9))
    content = bytearray((tmp_path / "data.mdb").read_bytes())
    for kind in range(2 * 4096 + 10, len(content), 4096):  # in each page after the two header pages
        content[kind : kind + 2] = b"\x08\x00"
    (tmp_path / "data.mdb").write_bytes(content)
    refused("lmdb", path, r"data\.mdb cannot be read as LMDB \(.*\): copy or write it again")
