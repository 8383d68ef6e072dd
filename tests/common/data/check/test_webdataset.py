"""WebDataset shards as a whole: faults, images that are left out, and the cache of results."""

import os
import pathlib
import re
import tarfile

import numpy as np
import pytest

from common.data import webdataset as format_module
from common.data.check import webdataset, webdataset_scan
from common.data.check.images import ImagePolicy
from common.data.check.issues import DataError
from common.data.check.loader_errors import explain
from tests.common.reading import build
from tests.common.record_writing import LABELS, PNG, png
from tests.common.shard_writing import BOX, arrays, npy, sample, write_tar

SKIP = ImagePolicy(on_bad_image="skip")


def numbered(image_id, **changes):
    """A sample whose image differs from those of other ids."""
    return sample(f"{image_id:04d}", **{"image_id": image_id, "image": png(color=(image_id, 0, 0))} | changes)


def open_shards(*files, **options):
    return webdataset.open_shards(files, LABELS, **options)


def refused(*files, **options):
    """Asserts that the files are refused; returns {kind: offenders}."""
    with pytest.raises(DataError) as error:
        open_shards(*files, **options)
    (issues,) = error.value.issues
    return {issue.kind: issue.offenders for issue in issues}


def offenders_of(source):
    """Returns {kind: offenders} of the issues that did not stop."""
    return {issue.kind: issue.offenders for issue in source.annotations.issues}


# --- sound shards ---


@pytest.mark.parametrize("make", [sample, arrays])
def test_sample_gets_boxes_in_pixels_and_default_values(tmp_path, make):
    source = open_shards(write_tar(tmp_path / "a.tar", make()))
    annotations = source.annotations
    np.testing.assert_allclose(annotations.boxes_ltwh_px, [[10, 10, 40, 30]], rtol=1e-6)
    np.testing.assert_allclose(annotations.areas, [1200], rtol=1e-6)
    assert (annotations.is_crowd.tolist(), annotations.file_names) == ([False], ["0001.png"])
    assert (annotations.image_sizes.tolist(), annotations.category_ids.tolist()) == ([[50, 100]], [17])
    assert source.image_name(0) == f"{tmp_path}/a.tar sample '0001' (image 42)" and source.encoded(0) == PNG
    assert source.formats == {"PNG": 1} and not offenders_of(source)


def test_samples_of_several_shards_with_folders_and_other_files_keep_their_order(tmp_path):
    text = {"d/b.c.txt": b"a caption", "d/._b.png": b"of macOS"}
    a = write_tar(tmp_path / "a.tar", numbered(7), sample("d/b", image_id=9) | text)
    b = write_tar(
        tmp_path / "b.tar",
        sample("0007", image_id=None),
        sample("./e/x", image_id=None, image=png(color="red")),
    )
    for _ in range(2):  # the second time, from the cache
        source = open_shards(a, b)
        assert source.annotations.image_ids.tolist() == [7, 9, 1, 2]
        assert offenders_of(source) == {
            "file-hidden": [f"{a} file 'd/._b.png'"],
            "repeated-image": [f"{a} sample 'd/b' (image 9) = {b} sample '0007' (image 1)"],
            "sample-numbered": [f"{b} sample '0007' (image 1)", f"{b} sample './e/x' (image 2)"],
        }
        assert [source.encoded(row) for row in (1, 2, 3)] == [PNG, PNG, png(color="red")]


def test_image_size_that_the_json_lacks_is_that_of_the_image(tmp_path):
    source = open_shards(write_tar(tmp_path / "a.tar", sample(width=None, height=None, image=png(60, 70))))
    assert source.annotations.image_sizes.tolist() == [[70, 60]]


