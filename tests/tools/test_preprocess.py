"""Tests preprocess.py and common/progress.py."""

import csv
import os
import re
import signal
import sys
import types

import numpy as np
import PIL.Image
import pytest

from common import progress
from tests.common.image_variants import pillow
from tests.refusal import refusal
from tests.small_apps import flag_values
from tests.tools.preprocessing import pictures_on_disk
from tests.tools.preprocessing.reading import opened
from tests.tools.preprocessing.source_writing import COUNT, IMAGES, WRITERS, labels_of, pixels, write_case
from tools import preprocess
from tools.preprocessing import outputs
from tools.preprocessing.image_source import KINDS

OPS = "--ops=pad:16x12,fill=9"


def run(*arguments):
    _, values = flag_values("tools.preprocess", *arguments)
    preprocess.preprocess(types.SimpleNamespace(**values))


def given(case, directory, images=IMAGES):
    kind, path, options, names = write_case(case, directory, images)
    values = {"source": kind, "input": path, **options}
    return [f"--{name}={value}" for name, value in values.items()], names


def padded():
    rows = [((0, 8 - number), (0, 0), (0, 0)) for number in range(COUNT)]
    return np.stack([np.pad(pixels(i), rows[i], constant_values=9) for i in range(COUNT)])


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return pictures_on_disk.write(tmp_path_factory.mktemp("tree"))


# --- sources ---


@pytest.mark.parametrize("case", WRITERS)
def test_pixels_names_and_labels_of_every_source(tmp_path, case):
    source, names = given(case, tmp_path / "in")
    api, suffix = ("dynamic", "npy") if case in ("tfrecord", "numpy") else ("pipeline", "npz")
    out = f"{tmp_path}/out.{suffix}"
    run(*source, f"--api={api}", OPS, f"--output={out}", "--batch_size=3")
    found = np.load(out)
    np.testing.assert_array_equal(found["images"] if suffix == "npz" else found, padded())
    with open(f"{out}.csv", newline="") as table:
        found = [(row["name"], int(row["label"] or -1)) for row in csv.DictReader(table)]
    assert found == list(zip(names, labels_of(case), strict=True))


def test_a_damaged_image_is_left_out_when_told(tmp_path, capsys):
    source, _ = given("tfrecord", tmp_path / "in", [*IMAGES[:2], IMAGES[2][:-20], *IMAGES[3:]])
    run(*source, OPS, f"--output={tmp_path}/x.npz", "--on_bad_image=skip")
    said = capsys.readouterr()
    assert "Left out by --on_bad_image=skip" in said.err
    assert said.out.startswith("6 images, ")
    np.testing.assert_array_equal(np.load(tmp_path / "x.npz")["images"], np.delete(padded(), 2, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_is_one_line(tmp_path, kind):
    arguments = [f"--source={kind}", f"--input={tmp_path}/nowhere", f"--output={tmp_path}/x.npz"]
    assert "nowhere" in refusal(run, *arguments)


IMPOSSIBLE = [
    ([], "--input is missing"),
    (["--input={0}"], "--output is missing"),
    (["--input={0}", "--output={1}/x.npz", "--ops=resise:3"], "did you mean 'resize'"),
    (["--input={0}", "--output={1}/x.png", "--ops=layout:chw"], "CHW"),
    (["--input={0}", "--output={1}/x.tfrecord", "--output_shards=6"], "--output_shards=6"),
]


@pytest.mark.parametrize(("arguments", "said"), IMPOSSIBLE)
def test_what_cannot_be_done_is_said_and_leaves_nothing(tree, tmp_path, arguments, said):
    assert said in refusal(run, *(argument.format(tree, tmp_path) for argument in arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_one_line(tree, tmp_path, monkeypatch):
    monkeypatch.setattr("nvidia.dali.backend.GetCUDADeviceCount", lambda: 0)
    said = refusal(run, f"--input={tree}", f"--output={tmp_path}/x.png", "--device=gpu")
    assert said == "--device=gpu: DALI sees no GPU here; use --device=cpu"


def test_the_list_of_operators(capsys):
    run("--list_ops")
    assert "crop_mirror_normalize: Crops, mirrors" in capsys.readouterr().out


# --- outputs ---


def test_pictures_have_the_colours_of_their_sources_whatever_the_order_of_channels(tree, tmp_path):
    arguments = f"--input={tree}", "--ops=decode:bgr | resize:16x16"
    run(*arguments, f"--output={tmp_path}/x.npz")
    run(*arguments, f"--output={tmp_path}/out")
    array = np.load(tmp_path / "x.npz")["images"]
    picture = np.asarray(PIL.Image.open(tmp_path / "out" / "cats" / "0.png"))
    np.testing.assert_array_equal(picture, array[0][..., ::-1])
    assert picture[0, 0, 0] > 200 > picture[0, 0, 2]


@pytest.mark.parametrize(("flags_", "quality"), [([], 95), (["--jpeg_quality=30"], 30)])
def test_jpegs_of_a_quality(tree, tmp_path, flags_, quality):
    run(f"--input={tree}", f"--output={tmp_path}/out", "--image_format=jpeg", *flags_)
    expected = pillow("JPEG", pictures_on_disk.PICTURES[4], quality=quality)
    assert (tmp_path / "out/two dogs/4.jpg").read_bytes() == expected


def test_records_have_the_labels_of_their_sources(tree, tmp_path):
    run(f"--input={tree}", f"--output={tmp_path}/r.tfrecord", "--output_shards=2")
    assert opened("tfrecord", f"{tmp_path}/r-*-of-00002.tfrecord").labels.tolist() == [0, 0, 0, 1, 1]


def test_images_that_a_list_names_are_not_replaced(tree, tmp_path):
    (tmp_path / "list.txt").write_text(f"{tree}/cats/0.png")
    for target in (tree / "cats", tree / "cats/0.png"):
        flags_ = [f"--input={tmp_path}/list.txt", f"--output={target}", "--overwrite"]
        assert "the input" in refusal(run, "--source=list", *flags_)


def test_images_of_unequal_sizes_do_not_fit_into_one_array(tree, tmp_path):
    said = refusal(run, f"--input={tree}", f"--output={tmp_path}/x.npz")
    assert said.startswith("image 0 ('cats/0.png') is uint8 48 x 64 x 3")


def test_a_message_replaces_half_a_progress_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress.Bar("decoding", 5).step()
    progress.log("stopped")
    assert re.fullmatch(
        r"\rdecoding: 0/5 .*\rdecoding: 1/5 .*\x1b\[K\r\x1b\[Kstopped\n", capsys.readouterr().err
    )


def test_sigterm_in_the_middle_of_writing_leaves_nothing(tree, tmp_path, monkeypatch):
    _, values = flag_values("tools.preprocess", f"--input={tree}", f"--output={tmp_path}/new/")
    monkeypatch.setattr(preprocess.shared_flags, "values", lambda *_: values)
    monkeypatch.setattr(outputs.Output, "encode", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            preprocess.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
