import collections
import csv
import errno
import os
import pathlib
import re
import resource
import tracemalloc

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common.data import tfrecord
from tests.refusal import refusal
from tests.tools.preprocessing.source_writing import put
from tools.preprocessing.outputs import check_output
from tools.preprocessing.samples import Sample

EVERY_OUTPUT = ["x.npz", "x.npy", "x.png", "x.jpg", "pictures", "x.tfrecord"]


def images(count, shape=(20, 31, 3), dtype=np.uint8):
    random = np.random.default_rng(3)
    return [random.integers(0, 256, shape).astype(dtype) for _ in range(count)]


def samples(of, names=None, labels=None):
    names = names or [f"{i}.jpg" for i in range(len(of))]
    rows = zip(names, labels or [-1] * len(of), of, strict=True)
    return (Sample(i, *row) for i, row in enumerate(rows))


def output(path, **options):
    return check_output(str(path), **{"overwrite": False, "inputs": ()} | options)


def left(directory):
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir())


def read(path):
    return np.asarray(PIL.Image.open(path))


# --- arrays ---


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("shape", "dtype"), [((20, 31, 3), np.uint8), ((3, 20, 31), np.float16)])
def test_an_npz_is_one_array_in_the_order_of_the_images(tmp_path, shape, dtype, count):
    of = images(count, shape, dtype)
    line = output(tmp_path / "x.npz").write(samples(of), count)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert archive.files == ["images"]
        found = archive["images"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.stack(of))
    size = " x ".join(map(str, found.shape))
    assert line == f"{count} images, {size}: {tmp_path}/x.npz; their names: {tmp_path}/x.npz.csv"


def test_images_are_not_gathered_in_memory(tmp_path):
    of = (Sample(i, f"{i}.jpg", -1, np.full((1000, 1000, 3), i, np.uint8)) for i in range(20))
    tracemalloc.start()
    output(tmp_path / "x.npz").write(of, 20)
    assert tracemalloc.get_traced_memory()[1] < 15_000_000
    tracemalloc.stop()
    assert (tmp_path / "x.npz").stat().st_size > 60_000_000


def test_a_table_says_what_the_rows_are(tmp_path):
    names = ["a,b.jpg", 'say "x".png', "dir/ümlaut.jpg", "0"]
    out = output(tmp_path / "x.npz", has_labels=True, label_names={0: "cat", 1: "dog"})
    out.write(samples(images(4), names, [1, -1, 7, 0]), 4)
    with (tmp_path / "x.npz.csv").open(newline="", encoding="utf-8") as stream:
        head, *rows = csv.reader(stream)
    assert head == ["position", "name", "label", "class"]
    columns = list("0123"), names, ["1", "", "7", "0"], ["dog", "", "", "cat"]
    assert rows == list(map(list, zip(*columns, strict=True)))


@pytest.mark.parametrize("other", [images(1, (31, 20, 3))[0], images(1, dtype=np.float32)[0]])
def test_images_that_differ_are_named_with_the_remedy(tmp_path, other):
    given = samples([*images(2), other], ["a.jpg", "b.jpg", "c.jpg"])
    said = refusal(output(tmp_path / "x.npz").write, given, 3)
    assert re.search("image 0 .'a.jpg'. is uint8 20 x 31 x 3 .*, but image 2 .'c.jpg'. is .*letterbox", said)
    assert "at the end of --ops" in said and left(tmp_path) == []


# --- pictures ---


@pytest.mark.parametrize("shape", [(20, 31, 3), (20, 31)])
def test_png_pictures_are_the_pixels(tmp_path, shape):
    of = images(3, shape)
    line = output(tmp_path / "out").write(samples(of, ["a.jpg", "b/c.jpg", "a.tiff"]), 3)
    assert line == f"3 pictures (png): {tmp_path}/out"
    assert left(tmp_path) == ["out/a-2.png", "out/a.png", "out/b/c.png"]
    for image, name in zip(of, ("a", "b/c", "a-2"), strict=True):
        np.testing.assert_array_equal(read(tmp_path / f"out/{name}.png"), image)


