"""Record files as a whole: faults, repairs, images that are left out, and the cache of results."""

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


def offenders_of(source):
    """Returns {kind: offenders} of the issues that did not stop."""
    return {issue.kind: issue.offenders for issue in source.annotations.issues}


def features_of(source):
    """Reads each record at its position in `spans`; returns {image id: features}."""
    features_by_id = {}
    for number, offset, size in source.records.spans.tolist():
        content = pathlib.Path(source.records.files[number]).read_bytes()[offset + 12 : offset + size - 4]
        features = tf.train.Example.FromString(content).features.feature
        features_by_id[int(features["image/source_id"].bytes_list.value[0])] = features
    assert source.annotations.image_ids[source.rows].tolist() == list(features_by_id)
    assert len(features_by_id) == source.annotations.num_images
    return features_by_id


def contents(directory):
    return {path: path.read_bytes() for path in directory.iterdir()}


# --- sound records ---


def test_record_without_crowd_area_and_file_name_gets_boxes_in_pixels_and_default_values(tmp_path):
    source = open_records(write(tmp_path / "a", record()))
    annotations = source.annotations
    np.testing.assert_allclose(annotations.boxes_ltwh_px, [[10, 10, 40, 30]], rtol=1e-6)
    np.testing.assert_allclose(annotations.areas, [1200], rtol=1e-6)
    assert (annotations.is_crowd.tolist(), annotations.file_names) == ([False], [""])
    assert annotations.image_sizes.tolist() == [[50, 100]]
    assert source.image_name(0) == f"{tmp_path}/a record 0 (image 42)" and source.encoded(0) == PNG


def test_images_of_several_tfrecord_files_keep_their_order_also_when_read_in_parts(tmp_path, monkeypatch):
    files = [
        write(tmp_path / name, *(numbered(begin + i, object__area=[i + 0.5]) for i in range(count)))
        for name, begin, count in (("a", 1000, 57), ("b", 0, 1), ("c", 500, 40))
    ]
    expected = [*range(1000, 1057), 0, *range(500, 540)]
    source = open_records(*files)
    assert source.annotations.image_ids.tolist() == expected
    assert source.annotations.origin == source.annotations.issues.origin == f"{files[0]} and 2 more files"
    assert source.annotations.areas.tolist() == [i % 500 + 0.5 for i in expected]
    monkeypatch.setattr(tfrecord_scan, "_PART", 7)
    monkeypatch.setattr(tfrecord, "_VERSION", -1)
    in_parts = open_records(*files)
    assert in_parts.annotations.fingerprint() == source.annotations.fingerprint()
    assert np.array_equal(in_parts.records.spans, source.records.spans)


def test_name_of_two_tfrecord_files_has_no_plural():
    names = (tfrecord_scan.name_files(["a", "b", "c"][:count]) for count in (1, 2, 3))
    assert list(names) == ["a", "a and 1 more file", "a and 2 more files"]


def test_progress_bar_is_shown_for_large_tfrecord_files_that_are_not_cached(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tfrecord_scan, "_PART", 2)
    file = write(tmp_path / "a", *map(numbered, range(6)))
    open_records(file)
    assert "Checking records" not in capfd.readouterr().err
    monkeypatch.setattr(tfrecord_scan, "_SLOW_BYTES", os.path.getsize(file) - 1)
    open_records(file, policy=SKIP)
    monkeypatch.setattr(tfrecord, "_VERSION", -1)
    open_records(file)
    assert capfd.readouterr().err.count("Checking records: 3 steps") == 1


# --- all faults are reported together ---


