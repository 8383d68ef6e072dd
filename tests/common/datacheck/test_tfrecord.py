"""Opened records: as the json that they were made from, or everything that is wrong with all of them."""

import io
import os
import pathlib
import re
import shutil

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common import files
from common.datacheck import images, tfrecord, tfrecord_scan
from common.datacheck.coco import load_coco
from common.datacheck.images import ImagePolicy
from common.datacheck.issues import KINDS, DataError, Issues, Severity
from common.errors import UserError
from common.labels import LabelMap
from common.tfrecord import BOX_KEYS, CROWD_KEY, LABEL_KEY, write_index
from tests.common.record_writing import LABELS, PNG, empty_record, flip, png, record, write
from tools.conversion.coco_to_tfrecord import write_tfrecords

SKIP = ImagePolicy(on_bad_image="skip")


def scan_one(tmp_path, *contents):
    return tfrecord.open_records([write(tmp_path / "one.tfrecord", *contents)], LABELS).annotations


def refused(files, **options):
    """What is found in records that are refused: {kind: offenders}."""
    with pytest.raises(DataError) as error:
        tfrecord.open_records(files, LABELS, **options)
    (issues,) = error.value.issues
    for issue in issues.stopping:
        assert issue.offenders[0] in str(error.value)
    return {issue.kind: issue.offenders for issue in issues}


def said(records):
    return {issue.kind: issue.offenders for issue in records.annotations.issues}


def read_back(records):
    """{image id: features} at the spans, in order."""
    read = {}
    assert len(records.rows) == len(records.records.spans) == records.annotations.num_images
    for number, offset, size in records.records.spans.tolist():
        content = pathlib.Path(records.records.files[number]).read_bytes()[offset + 12 : offset + size - 4]
        features = tf.train.Example.FromString(content).features.feature
        read[int(features["image/source_id"].bytes_list.value[0])] = features
    assert records.annotations.image_ids[records.rows].tolist() == list(read)
    return read


# --- sound records ---


@pytest.mark.parametrize(
    "name", ["coco128/instances.json", "bccd/instances_val.json", "drawn/instances.json"]
)
def test_records_say_what_the_json_says(name, request, tmp_path):
    directory, file = name.split("/")
    path = request.getfixturevalue(directory) / file
    annotations = load_coco(path, path.parent / "images")
    files = write_tfrecords(annotations, path.parent / "images", tmp_path / "t", num_shards=3)
    records = tfrecord.open_records(files, annotations.label_map, policy=ImagePolicy(decode=True))
    scanned = records.annotations
    assert scanned.origin == f"{files[0]} and 2 more files"
    rows = {image_id: row for row, image_id in enumerate(scanned.image_ids.tolist())}
    assert sorted(rows) == sorted(annotations.image_ids.tolist())
    for row, image_id in enumerate(annotations.image_ids.tolist()):
        other = rows[image_id]
        assert scanned.file_names[other] == annotations.file_names[row]
        assert scanned.image_sizes[other].tolist() == annotations.image_sizes[row].tolist()
        ours = slice(*scanned.row_splits[other : other + 2])
        theirs = np.arange(*annotations.row_splits[row : row + 2])
        clipped = annotations.clipped_boxes[0][theirs]
        theirs = theirs[(clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])]
        assert np.array_equal(scanned.clipped_boxes[0][ours], annotations.clipped_boxes[0][theirs])
        assert scanned.category_ids[ours].tolist() == annotations.category_ids[theirs].tolist()
        assert scanned.is_crowd[ours].tolist() == annotations.is_crowd[theirs].tolist()
        np.testing.assert_allclose(scanned.areas[ours], annotations.areas[theirs], rtol=1e-6)
    # No false alarm: what the converter wrote needs no mending.
    assert scanned.issues.origin == scanned.origin
    assert set(said(records)) <= {"crowd", "image-without-boxes", "large-id"}
    assert list(records.records.files) == files
    assert list(records.records.indexes) == [f"{file}.idx" for file in files]
    assert records.formats == {"coco128": {"JPEG": 128}, "bccd": {"JPEG": 87}}.get(
        directory, {"JPEG": 11, "PNG": 1}
    )