def test_a_directory_keeps_its_other_files(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "0.png").write_text("old")
    output(tmp_path, overwrite=True).write(samples(images(2)), 2)
    assert left(tmp_path) == ["0.png", "1.png", "mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "mine"
    np.testing.assert_array_equal(read(tmp_path / "0.png"), images(1)[0])


# --- contact sheets ---


def test_a_sheet_shows_every_image_in_order(tmp_path):
    colours = np.array([(25 * i, 255 - 20 * i, 30) for i in range(9)], np.uint8)
    of = [np.full((40, 40, 3), colour) for colour in colours]
    line = output(tmp_path / "x.png").write(samples(of), 9)
    assert line == f"contact sheet of 9 of 9 images: {tmp_path}/x.png"
    sheet = read(tmp_path / "x.png")
    rows, columns = (side * (2 * np.arange(3) + 1) // 6 for side in sheet.shape[:2])
    np.testing.assert_allclose(sheet[rows][:, columns].reshape(9, 3), colours, atol=1)


def test_a_sheet_reads_no_more_than_it_shows(tmp_path):
    of = samples(images(100, (8, 9, 3)))
    assert "64 of 100" in output(tmp_path / "x.jpg").write(of, 100)
    assert next(of).position == 64
    assert PIL.Image.open(tmp_path / "x.jpg").format == "JPEG"


@pytest.mark.parametrize("shape", [(20, 1300, 3), (20, 31)])
def test_a_single_image_is_written_as_it_is(tmp_path, shape):
    (image,) = images(1, shape)
    output(tmp_path / "x.png").write(samples([image]), 1)
    np.testing.assert_array_equal(read(tmp_path / "x.png"), image)


# --- records ---

NAMES = ["cats/a.jpg", "../b ü.png", "cats/a.jpg", "key", "\udcff.jpg"]
RAMP = np.arange(24, dtype=np.uint8)[:, None, None] + np.array([0, 60, 120], np.uint8)
SHARDS = [(None, [5], "png", 0), (1, [5], "jpeg", 6), (2, [2, 3], "png", 0), (5, [1] * 5, None, 0)]


def columns_of(files):
    """Returns {key without "image/": values}."""
    columns = collections.defaultdict(list)
    for record in tf.data.TFRecordDataset(files):
        features = tf.train.Example.FromString(record.numpy()).features.feature
        for key, feature in features.items():
            columns[key.removeprefix("image/")] += getattr(feature, feature.WhichOneof("kind")).value
    return columns


@pytest.mark.parametrize(("num_shards", "sizes", "image_format", "tolerance"), SHARDS)
def test_tf_data_reads_what_was_written(tmp_path, num_shards, sizes, image_format, tolerance):
    # JPEG changes smooth images only a little.
    of = [np.repeat(RAMP + np.uint8(20 * i), 40 + i, axis=1) for i in range(5)]
    options = {"has_labels": True, "label_names": {0: "cat", 1: "dog"}, "image_format": image_format}
    out = output(tmp_path / "x.tfrecord", output_shards=num_shards, **options)
    out.write(samples(of, NAMES, [0, 1, -1, 5, 0]), 5)
    ends = [f"-{i:05d}-of-{num_shards:05d}" for i in range(num_shards)] if num_shards else [""]
    assert left(tmp_path) == [f"x{end}.tfrecord{suffix}" for end in ends for suffix in ("", ".idx")]
    files = [f"{tmp_path}/x{end}.tfrecord" for end in ends]
    assert [len(tfrecord.record_spans(file)) for file in files] == sizes
    for file in files:
        index = pathlib.Path(f"{file}.idx").read_bytes()
        assert index == tfrecord.format_index(tfrecord.record_spans(file))
    columns = columns_of(files)
    for image, encoded in zip(of, columns.pop("encoded"), strict=True):
        np.testing.assert_allclose(tf.io.decode_image(encoded), image.astype(int), atol=tolerance)
    assert columns == {
        "height": [24] * 5,
        "width": [40, 41, 42, 43, 44],
        "format": [(image_format or "png").encode()] * 5,
        "class/label": [0, 1, -1, 5, 0],
        "class/text": [b"cat", b"dog", b"", b"", b"cat"],
        "filename": [os.fsencode(name) for name in NAMES],
        "source_id": [b"0", b"1", b"2", b"3", b"4"],
    }


def test_without_labels_records_have_none(tmp_path):
    line = output(tmp_path / "x.tfrecord").write(samples(images(1)), 1)
    assert line == f"1 images in {tmp_path}/x.tfrecord, with indexes"
    names = {"encoded", "format", "filename", "source_id", "height", "width"}
    assert columns_of([f"{tmp_path}/x.tfrecord"]).keys() == names


# --- no unfinished files are left ---


@pytest.mark.parametrize("name", EVERY_OUTPUT)
def test_an_interruption_or_a_full_disk_leaves_nothing(tmp_path, name):
    """A limit of 64 KB replaces a full disk: writing fails with EFBIG."""

    def until_the_third():
        yield from samples(images(2))
        raise KeyboardInterrupt

    path = tmp_path / "new" / "deep" / name
    with pytest.raises(KeyboardInterrupt):
        output(path).write(until_the_third(), 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        said = refusal(output(path).write, samples(images(70, (200, 200, 3))), 70)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(path) in said and said.endswith(os.strerror(errno.EFBIG)) and ".tmp-" not in said
    assert left(tmp_path) == []


# --- what is refused before anything runs ---


@pytest.mark.parametrize("name", EVERY_OUTPUT)
def test_what_is_there_is_not_overwritten_without_being_told(tmp_path, name):
    output(tmp_path / name).write(samples(images(2)), 2)
    assert "exists: choose another --output, or replace it with --" in refusal(output, tmp_path / name)
    other = images(5)[3:]
    output(tmp_path / name, overwrite=True).write(samples(other), 2)
    if name == "x.npz":
        np.testing.assert_array_equal(np.load(tmp_path / name)["images"], np.stack(other))


def test_a_table_an_index_or_another_set_of_records_in_the_way_counts_too(tmp_path):
    for name in ("x.npz.csv", "x.tfrecord.idx"):
        (tmp_path / name).write_text("mine")
        assert name in refusal(output, f"{tmp_path}/{name[:-4]}")
    output(tmp_path / "y.tfrecord", output_shards=2).write(samples(images(2)), 2)
    for output_shards, said in ((1, "an earlier conversion"), (2, "--overwrite")):
        assert said in refusal(output, tmp_path / "y.tfrecord", output_shards=output_shards)


@pytest.mark.parametrize("seen", ["in", "link"])
def test_the_input_is_never_replaced(tmp_path, seen):
    inputs, seen = tmp_path / "in", tmp_path / seen
    files = [inputs / "cats" / "a.png", inputs / "all.npy"]
    put(inputs, files, [b"precious"] * 2)
    (tmp_path / "link").symlink_to(inputs)
    for target in (seen, seen / "cats", seen / "all.npy", seen / "cats" / "a.png"):
        for given in (files, [seen], [inputs]):
            assert "of the input" in refusal(output, target, overwrite=True, inputs=given)
    for target in (tmp_path / "out", seen / "cats" / "b.png", seen / "small"):
        output(target, inputs=files)
        output(target, inputs=[inputs])


IMPOSSIBLE = [
    ("x.npz", {"image_format": "png"}, "--image_format"),
    ("x.npz", {"jpeg_quality": 90}, "--jpeg_quality"),
    ("x.png", {"jpeg_quality": 90}, "--jpeg_quality"),
    ("pictures", {"jpeg_quality": 90}, "--jpeg_quality"),
    ("x.npz", {"output_shards": 2}, "--output_shards"),
    ("x.webp", {}, "x.webp"),
    ("file", {}, "exists"),
    ("folder.npy/x.csv", {}, "x.csv"),
]


@pytest.mark.parametrize(("name", "options", "told"), IMPOSSIBLE)
def test_outputs_that_cannot_be_are_one_line(tmp_path, name, options, told):
    (tmp_path / "file").write_text("")
    assert told in refusal(output, f"{tmp_path}/{name}", **options)
    assert left(tmp_path) == ["file"]


def test_a_directory_may_have_a_dot_in_its_name(tmp_path):
    for path in (tmp_path / "run-1.5", f"{tmp_path}/v.npz/", tmp_path / "v.npz"):
        output(path, overwrite=True).write(samples(images(1)), 1)
    assert left(tmp_path) == ["run-1.5/0.png", "v.npz/0.png"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    """Even root can neither make a file in /proc nor one with the name of a directory."""
    (tmp_path / "0.png").mkdir()
    places = {"/proc/self/x.npz": "", "/proc/self/pictures": "pictures: ", tmp_path: r"0\.png: "}
    for path, where in places.items():
        said = refusal(output(path, overwrite=True).write, samples(images(1)), 1)
        assert re.fullmatch(rf"--output={path}: {where}[\w ]+", said)
    assert left(tmp_path) == []