def test_faults_of_all_tfrecord_files_and_records_are_reported_together(tmp_path):
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
    offenders = refused(*files)
    # Records after a damaged record are read too.
    assert offenders.pop("repeated-image-id") == [
        f"image {i} is given 2 times: {sound} record {i} (image {i}), {place} (image {i})"
        for i, place in ((0, f"{flipped} record 2"), (2, f"{many} record 3"))
    ]
    assert offenders.pop("file-unreadable") == [f"{pipe}: not a regular file"]
    assert offenders.pop("file-empty") == [f"{empty} (0 bytes)"]
    places = {kind: re.match("(.*) record (\\d+) ", text).groups() for kind, (text,) in offenders.items()}
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
    ids = [re.search("image (\\d+)\\)", text) for (text,) in offenders.values()]
    assert {match[1] for match in ids if match} == {"11", "30", "51", "54", "57"}
    assert not list(tmp_path.glob("*.idx"))
    assert refused(*files).keys() > offenders.keys()


@pytest.mark.parametrize("position", [12, 100, -5, -1])
def test_records_with_a_flipped_bit_and_faults_in_later_records_are_all_reported(tmp_path, position):
    records = [*map(numbered, range(8)), record(height=-4)]
    file = write(tmp_path / "a", *records)
    begins = np.cumsum([0, *(len(content) + 16 for content in records)]).tolist()
    for number in (2, 5):
        flip(file, begins[number + (position < 0)] + position)
    offenders = refused(file)
    places = [text.partition(" has the checksum 0x")[0] for text in offenders["record-damaged"]]
    assert places == [f"{file} record {i} at byte {begins[i]}" for i in (2, 5)]
    assert offenders["record-value"][0].startswith(f"{file} record 8 (image 42) has image/height -4")


def test_infinite_negative_or_pixel_boxes_in_records_are_refused_but_not_boxes_outside_the_image(
    tmp_path,
):
    boxes = {
        "box-not-finite": ([float("nan"), 0.1, 0.2, 0.2], [float("inf"), 0.1, 0.2, 0.2]),
        "box-negative": ([0.6, 0.2, 0.5, 0.9], [0.6, 0.2, 0.7, 0.1], [30.0, 0.1, 20.0, 0.5]),
        "box-in-pixels": ([0.1, 0.1, 0.5, 2.125], [10.0, 0.1, 50.0, 0.5], [0.1, 20.0, 0.5, 40.0]),
    }
    sound = ([1.5, 0.1, 2.0, 2.0], [-9.0, 0.1, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1])
    file = write(tmp_path / "a", record(), of_boxes(*sound, *sum(boxes.values(), ()), source_id=b"9"))
    place = f"{file} record 1 (image 9) has {BOX}"
    assert refused(file) == {kind: [f"{place} {box}" for box in of_kind] for kind, of_kind in boxes.items()}


def test_records_without_any_box_or_image_to_train_on_are_refused(tmp_path):
    reason = "each of the {} boxes is a crowd or has no area"
    assert refused(write(tmp_path / "a", empty_record(1)))["no-boxes"] == [reason.format(0)]
    assert refused(write(tmp_path / "b", record(object__is_crowd=[1])))["no-boxes"] == [reason.format(1)]
    offenders = refused(write(tmp_path / "c", record(encoded=b"no")), policy=SKIP)
    assert offenders["no-images"] == ["all 1 images are skipped"]


# --- repairs and warnings ---


