"""`--dry_run`: YOLOv4 with real processes once, then every check against records that are wrong."""

import copy
import dataclasses
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from absl import flags

import efficientdet.train
import yolov4.train
from common import args as shared_flags
from common.errors import UserError
from tools import dry_run, dry_run_process

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = {
    "efficientdet": (
        "--hparams=fpn_cells=1,head_repeats=1,max_level=5,epochs=7",
        "--batch_size=3",
        "--compression=fp16",
    ),
    "yolov4": ("--hparams=width=0.25,optimizer=sgd", "--batch_size=6", "--accumulate_steps=2", "--epochs=40"),
}
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)


def start(app: str, *arguments: str):
    """What `python <app>/train.py ARGUMENTS` does, in this process."""
    module = {"efficientdet": efficientdet.train, "yolov4": yolov4.train}[app]
    fv = flags.FlagValues()
    module.define_flags(fv)
    fv(["train", f"--model_name={app}-nano", *TINY[app], *arguments])
    return module.start(module.Args(**shared_flags.values(fv, module.define_flags)))


def coco(drawn: pathlib.Path) -> list[str]:
    return [
        f"--{split}_{what}={drawn}/{place}"
        for split in ("train", "eval")
        for what, place in (("images", "images"), ("annotations", "instances.json"))
    ]


@pytest.fixture(scope="module")
def result(drawn_records, tmp_path_factory):
    """(the DryRun of two processes, its lines by name, the directory that it was to leave alone).

    Of YOLOv4, because it takes a minute; EfficientDet's is one of the README's commands.
    """
    directory = tmp_path_factory.mktemp("dry-run")
    temporary = directory / "temporary"
    temporary.mkdir()
    data = [f"--{split}_file_pattern={drawn_records}-*.tfrecord" for split in ("train", "eval")]
    kept, printed, report = [], [], dry_run.report
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setattr(dry_run, "report", lambda result: kept.append(result) or report(result))
        patch.setattr("builtins.print", lambda *a, **k: None if k.get("file") else printed.append(a[0]))
        start("yolov4", *data, f"--output_dir={directory}/run", "--dry_run=2")
    signal.signal(signal.SIGTERM, before)
    return kept[0], {line[8:24].strip(): line for line in printed}, directory


pytestmark = needs_horovod


def test_all_is_well_and_nothing_is_left(result):
    _, lines, directory = result
    assert list(lines) == list(dry_run.CHECKS)
    assert {line[:8].strip() for line in lines.values()} == {"ok"}
    assert [path.name for path in directory.iterdir()] == ["temporary"]
    assert not list((directory / "temporary").iterdir())


def test_the_numbers_are_those_of_the_real_flags(result):
    dry, lines, _ = result
    assert "1 an epoch x 2 ranks x 6 images = 12 of 12" in lines["steps"]
    # 12 images, 2 ranks x 6, of which 2 batches are an update
    assert "0.016 x 24 images an update / 64 = 0.006" in lines["learning rate"]
    assert "different images in an epoch" in lines["sharding"]
    assert "each image once; AP 0." in lines["evaluation"]
    values = dry.sessions[0].ranks[0]["trainable_values"]
    assert values > 50_000 and f"{values * 4 / 1e6:.1f} MB a step" in lines["weights"]


def failing(result, spoil) -> list[str]:
    """The names of the checks that fail once `spoil` has changed a copy of the records."""
    spoiled = copy.deepcopy(result[0])
    spoil(spoiled)
    return [name for name, check in dry_run.CHECKS.items() if check(spoiled)[0]]


def rank_1(result, session=0):
    return result.sessions[session].ranks[1]


def put(owner, name, value):
    """A change of a record: `owner(result)[name] = value(old)`."""

    def spoil(result):
        target = owner(result)
        target[name] = value(target[name])

    return spoil


def put_session(session, name, value):
    def spoil(result):
        target = result.sessions[session]
        setattr(target, name, value(getattr(target, name)))

    return spoil


