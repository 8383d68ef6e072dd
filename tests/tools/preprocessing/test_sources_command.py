"""Every source by the command line, in both APIs, against the pixels that were written; and its faults."""

import csv
import subprocess
import sys
import types

import numpy as np
import pytest
from absl import flags

from common import args as shared_flags
from common.errors import UserError
from tests.conftest import ROOT
from tests.tools.preprocessing.source_writing import COUNT, IMAGES, LABELS, WRITERS, labels_of, pixels
from tools import preprocess
from tools.preprocessing.image_source import KINDS, open_image_source
from tools.preprocessing.preprocessor import Preprocessor


def run(*arguments):
    fv = flags.FlagValues()
    preprocess.define_flags(fv)
    fv(["preprocess", *arguments])
    preprocess.preprocess(types.SimpleNamespace(**shared_flags.values(fv, preprocess.define_flags)))


def given(case, directory, images=IMAGES, labels=LABELS):
    """The flags that name a source."""
    directory.mkdir()
    kind, write = WRITERS[case]
    path, names = write(directory, images, labels)
    more = [f"--annotations={directory}/instances.json"] if kind == "coco" else []
    return [f"--source={kind}", f"--input={path}", *more], names


OPS = "--ops=pad:16x12,fill=9"  # all become 16 x 12


def padded():
    array = np.full((COUNT, 16, 12, 3), 9, np.uint8)
    for number in range(COUNT):
        image = pixels(number)
        array[number, : len(image)] = image
    return array


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize("case", WRITERS)
def test_pixels_names_and_labels(tmp_path, case, api):
    source, names = given(case, tmp_path / "in")
    output = tmp_path / "out.npz"
    run(*source, f"--api={api}", OPS, f"--output={output}", "--batch_size=3")
    np.testing.assert_array_equal(np.load(output)["images"], padded())
    with (tmp_path / "out.npz.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == list(names)
    assert [int(row["label"] or -1) for row in rows] == labels_of(case)


def test_a_damaged_image_is_left_out_when_told(tmp_path, capsys):
    source, _ = given("tfrecord", tmp_path / "in", [*IMAGES[:2], IMAGES[2][:-20], *IMAGES[3:]])
    run(*source, OPS, f"--output={tmp_path}/x.npz", "--on_bad_image=skip")
    said = capsys.readouterr()
    assert "Left out by --on_bad_image=skip" in said.err
    assert said.out.startswith("6 images, ")
    np.testing.assert_array_equal(np.load(tmp_path / "x.npz")["images"], np.delete(padded(), 2, 0))


@pytest.mark.parametrize("case", WRITERS)
def test_tensorflow_gets_the_same(tmp_path, case):
    """External samples by DALIDatasetWithInputs, all others by DALIDataset."""
    source, _ = given(case, tmp_path / "in")
    options = {flag.partition("=")[0][2:]: flag.partition("=")[2] for flag in source}
    opened = open_image_source(options.pop("source"), options.pop("input"), **options)
    work = Preprocessor(source=opened, ops="pad:16x12,fill=9", batch_size=COUNT)
    for images, labels in work.dataset().take(2):
        np.testing.assert_array_equal(images, padded())
        assert labels.numpy().tolist() == labels_of(case)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_is_one_line(tmp_path, kind):
    with pytest.raises(UserError) as caught:
        run(f"--source={kind}", f"--input={tmp_path}/nowhere", f"--output={tmp_path}/x.npz")
    assert "nowhere" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags_", "said"),
    [
        ([], "--input is missing"),
        (["--input=IN"], "--output is missing"),
        (["--input=IN", "--output=OUT.npz", "--ops=resise:3"], "did you mean 'resize'"),
        (["--input=IN", "--output=OUT.npz", "--output_shards=2"], "--output_shards does nothing for"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, flags_, said):
    given("files", tmp_path / "in")
    with pytest.raises(UserError) as caught:
        run(*(flag.replace("IN", f"{tmp_path}/in").replace("OUT", f"{tmp_path}/out") for flag in flags_))
    assert said in str(caught.value)
    assert not (tmp_path / "out.npz").exists()


def test_the_command_itself(tmp_path):
    """By a shell: results on stdout, progress on stderr, one line and exit code 1 for bad input."""
    source, _ = given("files", tmp_path / "in")
    command = [sys.executable, ROOT / "tools/preprocess.py", *source, f"--output={tmp_path}/x.npz"]
    done = subprocess.run([*command, OPS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"7 images, 7 x 16 x 12 x 3: {tmp_path}/x.npz" in done.stdout
    np.testing.assert_array_equal(np.load(tmp_path / "x.npz")["images"], padded())
    again = subprocess.run([*command, OPS], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 1
    assert "Traceback" not in again.stderr
    assert again.stderr.strip().splitlines()[-1].startswith("error: ")


def test_the_list_of_operators(capsys):
    run("--list_ops")
    assert "crop_mirror_normalize: crop, mirror" in capsys.readouterr().out
