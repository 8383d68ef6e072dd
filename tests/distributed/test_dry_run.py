"""Tests `--dry_run` and dry_run_process.py."""

import contextlib
import copy
import dataclasses
import importlib.util
import io
import os
import pathlib
import re
import signal
import tempfile
import threading
import time

import psutil
import pytest

from common.errors import UserError
from tests.apps.conftest import eagerly
from tests.distributed.small_apps import TINY, parsed, training_flags
from tools import dry_run, dry_run_process

YOLOV4 = ("--model_name=yolov4-nano", f"--hparams={TINY['yolov4']}", "--image_size=64", "--batch_size=6")
YOLOV4 += ("--accumulate_steps=2", "--epochs=40")


def start(app: str, *arguments: str) -> None:
    module, a = parsed(app, *arguments)
    module.start(a)


@pytest.fixture
def efficientdet(drawn, tmp_path) -> list[str]:
    return training_flags("efficientdet", drawn, f"{tmp_path}/run", "none", batch_size=3)


def run_yolov4(records: pathlib.Path, directory: pathlib.Path, patch: pytest.MonkeyPatch):
    """Returns the DryRun, and its lines by name."""
    (directory / "temporary").mkdir()
    data = [f"--{split}_file_pattern={records}-*.tfrecord" for split in ("train", "eval")]
    kept, report, before = [], dry_run.report, signal.getsignal(signal.SIGTERM)
    patch.setattr(tempfile, "tempdir", str(directory / "temporary"))
    patch.setattr(dry_run, "report", lambda result: kept.append(result) or report(result))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        start("yolov4", *YOLOV4, *data, f"--output_dir={directory}/run", "--dry_run=1")
    signal.signal(signal.SIGTERM, before)
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("ok ", "FAILED"))]
    assert [path.name for path in directory.iterdir()] == ["temporary"]
    assert not list((directory / "temporary").glob("dry-run-*"))
    return kept[0], {line[8:24].strip(): line for line in lines}


@pytest.fixture(scope="module")
def one_process(drawn_records, tmp_path_factory):
    """It runs eagerly. tests/test_readme.py runs graphs in two processes."""

    def in_this_process(command, environment, log_file):
        dry_run_process.main(command[-1])
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "_run_processes", in_this_process)
        with eagerly():
            return run_yolov4(drawn_records, tmp_path_factory.mktemp("dry-run"), patch)


@pytest.fixture
def result(one_process):
    """Made by copying one_process. Only the ranks' image ids differ."""
    dry = copy.deepcopy(one_process[0])._replace(processes=2)
    for session in dry.sessions:
        (rank_0,) = session.ranks
        rank_0["peak"] *= 2
        session.ranks.append({**rank_0, "image_ids": [-image_id for image_id in rank_0["image_ids"]]})
    return dry


def check_lines(lines):
    assert list(lines) == list(dry_run.CHECKS)
    assert {line[:8].strip() for line in lines.values()} == {"ok"}


def test_all_is_well_and_nothing_is_left(one_process):
    dry, lines = one_process
    check_lines(lines)
    assert [len(session.ranks[0]["steps"]) for session in dry.sessions] == [4, 2]
    assert len(dry.sessions[0].ranks[0]["image_ids"]) == 4


def test_the_numbers_are_those_of_the_real_flags(result):
    problems, lines = zip(*(check(result) for check in dry_run.CHECKS.values()), strict=True)
    lines = dict(zip(dry_run.CHECKS, lines, strict=True))
    assert not any(problems)
    assert "6 on each rank, across one resume" in lines["steps"]
    assert "1 per epoch x 2 ranks x 6 images = 12 of 12" in lines["steps"]
    # a step has 2 ranks x 6 = 12 images; an update has 2 steps, so 24 images
    assert "0.032 x 24 images per update / 64 = 0.012" in lines["learning rate"]
    assert "8 different images in an epoch" in lines["sharding"]
    assert "each image evaluated once; AP 0." in lines["evaluation"]
    values = result.sessions[0].ranks[0]["trainable_values"]
    assert values > 50_000 and f"{values * 4 / 1e6:.1f} MB per step" in lines["weights"]
    result = result._replace(flags=dataclasses.replace(result.flags, compression="fp16"))
    assert f"{values * 2 / 1e6:.1f} MB per step" in dry_run.CHECKS["weights"](result)[1]


def failing(result) -> list[str]:
    return [name for name, check in dry_run.CHECKS.items() if check(result)[0]]


