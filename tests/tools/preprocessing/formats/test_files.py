"""Tests files.py and base.py: trees, lists and NumPy files."""

import os
from pickle import dumps

import numpy as np
import pytest

from common.data.check.images import ImagePolicy
from common.data.check.issues import DataError
from tests.common.record_writing import flip
from tests.tools.preprocessing import source_writing
from tests.tools.preprocessing.reading import by_dynamic, by_pipeline, check, flat, names_of, opened, refused
from tests.tools.preprocessing.source_writing import IMAGES, pixels, write_coco
from tools.preprocessing.reading import Part

SKIP = ImagePolicy(on_bad_image="skip")


def put(directory, *names):
    source_writing.put(directory, names, [IMAGES[0]] * len(names))


def labels_by_name(path, kind="files", **options):
    source = opened(kind, path, **options)
    return dict(zip(names_of(source), source.labels.tolist(), strict=True))


# --- trees ---


def test_a_tree_in_the_order_of_its_directories(tmp_path):
    put(tmp_path, "b/2.jpg", "b/deep/er/1.PNG", "a x/9.png", "a/1.webp", "b/10.tiff", "note.txt", "b/x.json")
    put(tmp_path, ".hidden/1.png", "b/.1.png", "zero.png")
    (tmp_path / "aa empty").mkdir()
    names = ["a/1.webp", "a x/9.png", "b/10.tiff", "b/2.jpg", "b/deep/er/1.PNG", "zero.png"]
    assert list(labels_by_name(tmp_path).items()) == list(zip(names, [0, 1, 3, 3, 3, -1], strict=True))
    assert opened("files", tmp_path).label_names == {0: "a", 1: "a x", 2: "aa empty", 3: "b"}


def test_a_flat_directory_has_no_labels(tmp_path):
    put(tmp_path, "2.png", "10.png")
    (tmp_path / "empty").mkdir()
    assert labels_by_name(tmp_path) == {"10.png": -1, "2.png": -1}
    assert opened("files", tmp_path).label_names == {}


def test_one_file_and_a_glob(tmp_path):
    put(tmp_path, "a/1.png", "a/2.jpg", "b/1.png", "image")
    assert labels_by_name(tmp_path / "image") == {"image": -1}
    assert labels_by_name(tmp_path / "*/1.png") == {"a/1.png": -1, "b/1.png": -1}
    assert labels_by_name(tmp_path / "**").keys() == {"a/1.png", "a/2.jpg", "b/1.png"}


def test_links_are_followed_but_not_in_circles(tmp_path):
    put(tmp_path, "real/1.png", "elsewhere/2.png")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").symlink_to(tmp_path / "real")
    (tmp_path / "tree/b.png").symlink_to(tmp_path / "elsewhere/2.png")
    (tmp_path / "real/up").symlink_to(tmp_path / "tree")
    (tmp_path / "real/self").symlink_to(tmp_path / "real")
    assert list(labels_by_name(tmp_path / "tree")) == ["a/1.png", "b.png"]


@pytest.mark.parametrize("names", [["#%d.png", "blank ü .png"], ["line\nfeed.png"], ["\udcff.png"]])
def test_odd_names(tmp_path, names):
    put(tmp_path, *names)
    assert list(labels_by_name(tmp_path)) == names
    count, by_python = len(names), not names[0].isprintable()
    check(opened("files", tmp_path), IMAGES[:1] * count, [-1] * count, by_python=by_python)


def test_nothing_to_read(tmp_path):
    refused("files", tmp_path / "nowhere", "missing image file: 'nowhere'")
    refused("files", tmp_path / "no*where", r"no file there ends in \.jpg")
    refused("files", tmp_path, r"no file there ends in \.jpg")


def test_too_large_images_are_named(tmp_path):
    put(tmp_path, "1.png")
    np.save(tmp_path / "1.npy", pixels(0))
    policy = ImagePolicy(max_megapixels=1e-5)
    for kind, name in (("files", "1.png"), ("numpy", "1.npy")):
        refused(kind, tmp_path, f"larger than --max_megapixels: '{name}': 12 x 8 pixels", policy=policy)