FAULTS = {
    "a step less": (put(rank_1, "steps", lambda s: s[:-1]), ["steps"]),
    "started anew": (put(lambda r: rank_1(r, 1), "steps", lambda s: [1, *s]), ["steps"]),
    "an image twice": (put(rank_1, "image_ids", lambda i: [*i[:-1], i[0]]), ["sharding"]),
    "a schedule that forgets the ranks": (
        put(lambda r: r.sessions[0].ranks[0], "peak", lambda peak: peak / 2),
        ["learning rate"],
    ),
    "other weights": (put(lambda r: rank_1(r, 1), "weights", lambda _: "x"), ["weights"]),
    "another AP": (put(rank_1, "AP", lambda ap: ap + 0.25), ["evaluation"]),
    "no checkpoint": (put_session(1, "saved_step", lambda _: None), ["saving"]),
    "an old checkpoint": (put_session(0, "saved_step", lambda _: 1), ["saving"]),
    "no room": (put_session(1, "checkpoint_bytes", lambda _: 10**17), ["saving"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_record_fails_its_check_and_no_other(result, fault):
    spoil, names = FAULTS[fault]
    assert failing(result, lambda _: None) == []
    assert failing(result, spoil) == names


def test_a_place_that_cannot_be_written_to(result, tmp_path):
    (tmp_path / "file").write_text("")

    def spoil(result):
        result.flags = dataclasses.replace(result.flags, output_dir=f"{tmp_path}/file/run")

    assert failing(result, spoil) == ["saving"]


def test_a_failed_check_ends_in_one_line(result, capsys):
    spoiled = copy.deepcopy(result[0])
    rank_1(spoiled)["AP"] = 2.0
    with pytest.raises(UserError, match=r"^the dry run failed: evaluation \("):
        dry_run.report(spoiled)
    assert re.search(r"FAILED  evaluation      the APs are \[\[\S+, 2\.0\], ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["--model_name=efficientdet-nona"], "did you mean 'efficientdet-nano'"),
        (["--hparams=learning_rat=1"], "did you mean 'learning_rate'"),
        (["--train_images=nowhere"], "does not exist"),
        (["--batch_size=7"], "12 images, --batch_size=7 x 2 ranks"),
        (["--num_classes=2"], "--num_classes=2: the data have 3 classes"),
        (["--output_dir="], "--output_dir is missing"),
    ],
)
def test_bad_flags_are_reported_before_anything_starts(monkeypatch, drawn, tmp_path, bad, message):
    monkeypatch.setattr(dry_run, "_run_session", lambda *_: pytest.fail("it started"))
    with pytest.raises(UserError, match=re.escape(message)):
        start("efficientdet", *coco(drawn), f"--output_dir={tmp_path}/run", "--dry_run=2", *bad)
    assert not (tmp_path / "run").exists()


def test_horovod_missing(monkeypatch, drawn, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="run `make horovod`"):
        start("efficientdet", *coco(drawn), f"--output_dir={tmp_path}/run", "--dry_run=2")


def test_one_process_needs_no_horovod_and_its_problem_is_the_dry_runs(monkeypatch, drawn, tmp_path):
    """What only the model's own code finds: one line, from the process."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"^--freeze='nothing_like_it'") as raised:
        start(
            "efficientdet",
            *coco(drawn),
            f"--output_dir={tmp_path}/run",
            "--freeze=nothing_like_it",
            "--dry_run=1",
        )
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_interrupted_it_leaves_no_process_and_no_file(drawn, tmp_path):
    """SIGTERM once both ranks run: they are gone when the command is."""
    command = [
        *(sys.executable, "efficientdet/train.py", "--model_name=efficientdet-nano", *TINY["efficientdet"]),
        *(*coco(drawn), f"--output_dir={tmp_path}/run", "--dry_run=2"),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    try:
        ranks = []
        while len(ranks) < 2:
            assert process.poll() is None
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
            ranks = [child for child in children if "dry_run_process.py" in " ".join(_words(child)[1:2])]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=40) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("real", "small"),
    [((512, 512), (128, 128)), ((384, 640), (128, 224)), ((64, 96), (64, 96)), ((2048, 256), (1024, 128))],
)
def test_small_image_size(real, small):
    assert dry_run_process.small_image_size(real) == small
