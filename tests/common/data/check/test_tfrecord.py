import os
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from common.data.check import tfrecord, tfrecord_scan
from common.data.check.images import ImagePolicy
from common.data.check.issues import DataError
from common.data.labels import LabelMap
from common.data.tfrecord import BOX_KEYS, CROWD_KEY, LABEL_KEY
from tests.common.image_variants import exif, pillow
from tests.common.record_writing import LABELS, PNG, empty_record, flip, of_boxes, png, record, write

SKIP = ImagePolicy(on_bad_image="skip")
BOX = "the box xmin, ymin, xmax, ymax ="


def numbered(image_id, **changes):
    return record(source_id=b"%d" % image_id, **changes)


def open_records(*files, **options):
    return tfrecord.open_records(files, LABELS, **options)


def refused(*files, **options):
    """Asserts that the files are refused; returns {kind: offenders}."""
    with pytest.raises(DataError) as error:
        open_records(*files, **options)
    (issues,) = error.value.issues
    assert all(issue.offenders[0] in str(error.value) for issue in issues.stopping)
    return {issue.kind: issue.offenders for issue in issues}


def said(source):
    return {issue.kind: issue.offenders for issue in source.annotations.issues}


def read_back(source):
    """Reads each record at its position in `spans`; returns {image id: features}."""
    read = {}
    for number, offset, size in source.records.spans.tolist():
        content = pathlib.Path(source.records.files[number]).read_bytes()[offset + 12 : offset + size - 4]
        features = tf.train.Example.FromString(content).features.feature
        read[int(features["image/source_id"].bytes_list.value[0])] = features
    assert source.annotations.image_ids[source.rows].tolist() == list(read)
    assert len(read) == source.annotations.num_images
    return read


def contents(directory):
    return {path: path.read_bytes() for path in directory.iterdir()}


# --- sound records ---


def test_pixels_and_defaults(tmp_path):
    source = open_records(write(tmp_path / "a", record()))
    annotations = source.annotations
    np.testing.assert_allclose(annotations.boxes_ltwh_px, [[10, 10, 40, 30]], rtol=1e-6)
    np.testing.assert_allclose(annotations.areas, [1200], rtol=1e-6)
    assert (annotations.is_crowd.tolist(), annotations.file_names) == ([False], [""])
    assert annotations.image_sizes.tolist() == [[50, 100]]
    assert source.image_name(0) == f"{tmp_path}/a record 0 (image 42)" and source.encoded(0) == PNG


def test_files_are_read_in_parts_in_order(tmp_path, monkeypatch):
    files = [
        write(tmp_path / name, *(numbered(begin + i, object__area=[i + 0.5]) for i in range(count)))
        for name, begin, count in (("a", 1000, 57), ("b", 0, 1), ("c", 500, 40))
    ]
    whole = open_records(*files)
    expected = [*range(1000, 1057), 0, *range(500, 540)]
    assert whole.annotations.image_ids.tolist() == expected
    assert whole.annotations.origin == whole.annotations.issues.origin == f"{files[0]} and 2 more files"
    assert whole.annotations.areas.tolist() == [i % 500 + 0.5 for i in expected]
    monkeypatch.setattr(tfrecord_scan, "_PART", 7)
    monkeypatch.setattr(tfrecord, "_VERSION", -1)
    parts = open_records(*files)
    assert parts.annotations.fingerprint() == whole.annotations.fingerprint()
    assert np.array_equal(parts.records.spans, whole.records.spans)


def test_progress_is_shown_of_large_sets_only(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tfrecord_scan, "_PART", 2)
    file = write(tmp_path / "a", *map(numbered, range(6)))
    open_records(file)
    assert "Checking records" not in capfd.readouterr().err
    monkeypatch.setattr(tfrecord_scan, "_SLOW_BYTES", os.path.getsize(file) - 1)
    open_records(file, policy=SKIP)
    monkeypatch.setattr(tfrecord, "_VERSION", -1)
    open_records(file)
    shown = capfd.readouterr().err
    assert shown.count("Checking records: 3 steps") == 1