def test_clipped_and_empty_boxes_crowds_and_large_ids_in_records_are_reported_but_accepted(tmp_path):
    labels = LabelMap((3, 2**31), ("car", "cat"))
    boxes = ([-0.5, 0.1, 0.5, 0.2], [0.2, 0.1, 0.2, 0.2], [0.3, 0.1, 0.4, 1.5], [1.2, 0.1, 1.3, 0.2])
    file = write(
        tmp_path / "a",
        of_boxes(*boxes, object__class__label=[3, 3, 2**31, 3], object__is_crowd=[0, 0, 1, 0]),
        numbered(5_000_000_007, object__class__label=[3], object__is_crowd=[0], encoded=png(color="red")),
        numbered(9, object__class__label=[2**31], object__is_crowd=[1], encoded=png(color="blue")),
    )
    source = tfrecord.open_records([file], labels)
    first, crowd = f"{file} record 0 (image 42) has {BOX}", f"{file} record 2 (image 9)"
    assert offenders_of(source) == {
        "box-outside": [f"{first} [-0.5, 0.1, 0.5, 0.2]"],
        "box-empty": [f"{first} [0.2, 0.1, 0.2, 0.2]", f"{first} [1.2, 0.1, 1.3, 0.2]"],
        "crowd": [f"{first} [0.3, 0.1, 0.4, 1.5]", f"{crowd} has {BOX} [0.1, 0.2, 0.5, 0.8]"],
        "large-id": [f"{file} record 1 (image 5000000007)", f"category {2**31} ('cat')"],
        "image-without-boxes": [crowd],
        "index-made": [file],
    }
    targets = source.annotations.target_boxes
    assert (targets.num_clipped, targets.num_dropped, targets.num_crowds) == (1, 2, 2)


def test_exif_orientation_and_wrong_file_suffix_of_an_image_in_a_record_are_reported(tmp_path):
    turned = pillow("JPEG", np.zeros((50, 100, 3), np.uint8), exif=b"Exif\0\0" + exif(3))
    file = write(tmp_path / "a", record(encoded=turned, filename=b"x.png"))
    offenders = offenders_of(open_records(file))
    assert offenders["exif-turn"] == [f"{file} record 0 (image 42) has EXIF orientation 3"]
    assert offenders["wrong-extension"] == [f"{file} record 0 (image 42) is JPEG"]


def test_records_without_crowd_or_box_keys_are_completed_in_a_copy(tmp_path):
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
    assert offenders_of(source)["record-completed"] == completed
    assert contents(tmp_path) == before

    features_by_id = features_of(source)
    for features in features_by_id.values():
        assert features["image/encoded"].bytes_list.value[0] == PNG
        assert all(features[key].WhichOneof("kind") for key in (*BOX_KEYS, LABEL_KEY, CROWD_KEY))
    for key, expected in ((CROWD_KEY, [[1, 0], [], [0], []]), (LABEL_KEY, [[17, 3], [], [17], []])):
        assert [list(features_by_id[i][key].int64_list.value) for i in (1, 2, 3, 4)] == expected
    for number, index in enumerate(source.records.indexes):
        spans = source.records.spans[source.records.spans[:, 0] == number, 1:]
        assert np.array_equal(np.loadtxt(index, np.int64, ndmin=2), spans)


def test_repeated_box_of_a_record_is_dropped_in_a_copy_and_reported(tmp_path):
    box, other = [0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.5]
    boxes = {"object__class__label": [3, 3, 17, 3, 3, 3], "object__is_crowd": [0, 0, 0, 1, 0, 0]}
    boxes |= {"object__area": [9.0, 9.0, 9.0, 9.0, 8.0, 9.0], "source_id": b"1"}
    sound = numbered(2, object__is_crowd=[0], encoded=png(color="red"))
    file = write(tmp_path / "a", of_boxes(box, other, box, box, box, box, **boxes), sound)
    before = contents(tmp_path)
    for _ in range(2):  # the second time, from the cache
        source = open_records(file)
        assert offenders_of(source)["box-repeated"] == [f"{file} record 0 (image 1) has {BOX} {box}"]
        assert "record-completed" not in offenders_of(source)
        assert source.annotations.category_ids.tolist() == [3, 3, 17, 3, 3, 17]
        features = features_of(source)[1]
        assert list(features[LABEL_KEY].int64_list.value) == [3, 3, 17, 3, 3]
        assert list(features[CROWD_KEY].int64_list.value) == [0, 0, 0, 1, 0]
        edges = [np.float32(features[key].float_list.value) for key in BOX_KEYS]
        np.testing.assert_array_equal(np.transpose(edges), np.float32([box, other, box, box, box]))
        assert source.records.files[0] == file and len(source.records.files) == 2
    assert contents(tmp_path).keys() - before.keys() <= {tmp_path / "a.idx"}


