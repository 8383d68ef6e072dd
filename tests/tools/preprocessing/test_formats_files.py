"""Trees, lists and NumPy files: what is found, in which order, with which label, and what is refused."""

import os
from pickle import dumps

import numpy as np
import pytest

from common.datacheck.images import ImagePolicy
from common.datacheck.issues import DataError
from common.errors import UserError
from tests.tools.preprocessing.reading import by_dynamic, by_pipeline, flat, names_of
from tests.tools.preprocessing.source_writing import IMAGES, pixels, png
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.reading import Part


def silent(issues):
    """Nobody is told."""


def put(directory, *names, content=IMAGES[0]):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def names_and_labels(kind, path, **options):
    source = open_image_source(kind, os.fspath(path), on_report=silent, **options)
    return dict(zip(names_of(source), source.labels.tolist(), strict=True)), source


# --- trees ---


def test_a_tree_in_the_order_of_its_directories(tmp_path):
    put(tmp_path, "b/2.jpg", "b/deep/er/1.PNG", "a x/9.png", "a/1.webp", "b/10.tiff", "note.txt", "b/x.json")
    put(tmp_path, ".hidden/1.png", "b/.1.png", "zero.png")
    (tmp_path / "aa empty").mkdir()
    found, source = names_and_labels("files", tmp_path)
    assert list(found) == ["a/1.webp", "a x/9.png", "b/10.tiff", "b/2.jpg", "b/deep/er/1.PNG", "zero.png"]
    assert found == {
        "a/1.webp": 0,
        "a x/9.png": 1,
        "b/10.tiff": 3,
        "b/2.jpg": 3,
        "b/deep/er/1.PNG": 3,
        "zero.png": -1,
    }
    assert list(source.label_names.values()) == ["a", "a x", "aa empty", "b"]


def test_a_flat_directory_has_no_labels(tmp_path):
    put(tmp_path, "2.png", "10.png")
    (tmp_path / "empty").mkdir()
    found, source = names_and_labels("files", tmp_path)
    assert found == {"10.png": -1, "2.png": -1} and source.label_names == {}


def test_one_file_and_a_glob(tmp_path):
    put(tmp_path, "a/1.png", "a/2.jpg", "b/1.png", "image")
    assert names_and_labels("files", tmp_path / "image")[0] == {"image": -1}
    assert names_and_labels("files", tmp_path / "*/1.png")[0] == {"a/1.png": -1, "b/1.png": -1}
    assert names_and_labels("files", tmp_path / "**")[0].keys() == {"a/1.png", "a/2.jpg", "b/1.png"}


def test_links_are_followed_but_not_in_circles(tmp_path):
    put(tmp_path, "real/1.png", "elsewhere/2.png")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").symlink_to(tmp_path / "real")
    (tmp_path / "tree/b.png").symlink_to(tmp_path / "elsewhere/2.png")
    (tmp_path / "real/up").symlink_to(tmp_path / "tree")
    (tmp_path / "real/self").symlink_to(tmp_path / "real")
    found, _ = names_and_labels("files", tmp_path / "tree")
    assert list(found) == ["a/1.png", "b.png"]


@pytest.mark.timeout(60)
def test_pipes_and_dangling_links_are_named(tmp_path):
    put(tmp_path, "1.png")
    os.mkfifo(tmp_path / "2.png")
    (tmp_path / "3.png").symlink_to("nowhere")
    with pytest.raises(DataError) as caught:
        open_image_source("files", os.fspath(tmp_path))
    assert "'2.png': a pipe" in str(caught.value) and "'3.png': a symbolic link to nothing" in str(
        caught.value
    )
    policy = ImagePolicy(on_bad_image="skip")
    assert list(names_and_labels("files", tmp_path, policy=policy)[0]) == ["1.png"]


@pytest.mark.parametrize(
    "name", [b"line\nfeed.png", b"\xff not utf-8.png", "blank ü .png".encode(), b"#%d.png"]
)
def test_odd_names(tmp_path, name):
    with open(os.path.join(os.fsencode(tmp_path), name), "wb") as stream:
        stream.write(IMAGES[1])
    source = open_image_source("files", os.fspath(tmp_path), on_report=silent)
    assert names_of(source) == [os.fsdecode(name)]
    for read in (flat(by_pipeline(Part(source), 1, 1)), flat(by_dynamic(Part(source)))):
        assert [image.tobytes() for image, _ in read] == [IMAGES[1]]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "missing image file: 'nowhere'"),
        ("no*where", r"no file there ends in \.jpg"),
        ("empty", r"no file there ends in \.jpg"),
    ],
)
def test_nothing_to_read(tmp_path, path, said):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=said):
        open_image_source("files", os.fspath(tmp_path / path))


def test_too_large_images_are_named(tmp_path):
    put(tmp_path, "1.png")
    with pytest.raises(DataError, match=r"larger than --max_megapixels: '1\.png': 12 x 8 pixels"):
        open_image_source("files", os.fspath(tmp_path), policy=ImagePolicy(max_megapixels=1e-5))