# --- all faults are reported together ---


def test_faults_of_all_files_and_records_are_listed_together(tmp_path):
    of_many = [
        b"\xff\xff\xff",
        numbered(51, object__class__label=[5]),
        numbered(54, encoded=b"not an image at all"),
        numbered(2),
        numbered(57, encoded=PNG[:-20]),
    ]
    sound = write(tmp_path / "sound", *map(numbered, range(3)))
    cut = write(tmp_path / "cut", numbered(10), numbered(11, height=0), numbered(0))
    flipped = write(tmp_path / "flipped", numbered(20), numbered(21), numbered(0))
    length = write(tmp_path / "length", numbered(30, object__bbox__xmin=[0.9]), record())
    empty, many, pipe = write(tmp_path / "empty"), write(tmp_path / "many", *of_many), str(tmp_path / "pipe")
    os.truncate(cut, os.path.getsize(cut) - 5)
    flip(flipped, len(numbered(20)) + 16 + 12 + 40)
    flip(length, len(numbered(30, object__bbox__xmin=[0.9])) + 16)
    os.mkfifo(pipe)
    files = (sound, cut, flipped, length, empty, many, pipe)
    found = refused(*files)
    # Records after a damaged record are read too.
    assert found.pop("repeated-image-id") == [
        f"image {i} is given 2 times: {sound} record {i} (image {i}), {other} (image {i})"
        for i, other in ((0, f"{flipped} record 2"), (2, f"{many} record 3"))
    ]
    assert found.pop("file-unreadable") == [f"{pipe}: not a regular file"]
    assert found.pop("file-empty") == [f"{empty} (0 bytes)"]
    places = {kind: re.match("(.*) record (\\d+) ", text).groups() for kind, (text,) in found.items()}
    assert places == {
        "file-truncated": (cut, "2"),
        "not-a-record": (length, "1"),
        "record-damaged": (flipped, "1"),
        "record-value": (cut, "1"),
        "box-negative": (length, "0"),
        "not-an-example": (many, "0"),
        "unknown-category": (many, "1"),
        "not-an-image": (many, "2"),
        "image-truncated": (many, "4"),
    }
    ids = [re.search("image (\\d+)\\)", text) for (text,) in found.values()]
    assert {match[1] for match in ids if match} == {"11", "30", "51", "54", "57"}
    assert not list(tmp_path.glob("*.idx"))
    assert refused(*files).keys() > found.keys()


@pytest.mark.parametrize("position", [12, 100, -5, -1])
def test_a_flipped_bit_is_found_and_hides_nothing(tmp_path, position):
    records = [*map(numbered, range(8)), record(height=-4)]
    file = write(tmp_path / "a", *records)
    begins = np.cumsum([0, *(len(content) + 16 for content in records)]).tolist()
    for number in (2, 5):
        flip(file, begins[number + (position < 0)] + position)
    found = refused(file)
    places = [text.partition(" has the checksum 0x")[0] for text in found["record-damaged"]]
    assert places == [f"{file} record {i} at byte {begins[i]}" for i in (2, 5)]
    assert found["record-value"][0].startswith(f"{file} record 8 (image 42) has image/height -4")


def test_boxes_that_no_box_can_be(tmp_path):
    boxes = {
        "box-not-finite": ([float("nan"), 0.1, 0.2, 0.2], [float("inf"), 0.1, 0.2, 0.2]),
        "box-negative": ([0.6, 0.2, 0.5, 0.9], [0.6, 0.2, 0.7, 0.1], [30.0, 0.1, 20.0, 0.5]),
        "box-in-pixels": ([0.1, 0.1, 0.5, 2.125], [10.0, 0.1, 50.0, 0.5], [0.1, 20.0, 0.5, 40.0]),
    }
    sound = ([1.5, 0.1, 2.0, 2.0], [-9.0, 0.1, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1])
    file = write(tmp_path / "a", record(), of_boxes(*sound, *sum(boxes.values(), ()), source_id=b"9"))
    place = f"{file} record 1 (image 9) has {BOX}"
    assert refused(file) == {kind: [f"{place} {box}" for box in of_kind] for kind, of_kind in boxes.items()}