def test_pixels_and_defaults(tmp_path):
    annotations = scan_one(tmp_path, record())
    np.testing.assert_allclose(annotations.boxes_ltwh_px, [[10, 10, 40, 30]], rtol=1e-6)
    np.testing.assert_allclose(annotations.areas, [1200], rtol=1e-6)
    assert annotations.is_crowd.tolist() == [False]
    assert annotations.file_names == [""]
    assert annotations.image_sizes.tolist() == [[50, 100]]


def test_many_records_in_many_parts(tmp_path, monkeypatch):
    """Files are read in parts, by several threads; the order stays."""
    files = [
        write(
            tmp_path / name,
            *(record(source_id=b"%d" % (begin + i), object__area=[i + 0.5]) for i in range(count)),
        )
        for name, begin, count in (("a", 1000, 57), ("b", 0, 1), ("c", 500, 40))
    ]
    whole = tfrecord.open_records(files, LABELS)
    expected = [*range(1000, 1057), 0, *range(500, 540)]
    assert whole.annotations.image_ids.tolist() == expected
    assert whole.annotations.areas.tolist() == [i % 500 + 0.5 for i in expected]
    for part in (1, 7):
        monkeypatch.setattr(tfrecord_scan, "_PART", part)
        monkeypatch.setattr(tfrecord, "_VERSION", -part)
        parts = tfrecord.open_records(files, LABELS)
        assert parts.annotations.fingerprint() == whole.annotations.fingerprint()
        assert np.array_equal(parts.records.spans, whole.records.spans)


def test_progress_is_shown_of_large_sets_only(tmp_path, monkeypatch, capfd):
    shown = []

    class Bar:
        def __init__(self, title, total):
            shown.append([title, total, 0])

        def step(self):
            shown[-1][2] += 1

    monkeypatch.setattr(images, "Bar", Bar)
    monkeypatch.setattr(tfrecord_scan, "_PART", 2)
    scan_one(tmp_path, *(record(source_id=b"%d" % i) for i in range(5)))
    assert not shown
    monkeypatch.setattr(tfrecord_scan, "_SLOW_BYTES", 4)
    scan_one(tmp_path, *(record(source_id=b"%d" % i) for i in range(6)))
    assert shown == [["Checking records", 3, 3]]


# --- everything that is wrong, at once ---


def test_faults_of_all_files_and_records_are_listed_together(tmp_path):
    sound = [record(source_id=b"%d" % i) for i in range(3)]
    files = {
        "sound": write(tmp_path / "0", *sound),
        "cut": write(tmp_path / "1", record(source_id=b"10"), record(source_id=b"11", height=0), sound[0]),
        "flipped": write(tmp_path / "2", record(source_id=b"20"), record(source_id=b"21"), sound[0]),
        "length": write(tmp_path / "3", record(source_id=b"30", object__bbox__xmin=[0.9]), record()),
        "empty": write(tmp_path / "4"),
        "records": write(
            tmp_path / "5",
            b"\xff\xff\xff",
            record(source_id=b"51", object__class__label=[5]),
            record(source_id=b"52", object__bbox__ymax=[float("nan")]),
            record(source_id=b"53", width=7.0),
            record(source_id=b"54", encoded=b"not an image at all"),
            record(source_id=b"55", encoded=png(60, 40)),
            record(source_id=b"2"),
            record(source_id=b"57", encoded=PNG[:-20]),
        ),
    }
    os.truncate(files["cut"], os.path.getsize(files["cut"]) - 5)
    flip(files["flipped"], len(record(source_id=b"20")) + 16 + 12 + 40)
    flip(files["length"], len(record(source_id=b"30", object__bbox__xmin=[0.9])) + 16)
    pipe = tmp_path / "6"
    os.mkfifo(pipe)
    found = refused([*files.values(), pipe])
    # The record that is damaged does not hide the one behind it, whose id is that of a sound one.
    assert found.pop("repeated-image-id") == [
        f"image {i} is given 2 times: {one} (image {i}), {other} (image {i})"
        for i, one, other in (
            (0, f"{files['sound']} record 0", f"{files['flipped']} record 2"),
            (2, f"{files['sound']} record 2", f"{files['records']} record 6"),
        )
    ]
    assert found.pop("record-file-unreadable") == [f"{pipe} is not a regular file"]
    assert found.pop("record-file-empty") == [f"{files['empty']} (0 bytes)"]
    places = {kind: re.match("(.*) record (\\d+) ", text).groups() for kind, (text,) in found.items()}
    assert places == {
        "record-truncated": (files["cut"], "2"),
        "not-a-record": (files["length"], "1"),
        "record-damaged": (files["flipped"], "1"),
        "record-value": (files["cut"], "1"),
        "box-negative": (files["length"], "0"),
        "not-an-example": (files["records"], "0"),
        "unknown-category": (files["records"], "1"),
        "box-not-finite": (files["records"], "2"),
        "record-key-type": (files["records"], "3"),
        "not-an-image": (files["records"], "4"),
        "image-size-differs": (files["records"], "5"),
        "image-truncated": (files["records"], "7"),
    }
    ids = [re.search("image (\\d+)\\)", text) for (text,) in found.values()]
    assert {match[1] for match in ids if match} == {"11", "30", "51", "52", "53", "54", "55", "57"}
    assert not list(tmp_path.glob("*.idx"))