# --- lists ---


def listed(directory, text):
    (directory / "list.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return directory / "list.txt"


def test_lines_of_a_list(tmp_path):
    put(tmp_path, "a b.png", "#1.png", "sub/x 7", "c.png")
    text = "\ufeff# of images\na b.png -3\r\n\n  ./#1.png\t2147483647  \nsub/x 7 0\n"
    text += f"{tmp_path}/c.png 5\na b.png 1"
    source = open_image_source("list", os.fspath(listed(tmp_path, text)), on_report=silent)
    assert names_of(source) == ["a b.png", "./#1.png", "sub/x 7", f"{tmp_path}/c.png", "a b.png"]
    assert source.labels.tolist() == [-3, 2**31 - 1, 0, 5, 1]
    for read in (flat(by_pipeline(Part(source), 1, 5)), flat(by_dynamic(Part(source)))):
        assert [label for _, label in read] == [-3, 2**31 - 1, 0, 5, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n\n", "is no list of files: write one path a line"),
        ("a.png 1\nb.png\n", r"'b\.png' has no label, and others have"),
        (
            "a.png 1\nb.png 2147483648\n",
            "has the label 2147483648: labels are whole",
        ),
        (b"\x89PNG\0\0", "is no list of files"),
        ("a.png\nnowhere.png", "missing image file: 'nowhere.png'"),
    ],
)
def test_lists_that_are_refused(tmp_path, text, said):
    put(tmp_path, "a.png", "b.png")
    with pytest.raises(UserError, match=said) as caught:
        open_image_source("list", os.fspath(listed(tmp_path, text)))
    assert "\n" not in str(caught.value)


# --- NumPy files ---


class _Dangerous:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (open, (self._path, "w"))


def test_objects_are_refused_and_never_unpickled(tmp_path):
    trace = os.fspath(tmp_path / "trace")
    np.save(tmp_path / "a.npy", np.array([[[_Dangerous(trace)]]], object))
    (tmp_path / "b.npy").write_bytes(dumps(_Dangerous(trace)))
    np.save(tmp_path / "c.npy", pixels(0))
    with pytest.raises(DataError) as caught:
        open_image_source("numpy", os.fspath(tmp_path))
    assert "'a.npy': NumPy cannot read it: Array can't be memory-mapped" in str(caught.value)
    assert "'b.npy': NumPy cannot read it: " in str(caught.value)
    policy = ImagePolicy(on_bad_image="skip")
    assert list(names_and_labels("numpy", tmp_path, policy=policy)[0]) == ["c.npy"]
    assert not os.path.exists(trace)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (pixels(0).astype(np.float64), "float64"),
        (pixels(0).astype(">f4"), ">f4"),
        (pixels(0)[..., 0], r"uint8 \(8, 12\): uint8 or float32 \(height, width, channels\)"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 \(0, 4, 3\)"),
        (np.zeros((2, 3, 4, 3), np.uint8), r"uint8 \(2, 3, 4, 3\)"),
    ],
)
def test_arrays_that_are_no_images(tmp_path, array, said):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(DataError, match=f"'x.npy': {said}"):
        open_image_source("numpy", os.fspath(tmp_path))


@pytest.mark.parametrize(
    "header",
    ["{'descr': '|u1', 'fortran_order': False, 'shape': (9, 9, 3)}", "{" * 500, "[]", "\xb7("],
)
def test_a_damaged_header_is_said(tmp_path, header):
    text = header.encode("latin1").ljust(117) + b"\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + bytes(12))
    with pytest.raises(DataError, match=r"file that is not an image: 'x\.npy': ") as caught:
        open_image_source("numpy", os.fspath(tmp_path))
    assert "\n" not in str(caught.value)


def test_arrays_of_several_types_are_no_batch(tmp_path):
    np.save(tmp_path / "a.npy", pixels(0))
    np.save(tmp_path / "b.npy", pixels(0).astype(np.float32))
    with pytest.raises(UserError, match=r"'a\.npy' is uint8 and 'b\.npy' is float32: give images of"):
        open_image_source("numpy", os.fspath(tmp_path))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_layout_of_arrays(tmp_path, dtype, order):
    image = np.array(pixels(1), dtype, order=order)
    np.save(tmp_path / "x.npy", image)
    _, source = names_and_labels("numpy", tmp_path)
    assert source.reader is not None
    for read in (flat(by_pipeline(Part(source), 1, 1)), flat(by_dynamic(Part(source)))):
        assert read[0][0].dtype == dtype and np.array_equal(read[0][0], image)


# --- COCO ---


def test_either_part_of_coco_may_be_the_input(tmp_path):
    from tests.tools.preprocessing.source_writing import write_coco

    path, names = write_coco(tmp_path, [png(i) for i in range(2)], [0, 0])
    json_path = os.fspath(tmp_path / "instances.json")
    assert list(names_and_labels("coco", path, annotations=json_path)[0]) == names
    assert list(names_and_labels("coco", json_path, images=path)[0]) == names
