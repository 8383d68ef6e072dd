"""The examples run and assert what they claim; test_readme.py runs the tutorial by its command."""

import importlib.util
import sys
import types

import numpy as np
import PIL.Image
from absl import flags

from examples import preprocess_dlpack, preprocess_tutorial
from tests.commands import run
from tests.refusal import refusal


def test_the_tutorial_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(output_dir=f"{tmp_path}/new"))
    preprocess_tutorial.main()
    assert {line[0] for line in capsys.readouterr().out.splitlines()} == set("1234567")
    assert np.load(tmp_path / "new" / "images.npz")["images"].shape == (24, 64, 48, 3)
    assert PIL.Image.open(tmp_path / "new" / "sheet.png").width == 1280
    assert len(list((tmp_path / "new" / "records").glob("*.tfrecord.idx"))) == 2


def test_tensors_are_handed_over_where_they_lie(capsys):
    preprocess_dlpack.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["NumPy", "TensorFlow", "DALI"]


def test_pytorch_gets_the_same_batches_or_is_missed_in_one_clear_line():
    if importlib.util.find_spec("torch"):
        said = run(sys.executable, "examples/preprocess_pytorch.py").stdout
        assert "batches of [8, 8, 5]" in said and "all 21 images the same" in said
    else:
        from examples import preprocess_pytorch  # not above: PyTorch wants to be first to import Triton

        said = refusal(preprocess_pytorch.main)
        assert "needs PyTorch" in said and "pip install torch" in said
