"""Arrays read back by NumPy, and what is refused before anything runs; nothing half-written stays."""

import csv
import errno
import os
import resource
import tracemalloc

import numpy as np
import pytest

from common.errors import UserError
from tests.tools.preprocessing.samples import images, left, output, samples
from tools.preprocessing.samples import Sample

EVERY_OUTPUT = ["x.npz", "x.npy", "x.png", "x.jpg", "pictures", "x.tfrecord"]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((20, 31, 3), np.uint8),
        ((3, 20, 31), np.float32),
        ((20, 31), np.float16),
        ((20, 31, 1), np.int16),
        ((20, 31, 3), np.bool_),
    ],
)
@pytest.mark.parametrize("count", [1, 5])
def test_an_npz_is_one_array_in_the_order_of_the_images(tmp_path, shape, dtype, count):
    of = images(count, shape, dtype)
    line = output(tmp_path / "x.npz").write(samples(of), count)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert archive.files == ["images"]
        found = archive["images"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.stack(of))
    assert str(tmp_path / "x.npz") in line and f"{count} images" in line


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_images_are_not_gathered_in_memory(tmp_path, name):
    """60 MB of images, two or three of which live at a time."""
    of = (Sample(i, f"{i}.jpg", -1, np.full((1000, 1000, 3), i, np.uint8)) for i in range(20))
    out = output(tmp_path / name)
    tracemalloc.start()
    try:
        out.write(of, 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / name).stat().st_size > 60_000_000
    assert peak < 15_000_000


def test_a_table_says_what_the_rows_are(tmp_path):
    names = ["a,b.jpg", 'say "x".png', "dir/ümlaut.jpg"]
    out = output(tmp_path / "x.npz", has_labels=True, label_names={0: "cat", 1: "dog"})
    out.write(samples(images(3), names, [1, -1, 7]), 3)
    with (tmp_path / "x.npz.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    assert rows == [
        ["position", "name", "label", "class"],
        ["0", names[0], "1", "dog"],
        ["1", names[1], "", ""],
        ["2", names[2], "7", ""],
    ]


@pytest.mark.parametrize("other", [images(1, (31, 20, 3))[0], images(1, dtype=np.float32)[0]])
def test_images_that_differ_are_named_with_the_remedy(tmp_path, other):
    of = [*images(2), other]
    with pytest.raises(UserError) as raised:
        output(tmp_path / "x.npz").write(samples(of, ["a.jpg", "b.jpg", "c.jpg"]), 3)
    message = str(raised.value)
    assert "'a.jpg'" in message and "'c.jpg'" in message and "'b.jpg'" not in message
    assert "20 x 31 x 3" in message
    assert "letterbox" in message and "--ops" in message
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


# --- nothing half-written stays ---


@pytest.mark.parametrize("name", EVERY_OUTPUT)
def test_an_interruption_leaves_nothing(tmp_path, name):
    def until_the_third():
        yield from samples(images(2))
        raise KeyboardInterrupt

    out = output(tmp_path / "new" / "deep" / name)
    with pytest.raises(KeyboardInterrupt):
        out.write(until_the_third(), 5)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", EVERY_OUTPUT)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, name):
    """No file of this process may be longer than 64 KB: the system's own way to refuse a write (EFBIG)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = output(tmp_path / name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        with pytest.raises(UserError) as raised:
            out.write(samples(images(70, (200, 200, 3))), 70)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = str(raised.value)
    assert "\n" not in message and str(tmp_path / name) in message and ".tmp-" not in message
    assert os.strerror(errno.EFBIG) in message
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


# --- what is refused before anything runs ---


@pytest.mark.parametrize("name", EVERY_OUTPUT)
def test_what_is_there_is_not_overwritten_without_being_told(tmp_path, name):
    output(tmp_path / name).write(samples(images(2)), 2)
    with pytest.raises(UserError, match="--overwrite"):
        output(tmp_path / name)
    other = images(5)[3:]
    output(tmp_path / name, overwrite=True).write(samples(other), 2)
    if name == "x.npz":
        np.testing.assert_array_equal(np.load(tmp_path / name)["images"], np.stack(other))


def test_a_table_or_an_index_in_the_way_counts_too(tmp_path):
    for name, beside in (("x.npz", "x.npz.csv"), ("y.tfrecord", "y.tfrecord.idx")):
        (tmp_path / beside).write_text("mine")
        with pytest.raises(UserError, match=beside):
            output(tmp_path / name)
        assert (tmp_path / beside).read_text() == "mine"


@pytest.mark.parametrize("through_link", [False, True])
def test_the_input_is_never_replaced(tmp_path, through_link):
    inputs = tmp_path / "in"
    (inputs / "cats").mkdir(parents=True)
    for file in ("cats/a.png", "all.npy"):
        (inputs / file).write_bytes(b"precious")
    seen = tmp_path / "link" if through_link else inputs
    if through_link:
        seen.symlink_to(inputs)
    files = [inputs / "cats" / "a.png", inputs / "all.npy"]
    for target in (seen, seen / "cats", seen / "all.npy", seen / "cats" / "a.png"):
        for given in (files, [seen], [inputs]):
            with pytest.raises(UserError, match="of the input"):
                output(target, overwrite=True, inputs=given)
    for given in (files, [inputs]):
        output(tmp_path / "out", inputs=given)
        output(seen / "cats" / "b.png", inputs=given)
        output(seen / "small", inputs=given)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("x.npz", {"image_format": "png"}, "--image_format"),
        ("x.png", {"image_format": "png"}, "--image_format"),
        ("x.npz", {"jpeg_quality": 90}, "--jpeg_quality"),
        ("x.png", {"jpeg_quality": 90}, "--jpeg_quality"),
        ("pictures", {"jpeg_quality": 90}, "--jpeg_quality"),
        ("x.npz", {"output_shards": 2}, "--output_shards"),
        ("pictures/", {"output_shards": 2}, "--output_shards"),
        ("x.webp", {}, "x.webp"),
        ("x.npzz", {}, "x.npzz"),
        ("file", {}, "exists"),
        ("folder.npy/x.csv", {}, "x.csv"),
    ],
)
def test_outputs_that_cannot_be_are_one_line(tmp_path, name, options, told):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as raised:
        output(tmp_path / name if name[-1] != "/" else f"{tmp_path / name}/", **options)
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert left(tmp_path) == ["file"]


def test_a_directory_may_have_a_dot_in_its_name(tmp_path):
    output(tmp_path / "run-1.5").write(samples(images(1)), 1)
    output(f"{tmp_path}/v.webp/").write(samples(images(1)), 1)
    assert left(tmp_path) == ["run-1.5", "run-1.5/0.png", "v.webp", "v.webp/0.png"]


@pytest.mark.parametrize("name", ["x.npz", "pictures"])
def test_a_place_that_cannot_be_written_is_one_line(name):
    """Not even root can make files there."""
    with pytest.raises(UserError, match=f"--output=/proc/self/{name}"):
        output(f"/proc/self/{name}").write(samples(images(2)), 2)