# --- lists ---


def listed(directory, text):
    (directory / "list.txt").write_text(text, "utf-8", "surrogateescape", newline="")
    return directory / "list.txt"


def test_lines_of_a_list(tmp_path):
    put(tmp_path, "a b.png", "#1.png", "sub/x 7", "c.png")
    text = "\ufeff# of images\na b.png -3\r\n\n  ./#1.png\t2147483647  \nsub/x 7 0\n"
    text += f"{tmp_path}/c.png 5\na b.png 1"
    source = opened("list", listed(tmp_path, text))
    assert names_of(source) == ["a b.png", "./#1.png", "sub/x 7", f"{tmp_path}/c.png", "a b.png"]
    check(source, [IMAGES[0]] * 5, [-3, 2**31 - 1, 0, 5, 1])


def test_lists_that_are_refused(tmp_path):
    put(tmp_path, "a.png", "b.png")
    for text, said in (
        ("# nothing\n\n", "is not a list of files: write a path, or path and label"),
        ("a.png 1\nb.png\n", r"'b\.png' has no label: write labels on all lines"),
        ("a.png 1\nb.png 2147483648\n", "has the label 2147483648: a label must be a whole"),
        ("\udc89PNG\0\0", "is not a list of files"),
        ("a.png\nnowhere.png", "missing image file: 'nowhere.png'"),
    ):
        refused("list", listed(tmp_path, text), said)


# --- NumPy files ---


def test_objects_are_refused_and_never_unpickled(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[[None]]], object))
    (tmp_path / "b.npy").write_bytes(dumps({}))
    np.save(tmp_path / "c.npy", pixels(0))
    refused("numpy", tmp_path, "'a.npy': NumPy cannot read it: Array can't be memory-mapped", DataError)
    refused("numpy", tmp_path, "'b.npy': NumPy cannot read it: This file contains pickled", DataError)
    assert labels_by_name(tmp_path, "numpy", policy=SKIP) == {"c.npy": -1}


def test_arrays_that_are_no_images(tmp_path):
    for array, said in (
        (pixels(0).astype(">f4"), ">f4"),
        (pixels(0)[..., 0], r"uint8 \(8, 12\): uint8 or float32 \(height, width, channels\)"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 \(0, 4, 3\)"),
        (np.zeros((2, 3, 4, 3), np.uint8), r"uint8 \(2, 3, 4, 3\)"),
    ):
        np.save(tmp_path / "x.npy", array)
        refused("numpy", tmp_path, f"'x.npy': {said}", DataError)


def test_a_file_of_numpy_that_is_cut_off_or_damaged_is_said(tmp_path):
    np.save(tmp_path / "x.npy", pixels(0))
    os.truncate(tmp_path / "x.npy", 200)
    refused("numpy", tmp_path, r"file that is not an image: 'x\.npy': ", DataError)
    flip(tmp_path / "x.npy", 10)  # damages a brace of the header, which is a Python dict
    refused("numpy", tmp_path, r"file that is not an image: 'x\.npy': ", DataError)


def test_arrays_of_floats(tmp_path):
    image = pixels(1).astype(np.float32)
    np.save(tmp_path / "x.npy", image)
    source = opened("numpy", tmp_path)
    assert source.reader is not None
    for read in (flat(by_pipeline(Part(source), 1, 1)), flat(by_dynamic(Part(source)))):
        assert read[0][0].dtype == np.float32 and np.array_equal(read[0][0], image)


# --- COCO ---


def test_either_part_of_coco_may_be_the_input(tmp_path):
    path, names = write_coco(tmp_path, IMAGES[:2], [0, 0])
    json_path = os.fspath(tmp_path / "instances.json")
    assert list(labels_by_name(path, "coco", annotations=json_path)) == names
    assert list(labels_by_name(json_path, "coco", images=path)) == names
    refused("coco", path, "needs one more flag: --annotations=FILE")
    refused("coco", path, "needs one more flag: --annotations=FILE", annotations=json_path, images=path)