def test_equal_images_in_one_or_two_record_files_are_reported_by_their_bytes(tmp_path):
    a = write(tmp_path / "a", numbered(1), numbered(2, encoded=png(color="red")))
    b = write(tmp_path / "b", numbered(3, encoded=PNG + b"\0"), numbered(4))
    (offender,) = offenders_of(open_records(a, b))["repeated-image"]
    assert offender == f"{a} record 0 (image 1) = {b} record 1 (image 4)"
    assert "repeated-image" not in offenders_of(open_records(a))


def test_images_without_an_id_get_free_numbers_in_a_copy(tmp_path):
    names = [record(source_id=name, object__is_crowd=[0]) for name in (b"cat.jpg", b"dog.jpg")]
    a = write(tmp_path / "a", names[0], numbered(2, object__is_crowd=[0]), names[1])
    b = write(tmp_path / "b", record(source_id=None, filename=b"d/e.png"), empty_record(7, source_id=None))
    before = contents(tmp_path)
    for _ in range(2):  # the second time, from the cache
        source = open_records(a, b)
        assert source.annotations.image_ids.tolist() == [1, 2, 3, 4, 5]
        assert source.annotations.file_names == ["cat.jpg", "", "dog.jpg", "d/e.png", ""]
        assert offenders_of(source)["record-numbered"] == [
            f"{a} record 0 (image 1) 'cat.jpg'",
            f"{a} record 2 (image 3) 'dog.jpg'",
            f"{b} record 0 (image 4) 'd/e.png'",
            f"{b} record 1 (image 5) ''",
        ]
        assert sorted(features_of(source)) == [1, 2, 3, 4, 5]
        assert source.image_name(2) == f"{a} record 2 (image 3)" and source.encoded(2) == PNG
    assert contents(tmp_path) == {**before, **{path: path.read_bytes() for path in tmp_path.glob("*.idx")}}
    other = open_records(write(tmp_path / "c", numbered(1)), a)  # 1 is not free
    assert sorted(features_of(other)) == [1, 2, 3, 4]


def test_records_with_an_integer_as_id_are_completed_and_keep_it(tmp_path):
    source = open_records(write(tmp_path / "a", record(source_id=7), numbered(8)))
    assert sorted(features_of(source)) == [7, 8]
    assert offenders_of(source)["record-completed"] == [f"{tmp_path}/a record 0 (image 7)"]
    assert "record-numbered" not in offenders_of(source)


def test_several_records_of_one_image_are_refused(tmp_path):
    """Some scripts write one record for each box."""
    contents = [record(source_id=name, filename=name) for name in (b"a.jpg", b"b.jpg", b"a.jpg", b"", b"")]
    file = write(tmp_path / "a", *contents)
    places = f"{file} record 0 (image 1), {file} record 2 (image 3)"
    assert refused(file)["repeated-record"] == [f"image 'a.jpg' is given 2 times: {places}"]


def test_tfrecord_class_text_that_contradicts_the_label_map_is_refused(tmp_path):
    file = write(tmp_path / "a", record(object__class__text=b"dog"))
    (offender,) = refused(file)["class-text"]
    assert offender.endswith("label 17 image/object/class/text 'dog', but the name 'cat' in the label map")
    labels = LabelMap((17,), ("Katze",), ("dog",))
    assert tfrecord.open_records([file], labels).annotations.num_boxes == 1


def test_copy_of_records_with_missing_keys_added_is_made_again_if_the_records_change(tmp_path):
    for ids in ((1, 2), (3, 4)):
        file = write(tmp_path / "a", numbered(ids[0]), empty_record(ids[1]))
        os.utime(file, (1, 1))
        assert sorted(features_of(open_records(file))) == list(ids)