@pytest.mark.parametrize("position", [12, 100, -5, -1])
def test_a_flipped_bit_is_found_and_hides_nothing(tmp_path, position):
    contents = [record(source_id=b"%d" % i) for i in range(9)]
    file = write(tmp_path / "a", *contents[:8], record(height=-4))
    begins = np.cumsum([0, *(len(content) + 16 for content in contents)]).tolist()
    for number in (2, 5):
        flip(file, begins[number] + position if position > 0 else begins[number + 1] + position)
    found = refused([file])
    places = [text.partition(" has the checksum 0x")[0] for text in found["record-damaged"]]
    assert places == [f"{file} record {i} at byte {begins[i]}" for i in (2, 5)]
    assert found["record-value"][0].startswith(f"{file} record 8 (image 42) has image/height -4")


def test_boxes_that_no_box_can_be(tmp_path):
    nan, inf = float("nan"), float("inf")
    sides = {
        "object__bbox__xmin": [0.1, nan, inf, 0.6],
        "object__bbox__ymin": [0.1, 0.1, 0.1, 0.2],
        "object__bbox__xmax": [0.2, 0.2, 0.2, 0.5],
        "object__bbox__ymax": [0.2, 0.2, 0.2, 0.9],
    }
    file = write(tmp_path / "a", record(**sides, object__class__label=[3, 3, 3, 3]))
    text = f"{file} record 0 (image 42) has the box xmin, ymin, xmax, ymax = "
    assert refused([file]) == {
        "box-not-finite": [f"{text}[nan, 0.1, 0.2, 0.2]", f"{text}[inf, 0.1, 0.2, 0.2]"],
        "box-negative": [f"{text}[0.6, 0.2, 0.5, 0.9]"],
    }


def test_an_image_id_given_often_names_the_first_records(tmp_path):
    files = [write(tmp_path / name, *[record(source_id=b"7")] * 3) for name in "ab"]
    files.append(
        write(tmp_path / "c", record(source_id=b"8"), record(source_id=b"x"), record(source_id=b"y"))
    )
    (text,) = refused(files)["repeated-image-id"]  # ids that are none are not equal
    named = [f"{files[0]} record 0", f"{files[0]} record 1", f"{files[0]} record 2", f"{files[1]} record 0"]
    assert text == f"image 7 is given 6 times: {', '.join(f'{name} (image 7)' for name in named)}, ..."


def test_nothing_to_train_on(tmp_path):
    file = write(tmp_path / "a", empty_record(1))
    assert refused([file])["no-boxes"] == ["none of 0 boxes is more than a crowd or an empty box"]
    file = write(tmp_path / "b", record(object__is_crowd=[1]))
    assert refused([file])["no-boxes"] == ["none of 1 boxes is more than a crowd or an empty box"]
    file = write(tmp_path / "c", record(encoded=b"no"))
    assert refused([file], policy=SKIP)["no-images"] == ["all 1 are left out"]


