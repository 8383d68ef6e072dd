"""Runs `make demo` and the README's training on two ranks, with small flags."""

import json
import pathlib
import shlex
import sys

import pytest

from tests.commands import run
from tests.pages.running import SMALL, small_model
from tests.test_readme import DEMOS, PAGES, commands, make


@pytest.mark.slow
def test_documented_horovodrun_command_trains_on_two_ranks(project):
    (command,) = [command for command in commands(PAGES["README"]) if command.startswith("horovodrun")]
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    words[0] = str(pathlib.Path(sys.executable).with_name("horovodrun"))
    result = run(*words, *SMALL, *small_model("efficientdet"), cwd=project)
    assert "on 2 replicas (horovod)" in result.stdout + result.stderr
    assert (project / "runs/two/metrics.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("target", DEMOS)
def test_make_demo_trains_evaluates_and_draws_pictures(tmp_path, target):
    flags_of_demo = "--epochs=1 --image_size=64"
    for split in ("train", "eval"):
        data = tmp_path / "data" / split
        flags_of_demo += f" --{split}_images={data}/images --{split}_annotations={data}/instances.json"
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    (run_directory / "run.json").write_text("{}")
    result = make(target, tmp_path, DEMO_IMAGES=12, DEMO_EVAL_IMAGES=6, DEMO_FLAGS=flags_of_demo)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "a run of another version: starting again" in result.stdout
    assert "AP50" in result.stdout
    assert "AP50" in json.loads((run_directory / "metrics.json").read_text())
    for picture in ("first_batch.png", "loss_curves.png", "pr_curves.png", "pictures/contact_sheet.png"):
        assert (run_directory / picture).exists(), picture
    assert len(list((run_directory / "pictures").glob("0*.png"))) == 6