def test_nothing_to_train_on(tmp_path):
    nothing = "each of the {} boxes is a crowd or has no area"
    assert refused(write(tmp_path / "a", empty_record(1)))["no-boxes"] == [nothing.format(0)]
    assert refused(write(tmp_path / "b", record(object__is_crowd=[1])))["no-boxes"] == [nothing.format(1)]
    found = refused(write(tmp_path / "c", record(encoded=b"no")), policy=SKIP)
    assert found["no-images"] == ["all 1 images are skipped"]


# --- repairs and warnings ---


def test_boxes_that_are_mended_and_what_is_remarkable(tmp_path):
    labels = LabelMap((3, 2**31), ("car", "cat"))
    boxes = ([-0.5, 0.1, 0.5, 0.2], [0.2, 0.1, 0.2, 0.2], [0.3, 0.1, 0.4, 1.5], [1.2, 0.1, 1.3, 0.2])
    file = write(
        tmp_path / "a",
        of_boxes(*boxes, object__class__label=[3, 3, 2**31, 3], object__is_crowd=[0, 0, 1, 0]),
        numbered(5_000_000_007, object__class__label=[3], object__is_crowd=[0]),
        numbered(9, object__class__label=[2**31], object__is_crowd=[1]),
    )
    source = tfrecord.open_records([file], labels)
    first, crowd = f"{file} record 0 (image 42) has {BOX}", f"{file} record 2 (image 9)"
    assert said(source) == {
        "box-outside": [f"{first} [-0.5, 0.1, 0.5, 0.2]"],
        "box-empty": [f"{first} [0.2, 0.1, 0.2, 0.2]", f"{first} [1.2, 0.1, 1.3, 0.2]"],
        "crowd": [f"{first} [0.3, 0.1, 0.4, 1.5]", f"{crowd} has {BOX} [0.1, 0.2, 0.5, 0.8]"],
        "large-id": [f"{file} record 1 (image 5000000007)", f"category {2**31} ('cat')"],
        "image-without-boxes": [crowd],
        "index-made": [file],
    }
    targets = source.annotations.target_boxes
    assert (targets.num_clipped, targets.num_dropped, targets.num_crowds) == (1, 2, 2)


def test_a_turned_image_and_a_wrong_name_are_said(tmp_path):
    turned = pillow("JPEG", np.zeros((50, 100, 3), np.uint8), exif=b"Exif\0\0" + exif(3))
    file = write(tmp_path / "a", record(encoded=turned, filename=b"x.png"))
    found = said(open_records(file))
    assert found["exif-turn"] == [f"{file} record 0 (image 42) has EXIF orientation 3"]
    assert found["wrong-extension"] == [f"{file} record 0 (image 42) is JPEG"]