def test_marked_boxes_are_crowds_and_boxes_outside_the_image_are_clipped_and_reported(tmp_path):
    boxes = [
        BOX,
        BOX | {"iscrowd": 1},
        BOX | {"ignore": 1, "area": 4},
        BOX | {"bbox": [90, 10, 20, 20], "area": 3.5},
    ]
    source = open_shards(write_tar(tmp_path / "a.tar", sample(annotations=boxes)))
    place = f"{tmp_path}/a.tar sample '0001' (image 42) has bbox"
    assert source.annotations.is_crowd.tolist() == [False, True, True, False]
    assert source.annotations.areas.tolist() == [1200, 1200, 4, 3.5]
    assert offenders_of(source)["box-outside"] == [f"{place} [90.0, 10.0, 20.0, 20.0]"]
    assert len(offenders_of(source)["crowd"]) == 2


def test_box_without_width_in_boxes_npy_is_reported_but_not_refused(tmp_path):
    boxes, labels = [[0.5, 0.2, 0.5, 0.9], [0.5, 0.2, 0.6, 0.9]], [17, 3]
    source = open_shards(write_tar(tmp_path / "a.tar", arrays(boxes=boxes, labels=labels)))
    place = f"{tmp_path}/a.tar sample '0001' (image 42) has bbox"
    assert offenders_of(source)["box-empty"] == [f"{place} [50.0, 10.0, 0.0, 35.0]"]


def test_repeated_boxes_are_dropped_and_equal_images_are_reported(tmp_path):
    path = write_tar(
        tmp_path / "a.tar", sample(annotations=[BOX, BOX, BOX | {"area": 5}]), arrays("2", image_id=7)
    )
    source = open_shards(path)
    first, second = f"{path} sample '0001' (image 42)", f"{path} sample '2' (image 7)"
    assert source.annotations.box_image.tolist() == [0, 0, 1]
    offenders = offenders_of(source)
    assert offenders["box-repeated"] == [f"{first} has bbox [10.0, 10.0, 40.0, 30.0]"]
    assert offenders["repeated-image"] == [f"{first} = {second}"]


def test_missing_shard_of_a_numbered_set_is_a_warning(tmp_path):
    source = open_shards(write_tar(tmp_path / "a-00000-of-00002.tar", sample()))
    assert offenders_of(source) == {"shard-missing": [f"{tmp_path}/a-00001-of-00002.tar"]}


# --- faults ---