# --- images that cannot be used ---


def write_bad_images(tmp_path):
    """Writes four images that cannot be used, and the images 2 and 4. Returns the two files."""
    outside = numbered(4, object__is_crowd=[0], object__bbox__xmax=[1.5], encoded=png(color="gray"))
    sound, cut = numbered(2, object__is_crowd=[0]), numbered(1, encoded=PNG[:-20])
    a = write(tmp_path / "a", cut, sound, numbered(3, encoded=b"GIF89a" + bytes(40)), outside)
    return a, write(tmp_path / "b", numbered(5, encoded=b""), empty_record(6, encoded=b"x"))


def test_bad_images_under_policy_skip_are_left_out_of_index_and_annotations(tmp_path):
    a, b = write_bad_images(tmp_path)
    before = contents(tmp_path)
    source = open_records(a, b, policy=SKIP)
    assert source.annotations.image_ids.tolist() == [2, 4] and source.annotations.num_boxes == 2
    assert sorted(features_of(source)) == [2, 4]
    assert source.records.files == (a,) and source.formats == {"PNG": 2}
    assert len(np.loadtxt(source.records.indexes[0])) == 2
    assert source.encoded(1) == png(color="gray") and source.image_name(1) == f"{a} record 3 (image 4)"
    issues = {issue.kind: issue for issue in source.annotations.issues}
    assert issues.pop("box-outside").offenders[0].startswith(f"{a} record 3 (image 4) has the box")
    assert len(issues) == 4 and all(issue.skipped and issue.count == 1 for issue in issues.values())
    assert contents(tmp_path) == before


def test_record_whose_image_has_another_size_is_an_error_even_if_bad_images_are_skipped(tmp_path):
    file = write(tmp_path / "a", numbered(7, encoded=png(9, 9)), record())
    assert set(refused(file, policy=SKIP)) >= {"image-size-differs"}


def test_record_image_above_max_megapixels_of_the_policy_is_refused(tmp_path):
    file = write(tmp_path / "a", record(), numbered(2, width=2000, encoded=png(2000)))
    assert open_records(file).annotations.num_images == 2
    offenders = refused(file, policy=ImagePolicy(max_megapixels=0.01))
    assert offenders["image-too-large"][0].startswith(f"{file} record 1 (image 2): ")
    open_records(file)


# --- the cache of results ---


@pytest.fixture
def scanned(monkeypatch):
    """The paths of the files whose data are read, as they are read."""
    paths = []
    real = tfrecord_scan._scan_part

    def scan_part(file, *options):
        paths.append(file.path)
        return real(file, *options)

    monkeypatch.setattr(tfrecord_scan, "_scan_part", scan_part)
    return paths


def test_records_opened_again_come_from_the_cache_with_the_same_issues(tmp_path, scanned):
    files = [write(tmp_path / str(i), numbered(10 + i), empty_record(20 + i)) for i in range(3)]
    first = open_records(*files)
    assert len(scanned) == 3
    # Opening again reads only lengths and stored checksums, so changed data are not noticed.
    content, times = bytearray(pathlib.Path(files[0]).read_bytes()), os.stat(files[0])
    content[50:60] = bytes(10)
    pathlib.Path(files[0]).write_bytes(content)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    second = open_records(*files)
    assert len(scanned) == 3
    assert second.fingerprint == first.fingerprint and offenders_of(second) == offenders_of(first)
    assert (second.records.files, second.records.indexes) == (first.records.files, first.records.indexes)
    assert second.formats == first.formats and second.annotations.origin == first.annotations.origin


def replace_record(tmp_path, file):
    shutil.copyfile(write(tmp_path / "other", numbered(43)), file)


def change_label(tmp_path, file):
    """The record keeps its length and gets correct checksums."""
    write(file, record(object__class__label=[3]))


