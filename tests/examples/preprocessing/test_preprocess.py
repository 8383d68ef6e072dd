"""Tests preprocess.py and the checks of its sources."""

import os
import struct
import sys
import tarfile
from types import SimpleNamespace

import lmdb
import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import PIL.Image
import pytest

from common.data.tfrecord import write_index
from examples.preprocessing import dynamic_api, preprocess
from tests.commands import run as run_command
from tests.common.record_writing import flip, record, write
from tests.conftest import ROOT
from tests.examples.preprocessing import pictures_on_disk
from tests.examples.preprocessing import source_writing as writing
from tests.examples.preprocessing.source_writing import (
    COUNT,
    IMAGES,
    LABELS,
    WRITERS,
    datum,
    pixels,
    tensor,
    tensors,
)
from tests.refusal import refusal
from tests.small_apps import flag_values


def run(*arguments):
    _, values = flag_values("examples.preprocessing.preprocess", *arguments)
    preprocess.preprocess(SimpleNamespace(**values))


def message_for(source, path, directory, *arguments):
    """Returns the message of the error, and asserts that no output was written."""
    output_dir = directory / "output"
    output_dir.mkdir(exist_ok=True)
    output = f"--output={output_dir}/x.npz"
    message = refusal(run, f"--source={source}", f"--input={path}", output, *arguments)
    assert list(output_dir.iterdir()) == []
    return message