BAD_SAMPLES = {
    "no image": ({"0001.json": b"{}"}, "sample-components", "has .json"),
    "no labels": ({"0001.png": PNG}, "sample-components", "has .png"),
    "no dot": ({"0001": PNG}, "sample-components", "has a file without a dot"),
    "two images": (sample() | {"0001.jpg": PNG}, "sample-components", "has .png, .json, .jpg"),
    "labels.npy missing": (arrays(labels=None), "sample-components", "has .png, .image_id.npy, .boxes.npy"),
    "no json": (sample() | {"0001.json": b"nothing"}, "json-malformed", "JSON is malformed: "),
    "cut json": (sample() | {"0001.json": b'{"image_id": 3, "annot'}, "json-malformed", "(22 bytes)"),
    "no annotations": (
        {"0001.png": PNG, "0001.json": b'{"image_id": 3}'},
        "sample-value",
        "json: object missing required field `annotations`",
    ),
    "a list": ({"0001.png": PNG, "0001.json": b"[]"}, "sample-value", "json: expected `object`, got `array`"),
    "text as number": (
        sample(annotations=[BOX, BOX | {"bbox": [1, "2", 3, 4]}]),
        "sample-value",
        "json: annotations[1].bbox[1] is '2': expected `float`, got `str`",
    ),
    "three sides": (
        sample(annotations=[BOX | {"bbox": [1, 2, 3]}]),
        "sample-value",
        "json: annotations[0].bbox is [1, 2, 3]: expected `array` of length 4",
    ),
    "no category": (
        sample(annotations=[{"bbox": [1, 2, 3, 4]}]),
        "sample-value",
        "json: annotations[0] is {'bbox': [1, 2, 3, 4]}: object missing required field `category_id`",
    ),
    "width 0": (sample(width=0), "sample-value", "json: width is 0: expected `int` >= 1"),
    "id -1": (sample(image_id=-1), "sample-value", "json: image_id is -1: expected `int` >= 0"),
    "category": (
        sample(annotations=[BOX | {"category_id": 4}]),
        "unknown-category",
        "category 4, which none",
    ),
    "negative": (
        sample(annotations=[BOX | {"bbox": [5, 5, -3, 4]}]),
        "box-negative",
        "has bbox [5.0, 5.0, -3.0, 4.0] in 100 x 50 pixels",
    ),
    "size": (sample(width=50, height=100), "image-size-differs", "is 100 x 50 pixels"),
    "image": (sample(image=b"none"), "not-an-image", "'0001' (image 42)"),
    "cut image": (sample(image=PNG[:-20]), "image-truncated", "'0001' (image 42)"),
    "no npy": (arrays() | {"0001.boxes.npy": b"no"}, "sample-value", "boxes.npy is damaged: "),
    "objects": (
        arrays() | {"0001.boxes.npy": npy(np.array([{}], object))},
        "sample-value",
        "boxes.npy is damaged: Object arrays cannot be loaded",
    ),
    "npy without a header": (
        arrays() | {"0001.boxes.npy": npy([17]).replace(b"{", b"(")},
        "sample-value",
        "boxes.npy is damaged: ",
    ),
    "cut npy": (arrays() | {"0001.labels.npy": npy([17])[:-3]}, "sample-value", "labels.npy is damaged: "),
    "float labels": (arrays(labels=[17.0]), "sample-value", "labels.npy is float64 (1,): int (N,) is needed"),
    "box shape": (arrays(boxes=[[0.1, 0.2]]), "sample-value", "boxes.npy is float64 (1, 2): float (N, 4)"),
    "lengths": (
        arrays(labels=[17, 3]),
        "sample-value",
        "its arrays have the lengths {'boxes.npy': 1, 'labels.npy': 2}",
    ),
    "box in pixels": (
        arrays(boxes=[[1.0, 2.0, 30.0, 40.0]]),
        "sample-value",
        "boxes.npy[0] is [1.0, 2.0, 30.0, 40.0]: left, top, right, bottom from 0 to 1",
    ),
    "box not a number": (
        arrays(boxes=[[0.1, 0.2, 0.3, np.nan]]),
        "sample-value",
        "boxes.npy[0] is [0.1, 0.2,",
    ),
    "right of left": (arrays(boxes=[[0.5, 0.2, 0.3, 0.9]]), "sample-value", "boxes.npy[0] is [0.5, 0.2,"),
    "label -1": (arrays(labels=[-1]), "sample-value", "labels.npy[0] is -1: a category id is needed"),
    "label 0": (arrays(labels=[0]), "unknown-category", "has category 0, which none of 3 categories from 3"),
    "crowd 2": (arrays(iscrowd=[2]), "sample-value", "iscrowd.npy[0] is 2: 0 or 1 is needed"),
    "area -1": (arrays(areas=[-1.0]), "sample-value", "areas.npy[0] is -1.0: a number, 0 or more"),
    "id of arrays": (arrays(image_id=-5), "sample-value", "image_id.npy[0] is -5: a number, 0 or more"),
}