def test_records_that_dali_cannot_read_are_mended(tmp_path):
    boxes = ([0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.5])
    crowds = {"object__class__label": [17, 3], "object__is_crowd": [1, 0]}
    a = write(tmp_path / "a", of_boxes(*boxes, source_id=b"1", **crowds), empty_record(2), numbered(3))
    b = write(tmp_path / "b", empty_record(4))
    before = contents(tmp_path)
    source = open_records(a, b)
    files = source.records.files
    assert source.annotations.image_ids.tolist() == [1, 2, 3, 4]
    assert files[0] == a and not {a, b} & set(files[1:])
    completed = [f"{a} record 1 (image 2)", f"{a} record 2 (image 3)", f"{b} record 0 (image 4)"]
    assert said(source)["record-completed"] == completed
    assert contents(tmp_path) == before

    read = read_back(source)
    for features in read.values():
        assert features["image/encoded"].bytes_list.value[0] == PNG
        assert all(features[key].WhichOneof("kind") for key in (*BOX_KEYS, LABEL_KEY, CROWD_KEY))
    lists = [[list(read[i][key].int64_list.value) for i in (1, 2, 3, 4)] for key in (CROWD_KEY, LABEL_KEY)]
    assert lists == [[[1, 0], [], [0], []], [[17, 3], [], [17], []]]
    for number, index in enumerate(source.records.indexes):
        spans = source.records.spans[source.records.spans[:, 0] == number, 1:]
        assert np.array_equal(np.loadtxt(index, np.int64, ndmin=2), spans)


def test_mended_copies_of_changed_records_are_made_again(tmp_path):
    for ids in ((1, 2), (3, 4)):
        file = write(tmp_path / "a", numbered(ids[0]), empty_record(ids[1]))
        os.utime(file, (1, 1))
        assert sorted(read_back(open_records(file))) == list(ids)


# --- images that cannot be used ---


def bad_images(tmp_path):
    outside = numbered(4, object__is_crowd=[0], object__bbox__xmax=[1.5])
    sound, cut = numbered(2, object__is_crowd=[0]), numbered(1, encoded=PNG[:-20])
    a = write(tmp_path / "a", cut, sound, numbered(3, encoded=b"GIF89a" + bytes(40)), outside)
    return a, write(tmp_path / "b", numbered(5, encoded=b""), empty_record(6, encoded=b"x"))


def test_bad_images_are_left_out_on_demand(tmp_path):
    a, b = bad_images(tmp_path)
    before = contents(tmp_path)
    source = open_records(a, b, policy=SKIP)
    assert source.annotations.image_ids.tolist() == [2, 4] and source.annotations.num_boxes == 2
    assert sorted(read_back(source)) == [2, 4]
    assert source.records.files == (a,) and source.formats == {"PNG": 2}
    assert len(np.loadtxt(source.records.indexes[0])) == 2
    assert source.encoded(1) == PNG and source.image_name(1) == f"{a} record 3 (image 4)"
    found = {issue.kind: issue for issue in source.annotations.issues}
    assert found.pop("box-outside").offenders[0].startswith(f"{a} record 3 (image 4) has the box")
    assert len(found) == 4 and all(issue.skipped and issue.count == 1 for issue in found.values())
    assert contents(tmp_path) == before
    # SKIP skips images that cannot be read. An image whose size differs from its record stays an error.
    c = write(tmp_path / "c", numbered(7, encoded=png(9, 9)))
    assert set(refused(a, b, c, policy=SKIP)) >= {"image-size-differs"}


def test_limits_are_the_policys(tmp_path):
    file = write(tmp_path / "a", record(), numbered(2, width=2000, encoded=png(2000)))
    assert open_records(file).annotations.num_images == 2
    found = refused(file, policy=ImagePolicy(max_megapixels=0.01))
    assert found["image-too-large"][0].startswith(f"{file} record 1 (image 2): ")
    open_records(file)


# --- the cache of results ---


@pytest.fixture
def reads(monkeypatch):
    read = []
    real = tfrecord_scan._scan_part

    def counted(file, *options):
        read.append(file.path)
        return real(file, *options)

    monkeypatch.setattr(tfrecord_scan, "_scan_part", counted)
    return read


def test_a_second_start_reads_no_data(tmp_path, reads):
    files = [write(tmp_path / str(i), numbered(10 + i), empty_record(20 + i)) for i in range(3)]
    first = open_records(*files)
    assert len(reads) == 3
    # Opening again reads only lengths and stored checksums, so changed data are not noticed.
    content, times = bytearray(pathlib.Path(files[0]).read_bytes()), os.stat(files[0])
    content[50:60] = bytes(10)
    pathlib.Path(files[0]).write_bytes(content)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    second = open_records(*files)
    assert len(reads) == 3
    assert second.fingerprint == first.fingerprint and said(second) == said(first)
    assert (second.records.files, second.records.indexes) == (first.records.files, first.records.indexes)
    assert second.formats == first.formats and second.annotations.origin == first.annotations.origin