def images_in(path):
    with np.load(path) as arrays:
        assert list(arrays) == ["images"]
        return arrays["images"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Five PNGs of different sizes in two directories."""
    return pictures_on_disk.write_pictures(tmp_path_factory.mktemp("tree"))


# --- sources ---


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize("case", WRITERS)
def test_preprocessed_output_of_each_data_source_is_in_input_order(tmp_path, case, api):
    """A batch of 3 divides the images unevenly. The crop makes their heights equal."""
    kind, path, names = writing.write_case(case, tmp_path / "in")
    arguments = [f"--source={kind}", f"--input={path}", f"--api={api}", "--batch_size=3"]
    run(*arguments, "--crop=8x12", f"--output={tmp_path}/x.npz")
    expected = [pixels(i)[(i + 1) // 2 : (i + 1) // 2 + 8] for i in range(COUNT)]
    np.testing.assert_array_equal(images_in(tmp_path / "x.npz"), expected)

    run(*arguments, f"--output={tmp_path}/new/pictures")
    for number, name in enumerate(names):
        picture = PIL.Image.open(tmp_path / "new/pictures" / f"{name}.png")
        np.testing.assert_array_equal(picture, pixels(number), err_msg=name)
    assert sum(path.is_file() for path in (tmp_path / "new").rglob("*")) == COUNT


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize("decode", ["whole", "cropped"])
def test_each_flag_of_preprocess_py_reaches_the_chain_of_operators(tmp_path, coco128, api, decode):
    options = {"brightness": 0.9, "saturation": 1.5, "rotate": 5.0, "shear": 3.0, "normalize": "imagenet"}
    options |= {"resize_shorter": 64, "decode": decode}
    words = [f"--{name}={value}" for name, value in options.items()]
    paths = sorted((coco128 / "images").iterdir())[:5]
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in paths))
    source = ["--source=list", f"--input={tmp_path}/list.txt"]
    run(*source, f"--api={api}", "--crop=56x48", *words, f"--output={tmp_path}/x.npz")
    encoded = ndd.as_batch([np.frombuffer(path.read_bytes(), np.uint8) for path in paths])
    expected = dynamic_api.preprocess(encoded, crop=(56, 48), **options)
    np.testing.assert_array_equal(
        images_in(tmp_path / "x.npz"), np.stack(list(map(np.array, expected.tensors)))
    )


def test_image_list_with_labels_blank_lines_and_comments_is_read(tmp_path, tree):
    listed = f"# images\n{tree}/two dogs/3.png 7\n\n{tree}/cats/0.png\n{tree}/two dogs/4.png\n"
    (tmp_path / "list.txt").write_text(listed)
    run("--source=list", f"--input={tmp_path}/list.txt", f"--output={tmp_path}/out")
    for number in (3, 0, 4):
        picture = PIL.Image.open(tmp_path / "out" / f"{number}.png")
        np.testing.assert_array_equal(picture, pictures_on_disk.PICTURES[number])


def test_preprocess_py_keeps_the_subdirectories_of_images_and_numbers_repeated_names(tmp_path, tree):
    (tmp_path / "in/a").mkdir(parents=True)
    for name, number in (("a/0.png", 0), ("a/0.webp", 1), ("0.png", 2)):
        PIL.Image.fromarray(pictures_on_disk.PICTURES[number]).save(tmp_path / "in" / name, lossless=True)
    run(f"--input={tmp_path}/in", f"--output={tmp_path}/out")
    for name, number in (("a/0", 0), ("a/0-2", 1), ("0", 2)):
        picture = PIL.Image.open(tmp_path / f"out/{name}.png")
        np.testing.assert_array_equal(picture, pictures_on_disk.PICTURES[number])


def test_preprocess_py_external_source_reads_a_directory_or_the_arrays_of_a_python_function(tmp_path, tree):
    run("--source=external", f"--input={tree}", f"--output={tmp_path}/out")
    picture = PIL.Image.open(tmp_path / "out/cats/0.png")
    np.testing.assert_array_equal(picture, pictures_on_disk.PICTURES[0])
    code = (
        "import numpy as np\ndef images():\n    for i in range(5):\n        yield np.full((4, 6, 3), i, 'f4')"
    )
    (tmp_path / "code.py").write_text(code)
    for api in ("pipeline", "dynamic"):
        path = f"{tmp_path}/code.py:images"
        run("--source=external", f"--input={path}", f"--api={api}", f"--output={tmp_path}/{api}.npz")
        expected = np.broadcast_to(np.arange(5, dtype=np.float32)[:, None, None, None], (5, 4, 6, 3))
        np.testing.assert_array_equal(images_in(tmp_path / f"{api}.npz"), expected)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("images = 1 / 0", "raised ZeroDivisionError: division by zero"),
        ("other = []", "raised AttributeError"),
        ("images = []", "has no images"),
        ("images = ['a.png']", "has str"),
        ("images = [b'text']", "1 of 1 images cannot be used: 000000 (file that is not an image)"),
    ],
)
def test_preprocess_py_reports_external_python_code_that_fails_or_has_no_usable_images(
    tmp_path, code, message
):
    (tmp_path / "code.py").write_text(code)
    assert message in message_for("external", f"{tmp_path}/code.py:images", tmp_path)


# --- damage ---


@pytest.mark.parametrize("case", ["files", "tfrecord", "coco", "lmdb-caffe", "recordio", "webdataset"])
def test_preprocess_py_reports_a_truncated_image_of_each_data_source_by_its_name(tmp_path, case):
    damaged = [*IMAGES[:2], IMAGES[2][:-20], *IMAGES[3:]]
    kind, path, names = writing.write_case(case, tmp_path / "in", damaged)
    message = message_for(kind, path, tmp_path)
    assert "image that is cut off" in message
    assert (os.path.basename(names[2]) if kind in ("files", "coco") else "2") in message


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize("case", ["files", "tfrecord", "webdataset"])
def test_image_that_dali_fails_to_decode_is_reported_by_its_name(tmp_path, case, api):
    damaged = IMAGES[4][:100] + bytes(50) + IMAGES[4][150:]
    kind, path, names = writing.write_case(case, tmp_path / "in", [*IMAGES[:4], damaged, *IMAGES[5:]])
    message = message_for(kind, path, tmp_path, f"--api={api}", "--crop=8x12")
    assert f"DALI fails at image {names[4]!r}: " in message


@pytest.mark.parametrize("kind", preprocess.SOURCES)
def test_missing_input_of_each_data_source_is_reported_in_one_line(tmp_path, kind):
    assert "nowhere" in message_for(kind, tmp_path / "nowhere", tmp_path)


def records_of(directory, *contents):
    return write(directory / "x.tfrecord", writing.example(IMAGES[1], 1), *contents)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", "record 1 is not a tf.train.Example with one image/encoded"),
        (record(encoded=None), "record 1 is not a tf.train.Example with one image/encoded"),
        (writing.example(b""), "record 1 (empty image file)"),
    ],
    ids=["text", "no-image", "empty-image"],
)
def test_tfrecord_without_one_encoded_image_is_reported(tmp_path, content, message):
    assert message in message_for("tfrecord", records_of(tmp_path, content), tmp_path)


def test_tfrecord_file_that_is_damaged_or_truncated_is_reported(tmp_path):
    damaged, cut = (
        write(tmp_path / name, *map(writing.example, IMAGES)) for name in ("x.tfrecord", "y.tfrecord")
    )
    flip(damaged, 100)
    assert "x.tfrecord record 0 has a wrong checksum" in message_for("tfrecord", damaged, tmp_path)
    os.truncate(cut, os.path.getsize(cut) - 3)
    assert "y.tfrecord record 6" in message_for("tfrecord", cut, tmp_path)


def test_stale_index_file_beside_a_tfrecord_file_is_not_used(tmp_path):
    file = write(tmp_path / "x.tfrecord", *map(writing.example, IMAGES[:3]))
    write_index(file)
    write(tmp_path / "x.tfrecord", *map(writing.example, IMAGES))
    run("--source=tfrecord", f"--input={tmp_path}/x.tfrecord", "--crop=8x12", f"--output={tmp_path}/x.npz")
    assert len(images_in(tmp_path / "x.npz")) == COUNT


MAGIC = [writing.png(i, extra=bytes(i) + writing.RECORDIO_MAGIC * i + b"end") for i in range(COUNT)]


def test_recordio_records_split_at_magic_numbers_are_read(tmp_path):
    path = tmp_path / "x.rec"
    path.write_bytes(b"".join(writing.image_record(image, i) for i, image in enumerate(MAGIC)))
    assert path.read_bytes().count(writing.RECORDIO_MAGIC) > COUNT + 5
    run("--source=recordio", f"--input={path}", f"--output={tmp_path}/out")
    for number in range(COUNT):
        np.testing.assert_array_equal(PIL.Image.open(tmp_path / f"out/{number:06d}.png"), pixels(number))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.rec is empty: copy or write it again"),
        (b"text" * 9, "has no whole image record at byte 0: copy or write it again"),
        (writing.image_record(IMAGES[0], 1) + b"\x0a", "has no whole image record at byte "),
        (writing.image_record(IMAGES[0], 1)[:-30], "has no whole image record at byte 0"),
        (writing.record(b"short"), "has no whole image record at byte 0"),
        (writing.image_record(b"", 1), "000000 (empty image file)"),
        (writing.RECORDIO_MAGIC + struct.pack("<I", 3 << 29), "has no whole image record at byte 0"),
        (2 * (writing.RECORDIO_MAGIC + struct.pack("<I", 1 << 29)), "has no whole image record at byte 8"),
    ],
    ids=[
        *("empty-file", "text", "one-byte-after-the-records", "truncated", "short-record", "empty-image"),
        *("last-part-first", "first-part-twice"),
    ],
)
def test_damaged_recordio_file_is_reported(tmp_path, content, message):
    (tmp_path / "x.rec").write_bytes(content)
    assert message in message_for("recordio", tmp_path / "x.rec", tmp_path)


def tar(directory, *files):
    return writing.write_tar(directory / "x.tar", files)


def test_webdataset_archive_with_directories_and_other_files_is_read(tmp_path):
    files = [
        *(("a", None), ("a/1.x.json", b"{}"), ("a/1.cls", b"07 \n"), ("a/1.PNG", IMAGES[1])),
        *(("b/1.seg.png", IMAGES[5]), ("b/1.png", IMAGES[2]), ("b/1.cls", b"12")),
    ]
    run("--source=webdataset", f"--input={tar(tmp_path, *files)}", f"--output={tmp_path}/out")
    for number, image in enumerate((1, 2)):
        np.testing.assert_array_equal(PIL.Image.open(tmp_path / f"out/{number:06d}.png"), pixels(image))


def test_webdataset_sample_without_image_is_reported(tmp_path):
    path = tar(tmp_path, ("1.png", IMAGES[0]), ("2.txt", b"no"), ("2.cls", b"1"), ("3.png", IMAGES[1]))
    assert "Underful sample" in message_for("webdataset", path, tmp_path)


def test_truncated_webdataset_archive_is_reported(tmp_path):
    path = tar(tmp_path, *((f"{i}.png", image) for i, image in enumerate(IMAGES)))
    end = sum(512 + -(-len(image) // 512) * 512 for image in IMAGES)
    for size, message in ((end, f"cut off at byte {end}"), (end - 600, "not a whole"), (0, "not a whole")):
        os.truncate(path, size)
        assert message in message_for("webdataset", path, tmp_path)


def test_damaged_or_compressed_webdataset_archive_is_reported(tmp_path):
    path = tar(tmp_path, ("1.png", IMAGES[0]), ("2.png", IMAGES[1]))
    with tarfile.open(path) as content:
        begin = content.getmembers()[1].offset
    flip(path, begin + 5)
    assert f"damaged or cut off at byte {begin}" in message_for("webdataset", path, tmp_path)
    with tarfile.open(tmp_path / "z.tar", "w:gz") as compressed:
        compressed.add(path)
    assert "is not a whole plain tar file" in message_for("webdataset", tmp_path / "z.tar", tmp_path)


def values(directory, *contents):
    return writing.write_values(directory, {b"%03d" % i: content for i, content in enumerate(contents)})


@pytest.mark.parametrize(
    "make",
    [
        lambda image, _: datum(image),
        lambda image, _: tensors(image),
        lambda image, label: tensors(image, tensor("float", label)),
        lambda image, label: writing.protobuf((4, image), (5, label)),  # without the field `encoded`
    ],
    ids=["caffe-without-label", "caffe2-without-label", "caffe2-float-label", "caffe-without-encoded"],
)
def test_lmdb_of_each_variant_of_caffe_and_caffe2_records_is_read(tmp_path, make):
    path = values(tmp_path, *map(make, IMAGES, LABELS))
    for number, input_path in enumerate((path, f"{path}/data.mdb")):
        run("--source=lmdb", f"--input={input_path}", "--crop=8x12", f"--output={tmp_path}/{number}.npz")
        assert len(images_in(tmp_path / f"{number}.npz")) == COUNT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (datum(b"abc", 1), "000001 (file that is not an image)"),
        (tensors(IMAGES[0], tensor("int32", 1)), "has records of 0 and 2 tensors"),
        (tensors(IMAGES[0], *[tensor("int32", 1)] * 3), "has records of 0 and 4 tensors"),
        (b"\xff\xff", "cannot be read"),
        (b"", "000001 (empty image file)"),
    ],
    ids=["text", "tensors-without-image", "four-tensors", "not-protobuf", "empty"],
)
def test_lmdb_value_that_dali_cannot_read_is_reported(tmp_path, content, message):
    assert message in message_for("lmdb", values(tmp_path / "db", datum(IMAGES[0], 1), content), tmp_path)


@pytest.mark.parametrize(
    ("end", "message"),
    [(-1, "bytes: copy it again"), (12288, "is cut off after 12288 of"), (4096, "cannot be read as LMDB")],
    ids=["last-byte-missing", "three-pages", "one-page"],
)
def test_truncated_lmdb_is_reported_and_the_process_survives(tmp_path, end, message):
    path = values(tmp_path / "db", *map(datum, IMAGES * 9, LABELS * 9))
    os.truncate(f"{path}/data.mdb", end if end > 0 else os.path.getsize(f"{path}/data.mdb") + end)
    assert message in message_for("lmdb", path, tmp_path)


def test_directory_without_a_valid_lmdb_is_reported(tmp_path):
    database = tmp_path / "db"
    database.mkdir()
    assert "data.mdb" in message_for("lmdb", database, tmp_path)
    (database / "data.mdb").write_bytes(b"text" * 5000)
    assert "cannot be read as LMDB" in message_for("lmdb", database, tmp_path)
    with lmdb.open(os.fspath(tmp_path / "empty")):
        pass
    assert "has no images" in message_for("lmdb", tmp_path / "empty", tmp_path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4), np.uint8), "uint8 (4, 4): uint8 or float32 (height, width, channels) is needed"),
        (np.zeros((4, 4, 3)), "float64 (4, 4, 3)"),
        (np.zeros((4, 4, 3), np.float32), "arrays: DALI reads only one dtype at a time"),
    ],
    ids=["gray", "float64", "two-dtypes"],
)
def test_numpy_array_of_unsupported_shape_or_dtype_is_reported(tmp_path, array, message):
    np.save(tmp_path / "0.npy", np.zeros((4, 4, 3), np.uint8))
    np.save(tmp_path / "1.npy", array)
    assert message in message_for("numpy", tmp_path, tmp_path)


def test_coco_json_with_a_missing_image_file_is_reported(tmp_path):
    _, path, names = writing.write_case("coco", tmp_path / "in")
    os.remove(f"{path}/images/{names[3]}.png")
    assert f"images/{names[3]}.png (missing image file)" in message_for("coco", path, tmp_path)


# --- flags and outputs ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--input is missing"),
        (["--input={tree}"], "--output is missing"),
        (
            ["--input={tree}", "--output={empty}/x.txt"],
            "the suffix .txt is unknown, use OUT.npz or a directory",
        ),
        (["--input={tree}", "--output={empty}/x.npz", "--crop=224"], "--crop=224: give HEIGHTxWIDTH"),
        (["--input={tree}", "--output={empty}/x.npz", "--crop=0x5"], "--crop=0x5: give HEIGHTxWIDTH"),
        (
            ["--input={tree}", "--output={empty}/x", "--normalize=imagenet"],
            "pictures cannot hold normalised values",
        ),
        (
            ["--input={tree}", "--output={empty}/x.npz"],
            "image 1 has shape (64, 48, 3), image 0 (48, 64, 3)",
        ),
        (
            ["--input={tree}", "--output={empty}/x.npz", "--crop=50x50"],
            "has 48 x 64 pixels, less than --crop=50x50",
        ),
        (
            ["--input={tree}", "--output={empty}/x.npz", "--crop=9x9", "--decode=cropped"],
            "--decode=cropped needs --crop",
        ),
        (["--input={tree}", "--output={empty}/y/x.npz"], "its directory does not exist"),
        (["--input={tree}", "--output={empty}/x.npz", "--images={tree}"], "--images is for --source=coco"),
        (["--input={empty}", "--output={empty}/x.npz"], "no file there ends in .jpg"),
    ],
)
def test_invalid_flags_of_preprocess_py_are_reported_in_one_line_and_nothing_is_written(
    tree, tmp_path, arguments, message
):
    assert message in refusal(run, *(argument.format(tree=tree, empty=tmp_path) for argument in arguments))
    assert list(tmp_path.iterdir()) == []


def test_existing_output_of_preprocess_py_is_refused_and_stays_unchanged(tree, tmp_path):
    (tmp_path / "x.npz").write_bytes(b"mine")
    for output in (tmp_path / "x.npz", tmp_path, tree):
        assert "exists: choose another name" in refusal(run, f"--input={tree}", f"--output={output}")
    assert (tmp_path / "x.npz").read_bytes() == b"mine"


def test_preprocess_py_with_device_gpu_is_refused_if_dali_sees_no_gpu(tree, tmp_path, monkeypatch):
    monkeypatch.setattr("nvidia.dali.backend.GetCUDADeviceCount", lambda: 0)
    message = refusal(run, f"--input={tree}", f"--output={tmp_path}/out", "--device=gpu")
    assert message == "--device=gpu: DALI sees no GPU here; use --device=cpu"


def test_preprocess_script_runs_in_another_directory(tree, tmp_path):
    command = [sys.executable, ROOT / "examples/preprocessing/preprocess.py"]
    words = [f"--input={tree}", "--crop=20x20", f"--output={tmp_path}/x.npz"]
    result = run_command(*command, *words, cwd=tmp_path)
    assert result.stdout == f"5 images: {tmp_path}/x.npz, array `images` of shape (5, 20, 20, 3)\n"