def test_what_stops_leaves_no_index_and_is_found_again(tmp_path):
    file = write(tmp_path / "a", record(), record())
    assert refused([file]) == refused([file])
    assert os.listdir(tmp_path) == ["a"]


# --- what is mended or said ---


def test_boxes_in_pixels_stop(tmp_path):
    """Whichever edge says it, and whether or not the others may be fractions."""
    sides = {
        "object__bbox__xmin": [0.1, 10.0, 0.1, 1.5, -9.0, 30.0],
        "object__bbox__ymin": [0.1, 0.1, 20.0, 0.1, 0.1, 0.1],
        "object__bbox__xmax": [0.5, 50.0, 0.5, 2.0, 0.5, 20.0],
        "object__bbox__ymax": [2.125, 0.5, 40.0, 2.0, 0.5, 0.5],
    }
    file = write(tmp_path / "a", record(), record(**sides, source_id=b"9", object__class__label=[3] * 6))
    box = f"{file} record 1 (image 9) has the box xmin, ymin, xmax, ymax ="
    assert refused([file]) == {
        "box-negative": [f"{box} [30.0, 0.1, 20.0, 0.5]"],
        "box-in-pixels": [
            f"{box} [0.1, 0.1, 0.5, 2.125]",
            f"{box} [10.0, 0.1, 50.0, 0.5]",
            f"{box} [0.1, 20.0, 0.5, 40.0]",
        ],
    }


def test_boxes_that_are_mended_and_what_is_remarkable(tmp_path):
    sides = {
        "object__bbox__xmin": [-0.5, 0.2, 0.3, 1.2],
        "object__bbox__ymin": [0.1, 0.1, 0.1, 0.1],
        "object__bbox__xmax": [0.5, 0.2, 0.4, 1.3],
        "object__bbox__ymax": [0.2, 0.2, 1.5, 0.2],
    }
    labels = LabelMap((3, 2**31), ("car", "cat"))
    objects = {"object__class__label": [3, 3, 2**31, 3], "object__is_crowd": [0, 0, 1, 0]}
    file = write(
        tmp_path / "a",
        record(**sides, **objects),
        record(source_id=b"5000000007", object__class__label=[3], object__is_crowd=[0]),
        record(source_id=b"9", object__class__label=[2**31], object__is_crowd=[1]),
    )
    records = tfrecord.open_records([file], labels)
    box = "the box xmin, ymin, xmax, ymax ="
    assert said(records) == {
        "box-outside": [f"{file} record 0 (image 42) has {box} [-0.5, 0.1, 0.5, 0.2]"],
        "box-empty": [
            f"{file} record 0 (image 42) has {box} [0.2, 0.1, 0.2, 0.2]",
            f"{file} record 0 (image 42) has {box} [1.2, 0.1, 1.3, 0.2]",
        ],
        "crowd": [
            f"{file} record 0 (image 42) has {box} [0.3, 0.1, 0.4, 1.5]",
            f"{file} record 2 (image 9) has {box} [0.1, 0.2, 0.5, 0.8]",
        ],
        "large-id": [f"{file} record 1 (image 5000000007)", f"category {2**31} ('cat')"],
        "image-without-boxes": [f"{file} record 2 (image 9)"],
        "index-made": [file],
    }
    targets = records.annotations.target_boxes
    assert (targets.num_clipped, targets.num_dropped, targets.num_crowds) == (1, 2, 2)