FAULTS = {  # name: (session, rank or None for the session itself, field, its new value, failing check)
    "a step less": (0, 1, "steps", lambda steps: steps[:-1], "steps"),
    "started anew": (1, 1, "steps", lambda steps: [1, *steps], "steps"),
    "an image twice": (0, 1, "image_ids", lambda ids: [*ids[:-1], ids[0]], "sharding"),
    "a schedule that forgets the ranks": (0, 0, "peak", lambda peak: peak / 2, "learning rate"),
    "other weights": (1, 1, "weights", lambda _: "x", "weights"),
    "another AP": (0, 1, "AP", lambda ap: ap + 0.25, "evaluation"),
    "no checkpoint": (1, None, "saved_step", lambda _: None, "saving"),
    "an old checkpoint": (0, None, "saved_step", lambda _: 1, "saving"),
    "no room": (1, None, "checkpoint_bytes", lambda _: 10**17, "saving"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_record_fails_its_check_and_no_other(result, fault):
    number, rank, name, wrong, check = FAULTS[fault]
    session = result.sessions[number]
    if rank is None:
        result.sessions[number] = session._replace(**{name: wrong(getattr(session, name))})
    else:
        session.ranks[rank][name] = wrong(session.ranks[rank][name])
    assert failing(result) == [check]


def test_a_place_that_cannot_be_written_to(result, tmp_path):
    (tmp_path / "file").write_text("")
    result = result._replace(flags=dataclasses.replace(result.flags, output_dir=f"{tmp_path}/file/run"))
    assert failing(result) == ["saving"]


def test_a_failed_check_ends_in_one_line(result, capsys):
    result.sessions[0].ranks[1]["AP"] = 2.0
    with pytest.raises(UserError, match=r"^the dry run failed: evaluation \("):
        dry_run.report(result)
    assert re.search(r"FAILED  evaluation      the APs are \[\[\S+, 2\.0\], ", capsys.readouterr().out)


BAD_FLAGS = [
    (["--train_images=nowhere"], "does not exist"),
    (["--batch_size=7"], "12 images, --batch_size=7 x 2 ranks"),
    (["--num_classes=2"], "--num_classes=2: data have 3 classes"),
    (["--output_dir="], "--output_dir is missing"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_FLAGS)
def test_bad_flags_are_reported_before_anything_starts(monkeypatch, efficientdet, tmp_path, bad, message):
    monkeypatch.setattr(dry_run, "_run_session", lambda *_: pytest.fail("it started"))
    with pytest.raises(UserError, match=re.escape(message)):
        start("efficientdet", *efficientdet, "--dry_run=2", *bad)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("processes", "message"),
    [(2, r"^--dry_run=2 needs Horovod: run `make horovod`, .*=1$"), (1, r"^--freeze='nothing_like_it'.*$")],
)
def test_one_process_needs_no_horovod_and_its_problem_is_the_dry_runs(
    monkeypatch, efficientdet, tmp_path, processes, message
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=message):
        start("efficientdet", *efficientdet, "--freeze=nothing_like_it", f"--dry_run={processes}")
    assert not list(tmp_path.iterdir())


FAILURES = [
    (1, "[0]<stderr>:x\n[1]<stderr>:error: no data\n[0]<stderr>:error: b", UserError, "^no data$"),
    (1, "x\n[1]<stderr>:Traceback (most\n[1]<stderr>:KeyError", RuntimeError, r"code 1:\n.*Traceback"),
    (-9, "a" * 400 + "b" * 499 + "c", UserError, r"^the dry run ended with exit code -9:\nb{499}c$"),
]


@pytest.mark.parametrize(("code", "text", "kind", "message"), FAILURES)
def test_a_session_that_fails_has_the_problem_of_the_rank_that_failed_first(code, text, kind, message):
    error = dry_run._failure(text, code)
    assert type(error) is kind
    assert re.search(message, str(error))


def test_interrupted_it_leaves_no_process_and_no_file(efficientdet, tmp_path, monkeypatch):
    (tmp_path / "rank").write_text(
        "import os, signal; open(f'{__file__}.{os.getpid()}', 'w'); signal.pause()"
    )
    monkeypatch.setattr(dry_run, "_PROCESS", tmp_path / "rank")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    ranks = []

    def terminate():
        while len(files := list(tmp_path.glob("rank.*"))) < 2:
            time.sleep(0.05)
        ranks.extend(psutil.Process(int(file.suffix[1:])) for file in files)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("no handler"))
    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        start("efficientdet", *efficientdet, "--dry_run=2")
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(ranks) == 2 and not psutil.wait_procs(ranks, timeout=5)[1]
    assert not list((tmp_path / "temporary").iterdir())


def test_the_small_run_differs_from_the_real_one_in_size_alone(efficientdet):
    more = ["--accumulate_steps=4", "--compression=fp16", "--strategy=horovod", "--elastic"]
    more += ["--num_threads=2", "--pipeline_type=auto", "--patience=3", "--overwrite"]
    module, a = parsed("efficientdet", *efficientdet, *more)
    config = module.get_config(a.model_name)
    two, one = (dry_run_process.small_flags(a, config, processes, 1000) for processes in (2, 1))
    height, width = dry_run_process.small_image_size(config.image_size)
    expected = {"dry_run": None, "image_size": f"{height}x{width}", "step_timeout": 600.0}
    expected |= dict.fromkeys(("batch_size", "steps_per_epoch", "accumulate_steps"), 2)
    expected |= dict.fromkeys(("eval_every", "save_every", "num_threads", "prefetch"), 1)
    expected |= {"eval_every_steps": 0, "patience": 0, "overwrite": False, "elastic": False}
    expected |= {"pipeline_type": "dali_cpu", "strategy": "horovod", "compression": "fp16"}
    assert (two, one) == (expected, expected | {"strategy": "none", "compression": "none"})


@pytest.mark.parametrize(
    ("real", "small"),
    [((512, 512), (128, 128)), ((384, 640), (128, 224)), ((64, 96), (64, 96)), ((2048, 256), (1024, 128))],
)
def test_small_image_size(real, small):
    assert dry_run_process.small_image_size(real) == small