@pytest.mark.parametrize(("files", "kind", "text"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_bad_sample_is_refused_with_its_shard_and_key(tmp_path, files, kind, text):
    path = write_tar(tmp_path / "a.tar", numbered(9), files)
    (offender,) = refused(path)[kind]
    assert offender.startswith(f"{path} sample '0001'") and text in offender


def test_normalised_boxes_in_the_json_of_all_samples_are_refused(tmp_path):
    samples = [numbered(i, annotations=[BOX | {"bbox": [0.1, 0.2, 0.3, 0.4]}]) for i in (1, 2)]
    path = write_tar(tmp_path / "a.tar", *samples)
    place = "has bbox [0.1, 0.2, 0.3, 0.4] in 100 x 50 pixels"
    names = [f"{path} sample '000{i}' (image {i}) {place}" for i in (1, 2)]
    assert refused(path) == {"boxes-not-in-pixels": names}


def test_sample_with_repeated_files_or_key_is_refused(tmp_path):
    apart = write_tar(tmp_path / "a.tar", numbered(1), numbered(2), sample("0001", image_id=3))
    twice = tmp_path / "b.tar"
    write_tar(twice, numbered(4))
    with tarfile.open(twice, "a") as archive:
        member = tarfile.TarInfo("0004.json")
        archive.addfile(member)
    offenders = refused(apart, str(twice))
    assert offenders["repeated-sample"] == [f"{apart} sample '0001'", f"{twice} sample '0004'"]


def test_image_id_of_two_samples_is_refused(tmp_path):
    a, b = (write_tar(tmp_path / name, numbered(5)) for name in ("a.tar", "b.tar"))
    names = ", ".join(f"{path} sample '0005' (image 5)" for path in (a, b))
    assert refused(a, b)["repeated-image-id"] == [f"image 5 is given 2 times: {names}"]


def test_faults_of_all_shards_are_reported_together(tmp_path):
    def write(name):
        return write_tar(tmp_path / name, numbered(1), numbered(2), numbered(3))

    cut, unmarked, damaged, text = map(write, ("cut", "unmarked", "damaged", "text"))
    with tarfile.open(cut) as archive:
        last = archive.getmembers()[-1]
    os.truncate(cut, last.offset_data + last.size - 5)
    os.truncate(unmarked, last.offset_data + 512)
    with open(damaged, "r+b") as stream:
        stream.seek(last.offset + 10)
        stream.write(b"~")
    pathlib.Path(text).write_bytes(b"no tar file" * 100)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "gzip.tar.gz").write_bytes(b"\x1f\x8b" + bytes(30))
    os.mkfifo(tmp_path / "pipe")
    write_tar(tmp_path / "none.tar")
    others = [str(tmp_path / name) for name in ("empty", "gzip.tar.gz", "pipe", "none.tar", "absent")]
    offenders = refused(cut, unmarked, damaged, text, *others)
    offenders.pop("repeated-image-id")
    end = last.offset_data + 512
    assert offenders == {
        "file-unreadable": [f"{others[2]} is a pipe", f"{others[4]}: no such file"],
        "file-empty": [f"{others[0]} (0 bytes)"],
        "file-truncated": [
            f"{cut} ({last.offset_data + last.size - 5} bytes): unexpected end of data",
            f"{unmarked} ends at byte {end} without the mark of a tar file's end",
        ],
        "file-gzip": [f"{others[1]} (32 bytes)"],
        "not-a-tar": [
            f"{damaged}: the header at byte {last.offset} is damaged",
            f"{text}: invalid header",
        ],
        "no-images": [f"{others[3]} has no samples"],
    }


def test_tar_files_that_were_joined_are_refused(tmp_path):
    a, b = (write_tar(tmp_path / f"{i}.tar", numbered(i)) for i in (1, 2))
    joined = tmp_path / "joined.tar"
    joined.write_bytes(pathlib.Path(a).read_bytes() + pathlib.Path(b).read_bytes())
    (offender,) = refused(str(joined))["not-a-tar"]
    assert re.search(r"joined.tar: at byte \d+ is a mark of the end, but files follow", offender)


def test_bad_images_under_policy_skip_are_left_out_of_index_and_annotations(tmp_path):
    a = write_tar(tmp_path / "a.tar", numbered(1, image=PNG[:-20]))
    b = write_tar(tmp_path / "b.tar", numbered(2, image=b"GIF89a" + bytes(40)), numbered(3))
    source = open_shards(a, b, policy=SKIP)
    assert source.annotations.image_ids.tolist() == [3] and source.shards.files == (b,)
    assert (
        source.encoded(0) == png(color=(3, 0, 0)) and source.image_name(0) == f"{b} sample '0003' (image 3)"
    )
    (index,) = source.shards.indexes
    assert len(pathlib.Path(index).read_text().splitlines()) == 2


TOKENS = (b"\0", b'"', b"-1", b"1e999", b"null", b"[]", b"{}", b"\xff", b"nan", rb"\ud800", b"1.0", b"true")


def mutated(content: bytes, seed: int) -> bytes:
    """Changes bytes, cuts the file off, replaces a block by another one, or changes a json or array."""
    random, changed = np.random.default_rng(seed), bytearray(content)
    match seed % 4:
        case 0:
            for _ in range(3):
                changed[random.integers(len(content))] = random.integers(256)
        case 1:
            del changed[random.integers(len(content)) :]
        case 2:
            target, source = (512 * random.integers(len(content) // 512) for _ in range(2))
            changed[target : target + 512] = content[source : source + 512]
        case _:
            begin = content.find(random.choice([b'{"image_id"', b"NUMPY"])) + random.integers(120)
            token = TOKENS[random.integers(len(TOKENS))]
            changed[begin : begin + len(token)] = token
    return bytes(changed)


def test_damaged_shards_are_refused_in_a_message_or_read_without_invalid_boxes(tmp_path):
    source = arrays("2", image_id=2, image=png(color="red"), iscrowd=[0], areas=[3.0])
    content = pathlib.Path(write_tar(tmp_path / "a.tar", numbered(1), source, numbered(3))).read_bytes()
    num_refused = 0
    for seed in range(160):
        (tmp_path / f"{seed}.tar").write_bytes(mutated(content, seed))
        try:
            annotations = open_shards(f"{tmp_path}/{seed}.tar").annotations
        except DataError as error:
            num_refused += 1
            assert f"{seed}.tar" in str(error)
            continue
        boxes = annotations.target_boxes.boxes
        assert np.isfinite(boxes).all() and (boxes[:, 2:] > boxes[:, :2]).all()
        assert annotations.num_images == 3
    assert 60 < num_refused < 150


def test_shard_that_is_cut_off_after_the_check_stops_the_reader_with_its_samples_in_the_message(tmp_path):
    path = write_tar(
        tmp_path / "a.tar", *(numbered(i, image=png(color=(i, 0, 0)) + bytes(10_000)) for i in range(1, 9))
    )
    source = open_shards(path)
    pipeline = build(lambda: source.read(training=False))
    pipeline.run()
    os.truncate(path, 20_000)
    with pytest.raises(RuntimeError) as error:
        for _ in range(16):
            pipeline.run()
    message = str(explain(error.value, source, "dali_cpu"))
    assert f"empty image file (6): {path} sample '0003' (image 3); {path} sample '0004'" in message


# --- the cache ---


def test_only_changed_shards_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scanned = []

    def scan(file, *rest):
        scanned.append(pathlib.Path(file).name)
        return webdataset_scan.scan(file, *rest)

    monkeypatch.setattr(webdataset, "scan", scan)
    a, b = (write_tar(tmp_path / f"{i}.tar", numbered(i), numbered(i + 10)) for i in (1, 2))
    first = open_shards(a, b)
    again = open_shards(a, b)
    assert sorted(scanned) == ["1.tar", "2.tar"]
    assert again.fingerprint == first.fingerprint and again.shards.indexes == first.shards.indexes
    write_tar(b, numbered(2), numbered(13))
    assert open_shards(a, b).fingerprint != first.fingerprint
    assert scanned[2:] == ["2.tar"]
    write_tar(b, sample(annotations=[]) | {"0001.json": b"no"})
    for _ in range(2):
        assert refused(a, b).keys() == {"json-malformed"}
    assert scanned[3:] == ["2.tar", "2.tar"]


def test_indexes_are_written_again_if_their_version_or_the_images_change(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", numbered(1), numbered(2))
    (first,) = open_shards(path).shards.indexes
    monkeypatch.setattr(format_module, "_INDEX", -1)
    (second,) = open_shards(path).shards.indexes
    assert first != second and pathlib.Path(first).read_bytes() == pathlib.Path(second).read_bytes()
    header, *lines = pathlib.Path(first).read_text().splitlines()
    assert header == "v1.2 2"
    with tarfile.open(path) as archive:
        places = [(m.offset_data, m.size) for m in archive if m.name.endswith("png")]
    assert [re.fullmatch(r"image (\d+) (\d+) [0-9a-f]{64}", line).groups() for line in lines] == [
        (str(offset), str(size)) for offset, size in places
    ]
