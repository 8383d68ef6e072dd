"""Every output by the command line, read back, against Pillow and TensorFlow decoding the same files."""

import io
import os
import signal
import types

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from absl import flags

from common import args as shared_flags
from common.errors import UserError
from tests.tools.preprocessing import pictures_on_disk
from tools import preprocess
from tools.preprocessing import outputs


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Five PNGs of different sizes in two directories, and their pixels in the source's order."""
    directory = tmp_path_factory.mktemp("tree")
    images = pictures_on_disk.write(directory / "cats")
    (directory / "two dogs").mkdir()
    for number in (3, 4):
        os.replace(directory / "cats" / f"{number}.png", directory / "two dogs" / f"{number}.png")
    return directory, images


def run(*arguments):
    fv = flags.FlagValues()
    preprocess.define_flags(fv)
    fv(["preprocess", *arguments])
    preprocess.preprocess(types.SimpleNamespace(**shared_flags.values(fv, preprocess.define_flags)))


CROP = "--ops=crop:40x64,fill=7"


def cropped(images):
    """The middle 40 x 64 of each, 7 where there is no image, as NumPy has it."""
    out = np.full((len(images), 40, 64, 3), 7, np.uint8)
    for target, image in zip(out, images, strict=True):
        padded = np.pad(image, ((40, 40), (64, 64), (0, 0)), constant_values=7)
        # The crop begins at (size - crop) / 2, and a half is rounded away from zero, as C does.
        top, left = (
            int(np.copysign(np.floor(abs(d) + 0.5), d)) + pad
            for d, pad in (((image.shape[0] - 40) / 2, 40), ((image.shape[1] - 64) / 2, 64))
        )
        target[:] = padded[top : top + 40, left : left + 64]
    return out


@pytest.mark.parametrize(("api", "suffix"), [("pipeline", "npz"), ("dynamic", "npy")])
def test_arrays(tree, tmp_path, capsys, api, suffix):
    directory, images = tree
    path = tmp_path / f"x.{suffix}"
    run(f"--api={api}", f"--input={directory}", CROP, f"--output={path}", "--batch_size=2")
    found = np.load(path)
    np.testing.assert_array_equal(found["images"] if suffix == "npz" else found, cropped(images))
    assert str(path) in capsys.readouterr().out
    assert (tmp_path / f"x.{suffix}.csv").read_text().splitlines()[-1] == "4,two dogs/4.png,1,two dogs"


def test_pictures_have_the_colours_of_their_sources_whatever_the_order_of_channels(tree, tmp_path):
    directory, _ = tree
    ops = "decode:bgr | resize:16x16"
    run(f"--input={directory}", f"--ops={ops}", f"--output={tmp_path}/x.npz")
    run(f"--input={directory}", f"--ops={ops}", f"--output={tmp_path}/out")
    array = np.load(tmp_path / "x.npz")["images"]
    picture = np.asarray(PIL.Image.open(tmp_path / "out" / "cats" / "0.png"))
    np.testing.assert_array_equal(picture, array[0][..., ::-1])
    assert picture[0, 0, 0] > 200 > picture[0, 0, 2]  # the corner of these pictures is red


def test_pictures_of_jpegs_are_what_tensorflow_decodes(drawn, tmp_path):
    run(f"--input={drawn}/images", f"--output={tmp_path}/out")
    for path in sorted((drawn / "images").glob("*.jpg")):
        expected = tf.io.decode_jpeg(path.read_bytes(), channels=3, dct_method="INTEGER_ACCURATE")
        found = PIL.Image.open(tmp_path / "out" / f"{path.stem}.png")
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_jpegs_of_a_quality(tree, tmp_path):
    directory, images = tree
    run(f"--input={directory}", f"--output={tmp_path}/out", "--image_format=jpeg", "--jpeg_quality=30")
    stream = io.BytesIO()
    PIL.Image.fromarray(images[4]).save(stream, "JPEG", quality=30)
    assert (tmp_path / "out" / "two dogs" / "4.jpg").read_bytes() == stream.getvalue()


def test_records_and_from_them_the_same_again(tree, tmp_path):
    directory, images = tree
    run(f"--input={directory}", CROP, f"--output={tmp_path}/r.tfrecord", "--output_shards=2")
    files = sorted(str(path) for path in tmp_path.glob("r-*.tfrecord"))
    assert len(files) == 2
    for image, record in zip(cropped(images), tf.data.TFRecordDataset(files), strict=True):
        features = tf.train.Example.FromString(record.numpy()).features.feature
        encoded = features["image/encoded"].bytes_list.value[0]
        np.testing.assert_array_equal(tf.io.decode_png(encoded), image)
    run("--source=tfrecord", f"--input={tmp_path}/r-*.tfrecord", f"--output={tmp_path}/x.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "x.npz")["images"], cropped(images))
    labels = [line.split(",")[2] for line in (tmp_path / "x.npz.csv").read_text().splitlines()[1:]]
    assert labels == ["0", "0", "0", "1", "1"]


def test_what_an_output_cannot_hold_leaves_nothing(tree, tmp_path):
    for arguments, told in (
        (["--output={}/x.npz"], "letterbox"),
        (["--output={}/x.png", "--ops=layout:chw"], "CHW"),
        (["--output={}/x.npz", "--image_format=png"], "--image_format"),
        (["--output={}/r.tfrecord", "--output_shards=6", CROP], "--output_shards=6"),
    ):
        with pytest.raises(UserError, match=told):
            run(f"--input={tree[0]}", *(argument.format(tmp_path) for argument in arguments))
        assert list(tmp_path.iterdir()) == []


def test_images_that_a_list_names_are_not_replaced(tree, tmp_path):
    image = tmp_path / "photos" / "a.png"
    pictures_on_disk.write(image.parent, sizes=[(40, 50)])
    os.replace(image.parent / "0.png", image)
    (tmp_path / "list.txt").write_text("photos/a.png\n")
    before = image.read_bytes()
    for target in (image.parent, image):
        with pytest.raises(UserError, match="the input"):
            run("--source=list", f"--input={tmp_path}/list.txt", f"--output={target}", "--overwrite")
    assert image.read_bytes() == before


def test_a_complaint_after_half_a_progress_bar_has_a_line_of_its_own(tree, tmp_path, capsys):
    with pytest.raises(UserError, match=r"^image 0 \('cats/0\.png'\) is uint8 48 x 64 x 3"):
        run(f"--input={tree[0]}", f"--output={tmp_path}/x.npz")
    progress = capsys.readouterr().err
    assert "1/5" in progress and progress.endswith("\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tree, tmp_path, monkeypatch, number):
    """In the middle of writing, as a scheduler's time limit sends it."""
    fv = flags.FlagValues()
    preprocess.define_flags(fv)
    fv(["preprocess", f"--input={tree[0]}", f"--output={tmp_path}/new/"])
    monkeypatch.setattr(preprocess.flags, "FLAGS", fv)
    monkeypatch.setattr(outputs.Output, "encode", lambda *_: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            preprocess.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