def swap(tmp_path, file):
    shutil.copyfile(write(tmp_path / "other", numbered(43)), file)


def relabel(tmp_path, file):
    """The record keeps its length and gets correct checksums."""
    write(file, record(object__class__label=[3]))


@pytest.mark.parametrize("change", [swap, relabel, lambda tmp_path, file: os.utime(file, (5, 5))])
def test_changed_files_are_read_again(tmp_path, reads, change):
    file = write(tmp_path / "a", record())
    before = os.stat(file)
    first = open_records(file)
    change(tmp_path, file)
    assert os.path.getsize(file) == before.st_size
    if change in (swap, relabel):
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = open_records(file)
    assert reads == [file, file]
    assert (second.fingerprint != first.fingerprint) == (change in (swap, relabel))


def test_other_labels_or_every_pixel_are_another_question(tmp_path, reads):
    data = PNG.index(b"IDAT") + 8
    file = write(tmp_path / "a", record(encoded=PNG[:data] + b"\0" + PNG[data + 1 :]))
    open_records(file)
    with pytest.raises(DataError, match="has the label 17"):
        tfrecord.open_records([file], LabelMap((3,), ("car",)))
    assert tfrecord.open_records([file], LabelMap((17,), ("dog",))).annotations.num_boxes == 1
    assert set(refused(file, policy=ImagePolicy(decode=True))) == {"image-damaged"}
    assert len(reads) == 4


def test_bad_images_are_remembered_for_both_policies(tmp_path, reads):
    a, b = bad_images(tmp_path)
    found = refused(a, b)
    assert set(found) == {"image-truncated", "unsupported-format", "image-empty", "not-an-image"}
    assert sorted(reads) == [a, b]
    assert refused(a, b) == found
    skipped = said(open_records(a, b, policy=SKIP))
    assert skipped.items() > found.items() and set(skipped) - set(found) == {"box-outside"}
    assert len(reads) == 2


def test_what_was_kept_badly_is_made_again(tmp_path, reads, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "a", record(), numbered(2, encoded=b""))
    first = open_records(file, policy=SKIP)
    (kept,) = (tmp_path / "cache" / "dali-detection").glob("*.records")
    content = kept.read_bytes()
    for number, bad in enumerate([b"", b"garbage", content[:-100]], 2):
        kept.write_bytes(bad)
        assert open_records(file, policy=SKIP).fingerprint == first.fingerprint
        assert len(reads) == number
    assert kept.read_bytes() == content


@pytest.mark.parametrize("left", [None, len(record()) + 16, len(record()) + 100])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, left):
    real = tfrecord.walk_files

    def walk_files(files, issues):
        walked = real(files, issues)
        os.truncate(files[0], left) if left else os.unlink(files[0])
        return walked

    file = write(tmp_path / "a", record(), numbered(2))
    before, content = os.stat(file), pathlib.Path(file).read_bytes()
    with monkeypatch.context() as context:
        context.setattr(tfrecord, "walk_files", walk_files)
        ((offender,),) = refused(file).values()
    assert file in offender and ("record 1 at byte" if left else "No such file") in offender
    pathlib.Path(file).write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_records(file).annotations.num_images == 2


def test_issues_of_a_copy_are_its_own(tmp_path):
    file = write(tmp_path / "a", record(), empty_record(2))
    open_records(file)
    os.rename(file, tmp_path / "b")
    source = open_records(tmp_path / "b")
    assert source.annotations.origin == str(tmp_path / "b")
    assert "/a record" not in str(said(source))