def test_a_turned_image_and_a_wrong_name_are_said(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 3
    stream = io.BytesIO()
    PIL.Image.new("RGB", (100, 50)).save(stream, "JPEG", exif=exif)
    file = write(tmp_path / "a", record(encoded=stream.getvalue(), filename=b"x.png"))
    found = said(tfrecord.open_records([file], LABELS))
    assert found["exif-turn"] == [f"{file} record 0 (image 42) has EXIF orientation 3"]
    assert found["wrong-extension"] == [f"{file} record 0 (image 42) is JPEG"]


def test_records_that_dali_cannot_read_are_mended(tmp_path):
    """No keys of objects where there are none, and crowds told of some records only."""
    sound = record(source_id=b"1", object__class__label=[17, 3], object__is_crowd=[1, 0], **two_boxes())
    without_crowds = record(source_id=b"3")
    a = write(tmp_path / "a", sound, empty_record(2), without_crowds)
    b = write(tmp_path / "b", empty_record(4))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    records = tfrecord.open_records([a, b], LABELS)
    assert records.annotations.image_ids.tolist() == [1, 2, 3, 4]
    assert records.records.files[0] == a
    assert a not in records.records.files[1:] and b not in records.records.files
    assert said(records)["record-completed"] == [
        f"{a} record 1 (image 2)",
        f"{a} record 2 (image 3)",
        f"{b} record 0 (image 4)",
    ]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

    read = read_back(records)
    for features in read.values():
        assert features["image/encoded"].bytes_list.value[0] == PNG
        for key in (*BOX_KEYS, LABEL_KEY, CROWD_KEY):
            assert features[key].WhichOneof("kind") is not None
    crowds = [list(read[i][CROWD_KEY].int64_list.value) for i in range(1, 5)]
    labels = [list(read[i][LABEL_KEY].int64_list.value) for i in range(1, 5)]
    assert (crowds, labels) == ([[1, 0], [], [0], []], [[17, 3], [], [17], []])
    for file, index in zip(records.records.files, records.records.indexes, strict=True):
        content = pathlib.Path(index).read_text().splitlines()
        number = records.records.files.index(file)
        spans = records.records.spans[records.records.spans[:, 0] == number, 1:].tolist()
        assert [list(map(int, line.split())) for line in content] == spans


def two_boxes():
    sides = ("xmin", "ymin", "xmax", "ymax")
    return {f"object__bbox__{side}": [0.1 + i / 9, 0.2 + i / 9] for i, side in enumerate(sides)}


def test_mended_copies_of_changed_records_are_made_again(tmp_path):
    for ids in ((1, 2), (3, 4)):
        file = write(tmp_path / "a", record(source_id=b"%d" % ids[0]), empty_record(ids[1]))
        os.utime(file, (1, 1))
        assert sorted(read_back(tfrecord.open_records([file], LABELS))) == list(ids)


def test_a_full_cache_is_named(tmp_path, monkeypatch):
    write_bytes = files.write_bytes

    def full(path, content):
        if str(path).endswith(".tfrecord"):
            raise OSError(28, "No space left on device")
        write_bytes(path, content)

    monkeypatch.setattr(files, "write_bytes", full)
    file = write(tmp_path / "a", record(source_id=b"123454321"), empty_record(2))
    with pytest.raises(
        UserError, match=r"cannot write .*\.tfrecord: No space left on device; XDG_CACHE_HOME"
    ):
        tfrecord.open_records([file], LABELS)


# --- images that cannot be used ---


def bad_images(tmp_path):
    """Two files, in which every other record cannot be used."""
    a = write(
        tmp_path / "a",
        record(source_id=b"1", encoded=PNG[:-20]),
        record(source_id=b"2", object__is_crowd=[0]),
        record(source_id=b"3", encoded=b"GIF89a" + bytes(40)),
        record(source_id=b"4", object__is_crowd=[0], object__bbox__xmax=[1.5]),
    )
    b = write(tmp_path / "b", record(source_id=b"5", encoded=b""), empty_record(6, encoded=b"x"))
    return a, b


def test_bad_images_stop_and_are_all_named(tmp_path):
    a, b = bad_images(tmp_path)
    found = refused([a, b])
    assert set(found) == {"image-truncated", "unsupported-format", "image-empty", "not-an-image"}
    assert all(KINDS[kind].severity is Severity.IMAGE for kind in found)
    names = sorted(text.partition(")")[0] + ")" for texts in found.values() for text in texts)
    assert names == [
        f"{a} record 0 (image 1)",
        f"{a} record 2 (image 3)",
        f"{b} record 0 (image 5)",
        f"{b} record 1 (image 6)",
    ]


def test_bad_images_are_left_out_on_demand(tmp_path):
    a, b = bad_images(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    records = tfrecord.open_records([a, b], LABELS, policy=SKIP)
    assert records.annotations.image_ids.tolist() == [2, 4]
    assert records.annotations.num_boxes == 2
    assert sorted(read_back(records)) == [2, 4]
    assert (
        records.records.files == (a,)
        and len(pathlib.Path(records.records.indexes[0]).read_text().splitlines()) == 2
    )
    assert records.formats == {"PNG": 2}
    found = {issue.kind: issue for issue in records.annotations.issues}
    assert found.pop("box-outside").offenders[0].startswith(f"{a} record 3 (image 4) has the box")
    assert len(found) == sum(issue.count for issue in found.values()) == 4
    for issue in found.values():
        assert issue.skipped and "left out" in issue.line().lower(), issue.kind
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    # Sizes that differ are no matter of reading: they stop all the same.
    c = write(tmp_path / "c", record(source_id=b"7", encoded=png(9, 9)))
    assert set(refused([a, b, c], policy=SKIP)) >= {"image-size-differs"}


def test_limits_are_the_policys(tmp_path):
    file = write(tmp_path / "a", record(), record(source_id=b"2", width=2000, encoded=png(2000)))
    assert tfrecord.open_records([file], LABELS).annotations.num_images == 2
    small = ImagePolicy(max_megapixels=0.01)
    assert refused([file], policy=small)["image-too-large"][0].startswith(f"{file} record 1 (image 2): ")
    tfrecord.open_records([file], LABELS)  # that is not how the other answer goes


# --- what is remembered ---


@pytest.fixture
def reads(monkeypatch):
    """The parts of files that were read, each time that something is."""
    parts = []
    real = tfrecord_scan._scan_part

    def counted(file, begin, *options):
        parts.append((file.path, begin))
        return real(file, begin, *options)

    monkeypatch.setattr(tfrecord_scan, "_scan_part", counted)
    return parts


def start_again(files, **options):
    return tfrecord.open_records(files, LABELS, **options)


def test_a_second_start_reads_no_data(tmp_path, reads):
    files = [write(tmp_path / str(i), record(source_id=b"1%d" % i), empty_record(20 + i)) for i in range(3)]
    first = start_again(files)
    assert len(reads) == 3
    second = start_again(files)
    assert len(reads) == 3
    assert second.annotations.fingerprint() == first.annotations.fingerprint()
    assert np.array_equal(second.records.spans, first.records.spans)
    assert (second.records.files, second.records.indexes, second.formats) == (
        first.records.files,
        first.records.indexes,
        first.formats,
    )
    assert said(second) == said(first)
    assert second.annotations.origin == first.annotations.origin

    # Even without the files' data: only what stands around them is looked at.
    content = bytearray(pathlib.Path(files[0]).read_bytes())
    times = os.stat(files[0])
    content[50:60] = bytes(10)
    pathlib.Path(files[0]).write_bytes(content)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert start_again(files).annotations.fingerprint() == first.annotations.fingerprint()
    assert len(reads) == 3


def swap(tmp_path, file):
    other = write(tmp_path / "other", record(source_id=b"43"))
    shutil.copyfile(other, file)


def damage_and_mend(tmp_path, file):
    """Other data with a right checksum, of the same length."""
    write(file, record(object__class__label=[3]))


def touch(tmp_path, file):
    os.utime(file, (5, 5))


@pytest.mark.parametrize("change", [swap, damage_and_mend, touch])
def test_changed_files_are_read_again(tmp_path, reads, change):
    """Even where size and time are the old ones, which cp -p and rsync -t can bring about."""
    file = write(tmp_path / "a", record())
    before = os.stat(file)
    first = start_again([file])
    change(tmp_path, file)
    assert os.path.getsize(file) == before.st_size
    if change is not touch:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = tfrecord.open_records([file], LABELS)  # also within one process
    assert [part[0] for part in reads] == [file, file]
    same = second.annotations.fingerprint() == first.annotations.fingerprint()
    assert same == (change is touch)


def test_other_labels_are_another_question(tmp_path, reads):
    file = write(tmp_path / "a", record())
    start_again([file])
    with pytest.raises(DataError, match="has the label 17"):
        tfrecord.open_records([file], LabelMap((3,), ("car",)))
    assert tfrecord.open_records([file], LabelMap((17,), ("dog",))).annotations.num_boxes == 1
    assert len(reads) == 3


def test_bad_images_are_remembered_for_both_policies(tmp_path, reads):
    a, b = bad_images(tmp_path)
    found = refused([a, b])
    assert len(reads) == 2
    assert refused([a, b]) == found
    skipped = said(start_again([a, b], policy=SKIP))
    assert {kind: skipped[kind] for kind in found} == found and set(skipped) - set(found) == {"box-outside"}
    assert start_again([a, b], policy=SKIP).annotations.image_ids.tolist() == [2, 4]
    assert len(reads) == 2


def test_a_shallow_look_is_no_answer_to_a_deep_question(tmp_path, reads, monkeypatch):
    real = images.inspect

    def inspect(encoded, *, decode=False, max_megapixels=100.0):
        facts = real(encoded, decode=decode, max_megapixels=max_megapixels)
        if decode:
            return images.ImageFacts("PNG", 50, 100, 1, "image-damaged", "seen by decoding")
        return facts

    monkeypatch.setattr(images, "inspect", inspect)
    file = write(tmp_path / "a", record(source_id=b"99"))
    start_again([file])
    assert set(refused([file], policy=ImagePolicy(decode=True))) == {"image-damaged"}
    assert len(reads) == 2


def test_what_was_kept_badly_is_made_again(tmp_path, reads, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "a", record(), record(source_id=b"2", encoded=b""))
    first = start_again([file], policy=SKIP)
    (kept,) = (tmp_path / "cache" / "dali-detection").glob("*.records")
    content = kept.read_bytes()
    for number, bad in enumerate([b"", b"garbage", content[:-100]], 2):
        kept.write_bytes(bad)
        assert start_again([file], policy=SKIP).annotations.fingerprint() == first.annotations.fingerprint()
        assert len(reads) == number
    assert kept.read_bytes() == content


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    real = tfrecord.walk_files

    def then_gone(change):
        def walk_files(files, issues):
            walked = real(files, issues)
            change(files[0])
            return walked

        return walk_files

    for change, text in (
        (os.unlink, "No such file or directory"),
        (lambda file: os.truncate(file, len(record()) + 16), "record 1 at byte"),
        (lambda file: os.truncate(file, len(record()) + 100), "record 1 at byte"),
    ):
        file = write(tmp_path / "a", record(), record(source_id=b"2"))
        monkeypatch.setattr(tfrecord, "walk_files", then_gone(change))
        before, content = os.stat(file), pathlib.Path(file).read_bytes()
        (offender,) = [text for texts in refused([file]).values() for text in texts]
        assert text in offender and file in offender
        # What was only so for a moment is not remembered.
        monkeypatch.setattr(tfrecord, "walk_files", real)
        pathlib.Path(file).write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert tfrecord.open_records([file], LABELS).annotations.num_images == 2


def test_issues_of_a_copy_are_its_own(tmp_path):
    """What is said names the files as they were asked for, not as they were called before."""
    file = write(tmp_path / "a", record(), empty_record(2))
    start_again([file])
    os.rename(file, tmp_path / "b")
    records = start_again([tmp_path / "b"])
    assert records.annotations.origin == str(tmp_path / "b")
    assert isinstance(records.annotations.issues, Issues)
    assert "/a record" not in str(said(records))


def test_a_file_copied_in_part_stops_whatever_else_is_wrong(tmp_path):
    whole = [record(source_id=b"1"), record(source_id=b"2", encoded=b""), record(source_id=b"3")]
    file = write(tmp_path / "a", *whole)
    write_index(file)
    write(tmp_path / "a", *whole[:2])
    expected = {"index-longer": [f"{file} has 2 records, a.idx lists 3"]}
    assert refused([file]).items() >= expected.items()
    assert "image-empty" in refused([file])
    assert refused([file], policy=SKIP).items() >= expected.items()