@pytest.mark.parametrize("change", [replace_record, change_label])
def test_tfrecord_file_with_changed_records_but_equal_size_and_time_is_read_again(tmp_path, scanned, change):
    file = write(tmp_path / "a", record())
    before = os.stat(file)
    first = open_records(file)
    change(tmp_path, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.path.getsize(file) == before.st_size
    assert open_records(file).fingerprint != first.fingerprint
    assert scanned == [file, file]


def test_touched_tfrecord_file_is_read_again_and_keeps_its_fingerprint(tmp_path, scanned):
    file = write(tmp_path / "a", record())
    first = open_records(file)
    os.utime(file, (5, 5))
    assert open_records(file).fingerprint == first.fingerprint
    assert scanned == [file, file]


def test_cached_check_of_records_is_not_used_for_another_label_map_or_decoding_policy(tmp_path, scanned):
    data = PNG.index(b"IDAT") + 8
    file = write(tmp_path / "a", record(encoded=PNG[:data] + b"\0" + PNG[data + 1 :]))
    open_records(file)
    with pytest.raises(DataError, match="has the label 17"):
        tfrecord.open_records([file], LabelMap((3,), ("car",)))
    assert tfrecord.open_records([file], LabelMap((17,), ("dog",))).annotations.num_boxes == 1
    assert set(refused(file, policy=ImagePolicy(decode=True))) == {"image-damaged"}
    assert len(scanned) == 4


def test_cached_check_of_records_reports_bad_images_whether_the_policy_is_error_or_skip(tmp_path, scanned):
    a, b = write_bad_images(tmp_path)
    offenders = refused(a, b)
    assert set(offenders) == {"image-truncated", "unsupported-format", "image-empty", "not-an-image"}
    assert sorted(scanned) == [a, b]
    assert refused(a, b) == offenders
    skipped = offenders_of(open_records(a, b, policy=SKIP))
    assert skipped.items() > offenders.items() and set(skipped) - set(offenders) == {"box-outside"}
    assert len(scanned) == 2


def test_damaged_cache_of_checked_records_is_ignored_and_written_again(tmp_path, scanned, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "a", record(), numbered(2, encoded=b""))
    first = open_records(file, policy=SKIP)
    (cache,) = (tmp_path / "cache" / "dali-detection").glob("*.records")
    content = cache.read_bytes()
    for number, damaged in enumerate([b"", b"garbage", content[:-100]], 2):
        cache.write_bytes(damaged)
        assert open_records(file, policy=SKIP).fingerprint == first.fingerprint
        assert len(scanned) == number
    assert cache.read_bytes() == content


ONE_RECORD = len(record()) + 16


@pytest.mark.parametrize(
    "size", [None, ONE_RECORD, ONE_RECORD + 84], ids=["removed", "1 record", "1.5 records"]
)
def test_tfrecord_file_that_is_removed_or_cut_during_the_check_is_refused_and_not_cached(
    tmp_path, monkeypatch, size
):
    real = tfrecord.walk_files

    def walk_files(files, issues):
        walked = real(files, issues)
        os.truncate(files[0], size) if size else os.unlink(files[0])
        return walked

    file = write(tmp_path / "a", record(), numbered(2))
    before, content = os.stat(file), pathlib.Path(file).read_bytes()
    with monkeypatch.context() as context:
        context.setattr(tfrecord, "walk_files", walk_files)
        ((offender,),) = refused(file).values()
    assert file in offender and ("record 1 at byte" if size else "No such file") in offender
    pathlib.Path(file).write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_records(file).annotations.num_images == 2


def test_issues_of_a_renamed_tfrecord_file_have_its_new_name(tmp_path):
    file = write(tmp_path / "a", record(), empty_record(2))
    open_records(file)
    os.rename(file, tmp_path / "b")
    source = open_records(tmp_path / "b")
    assert source.annotations.origin == str(tmp_path / "b")
    assert "/a record" not in str(offenders_of(source))
