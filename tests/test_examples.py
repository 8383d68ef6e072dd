"""Checks docs/examples.md. tests/examples/ compares the examples with the apps."""

import json
import re
import runpy
import shutil
import sys
import textwrap

import keras
import numpy as np
import pytest

from tests.commands import run
from tests.conftest import ROOT
from tests.distributed import launching
from tests.examples.standalone import source_with_small_network
from tools import synthetic

TORCH = ROOT / ".venv/torch/bin/python"
PAGE = (ROOT / "docs/examples.md").read_text()


def test_examples_page_links_every_example_file():
    links = set(re.findall(r"\]\(\.\./examples/(\w+)\.py\)", PAGE))
    assert links == {path.stem for path in ROOT.glob("examples/*.py")}


def test_pytorch_example_reports_missing_pytorch_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"^error: .*torch.*make torch.*$"):
        runpy.run_path(str(ROOT / "examples/pytorch_loader.py"))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_batches"), [(1, 4), (2, 2)])
def test_pytorch_example_trains_on_equal_shards_and_its_loss_falls_on_each_rank(
    num_ranks, num_batches, monkeypatch
):
    if not TORCH.exists():
        pytest.skip("no PyTorch: make torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}") if num_ranks > 1 else ()
    output = run(TORCH, *launcher, ROOT / "examples/pytorch_loader.py").stdout
    for rank in range(num_ranks):
        rows = re.findall(rf"rank {rank}, epoch (\d+): (\d+) batches, loss (\d+\.\d+)", output)
        assert [tuple(map(int, row[:2])) for row in rows] == [(epoch, num_batches) for epoch in range(1, 13)]
        assert float(rows[-1][2]) < 0.9 * float(rows[0][2])


@pytest.mark.slow
@pytest.mark.parametrize("app", ["efficientdet", "yolov4"])
def test_single_file_training_on_two_processes_runs_and_resumes(app, tmp_path):
    pattern = rf"^horovodrun -np 2 python examples/train_{app}\.py (.*) --output_dir=\S+$"
    (options,) = re.findall(pattern, PAGE, re.MULTILINE)
    (tmp_path / "train.py").write_text(source_with_small_network(app))
    shutil.copy(ROOT / f"examples/{app}_pipeline.py", tmp_path)

    words = [tmp_path / "train.py", *options.split(), f"--output_dir={tmp_path}"]
    result = launching.launch(2, words, timeout=250)
    assert result.returncode == 0, result.stderr
    assert "epoch 1, 2/2" in result.stdout_of(0) and "epoch 1" not in result.stdout_of(1)
    detections = json.loads((tmp_path / "detections.json").read_text())
    assert {detection["image_id"] for detection in detections} == set(range(16))  # from both processes
    assert len(json.loads((tmp_path / "metrics.json").read_text())) == 12
    result = launching.launch(2, [*words, "--epochs=2"], timeout=250)
    assert result.returncode == 0, result.stderr
    assert "epoch 2, 2/2" in result.stdout_of(0) and "epoch 1" not in result.stdout_of(0)


def test_current_dali_code_in_the_migration_tables_runs(tmp_path):
    annotations = synthetic.draw_dataset(tmp_path, num_images=8, seed=0)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile(loss="mse")
    names = {"annotations": str(annotations), "images_dir": f"{tmp_path}/images", "model": model}
    names["anchors"] = [0.0, 0.0, 0.5, 0.5, 0.3, 0.3, 1.0, 1.0]
    tables = PAGE.split("\n### ")[1:]
    graph, outside = (re.findall(r"^\|.*? \| `([^`]+)` \|", table, re.MULTILINE) for table in tables)
    outside.pop()  # the last row is for PyTorch
    body = textwrap.indent("\n".join(graph), "    ")
    imports = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
    code = [imports, "@pipeline_def", "def training_pipeline():", body, "    return outputs", *outside]
    exec("\n".join(code), names)
    assert len(graph) == 12 and names["num_images"] == 8 and names["is_dense"]
    assert names["images"].shape == (4, 64, 96, 3) and names["deltas"].shape == (4, 2, 4)
    assert np.isfinite(names["history"].history["loss"]).all()
