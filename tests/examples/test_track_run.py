"""Tests track_run.py with MLflow's store of files and with W&B offline, which `make trackers` installs."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from examples.track_run import rows_of
from tests.commands import run
from tests.conftest import ROOT

PYTHON = ROOT / ".venv/trackers/bin/python"
SCRIPT = ROOT / "examples/track_run.py"
TABLE = "epoch,step,loss,AP\n0.5,5,4,0.25\n1,10,3,\n2,20,2.5,0.75\n"
METRICS = {"loss": [(5, 4.0), (10, 3.0), (20, 2.5)], "AP": [(5, 0.25), (20, 0.75)]}
# Prints the rows of the file of an offline run as json. The file is a LevelDB log after a header of 7 bytes:
# blocks of 32 KiB of parts with CRC (4 bytes), length (2), and kind (1: whole, 2: first, 3: middle, 4: last).
READ_WANDB = """
import json, pathlib, sys
from wandb.proto.wandb_internal_pb2 import Record
content, offset, parts = pathlib.Path(sys.argv[1]).read_bytes(), 7, b""
while offset + 7 < len(content):
    if 2**15 - offset % 2**15 < 7:
        offset += 2**15 - offset % 2**15
    length, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
    parts += content[offset + 7 : offset + 7 + length]
    offset += 7 + length
    if kind in (1, 4):
        record, parts = Record.FromString(parts), b""
        if items := record.history.item:
            print(json.dumps({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}))
"""


@pytest.fixture
def finished(tmp_path):
    """A run directory of two epochs."""
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "flags.txt").write_text("--epochs=2\n--hparams=a=1,b=2\n")
    (directory / "results.csv").write_text(TABLE)
    shutil.copy(ROOT / "docs/preprocess.jpg", directory / "loss_curves.png")  # the format is recognised
    return directory


def test_rows_of_a_running_training_are_sent_once_each_until_its_last_epoch(finished):
    table, lines = finished / "results.csv", TABLE.splitlines(True)
    table.unlink()

    def train():
        for count in range(1, 5):
            time.sleep(0.05)
            table.write_text("".join(lines[:count]))

    thread = threading.Thread(target=train)
    thread.start()
    rows = list(rows_of(finished, 2.0, 0.01))
    thread.join()
    assert [(step, metrics.get("AP")) for step, metrics, _ in rows] == [(5, 0.25), (10, None), (20, 0.75)]
    assert [file.name for file in rows[-1][2]] == ["loss_curves.png"]
    table.write_text("".join(lines[:3]))
    assert [step for step, *_ in rows_of(finished, 2.0, 0.0)] == [5, 10]  # without --follow


def test_directory_that_is_not_a_run_is_refused_in_one_line(tmp_path):
    words = [sys.executable, SCRIPT, f"--run={tmp_path}", "--to=mlflow"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 1
    assert re.fullmatch(r"error: .*No such file or directory: .*flags\.txt'\n", result.stderr)


def test_tracker_that_is_not_installed_is_an_error_that_names_the_command_for_it(finished, tmp_path):
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
    words = ["env", f"PYTHONPATH={tmp_path}", sys.executable, SCRIPT, f"--run={finished}", "--to=wandb"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 1
    assert re.fullmatch(r"error: No module named 'wandb'\. Run `make trackers`, .*\n", result.stderr)


def send(finished, tmp_path, to, **variables):
    if not PYTHON.exists():
        pytest.skip("no MLflow and W&B: make trackers")
    words = [PYTHON, SCRIPT, f"--run={finished}", f"--to={to}", "--follow"]
    run("env", *(f"{name}={value}" for name, value in variables.items()), *words, cwd=tmp_path)


@pytest.mark.slow
def test_mlflow_gets_flags_metrics_and_pictures_of_a_run(finished, tmp_path):
    send(finished, tmp_path, "mlflow", MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_TRACKING_URI="mlruns")
    (directory,) = (path.parent for path in tmp_path.glob("mlruns/0/*/metrics"))
    for name, values in METRICS.items():
        lines = [line.split() for line in (directory / "metrics" / name).read_text().splitlines()]
        assert [(int(step), float(value)) for _, value, step in lines] == values
    assert (directory / "params/hparams").read_text() == "a=1,b=2"
    assert (directory / "artifacts/loss_curves.png").read_bytes() == (
        finished / "loss_curves.png"
    ).read_bytes()
    assert "run_name: mine" in (directory / "meta.yaml").read_text()


@pytest.mark.slow
def test_wandb_gets_metrics_and_pictures_of_a_run_offline(finished, tmp_path):
    send(finished, tmp_path, "wandb", WANDB_MODE="offline")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = [json.loads(line) for line in run(PYTHON, "-c", READ_WANDB, file).stdout.splitlines()]
    for name, values in METRICS.items():
        assert [(row["_step"], row[name]) for row in rows if name in row] == values
    assert {file.name[:11] for file in tmp_path.glob("wandb/*/files/media/images/*")} == {"loss_curves"}
