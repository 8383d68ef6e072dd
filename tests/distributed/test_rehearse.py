"""`--dry_run`: both apps with real processes once, then every check against facts that are wrong."""

import copy
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from absl import flags

import efficientdet.optimization
import efficientdet.train
import yolov4.train
from common import args as shared_flags
from common.errors import UserError
from tools import dry_run, dry_run_checks

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = {
    "efficientdet": (
        "--hparams=fpn_cells=1,head_repeats=1,max_level=5,epochs=7",
        "--batch_size=3",
        "--compression=fp16",
    ),
    "yolov4": ("--hparams=width=0.25,optimizer=sgd", "--batch_size=6", "--accumulate_steps=2", "--epochs=40"),
}
NAMES = [
    "ranks",
    "steps",
    "sharding",
    "learning rate",
    "weights",
    "gradients",
    "evaluation",
    "saving",
    "resume",
]

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)


def start(app: str, *arguments: str):
    """What `python <app>/train.py ARGUMENTS` does, in this process."""
    module = {"efficientdet": efficientdet.train, "yolov4": yolov4.train}[app]
    fv = flags.FlagValues()
    module.define_flags(fv)
    fv(["train", f"--model_name={app}-nano", *TINY[app], *arguments])
    return module.start(shared_flags.values(fv, module.define_flags))


def coco(drawn: pathlib.Path) -> list[str]:
    return [
        f"--{split}_{what}={drawn}/{place}"
        for split in ("train", "eval")
        for what, place in (("images", "images"), ("annotations", "instances.json"))
    ]


@pytest.fixture(scope="module")
def rehearsed(drawn_records, tmp_path_factory):
    """(the Rehearsal of two processes, its table, the directory that it was to leave alone).

    Of YOLOv4, because it takes a minute; EfficientDet's is one of the README's commands.
    """
    directory = tmp_path_factory.mktemp("rehearsed")
    temporary = directory / "temporary"
    temporary.mkdir()
    data = [f"--{split}_file_pattern={drawn_records}-*.tfrecord" for split in ("train", "eval")]
    kept, printed = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        all_checks = dry_run_checks.all_checks
        patch.setattr(dry_run_checks, "all_checks", lambda r: kept.append(r) or all_checks(r))
        patch.setattr("builtins.print", lambda *a, **k: None if k.get("file") else printed.append(a[0]))
        start("yolov4", *data, f"--output_dir={directory}/run", "--dry_run=2")
    (table,) = printed
    return kept[0], table, directory


pytestmark = needs_horovod


def test_all_is_well_and_nothing_is_left(rehearsed):
    rehearsal, table, directory = rehearsed
    lines = table.splitlines()
    assert [line[8:24].strip() for line in lines] == NAMES
    assert {line[:8].strip() for line in lines} == {"ok"}
    assert [path.name for path in directory.iterdir()] == ["temporary"]
    assert not list((directory / "temporary").iterdir())
    assert [facts.rank for facts in rehearsal.sittings[0].ranks] == [0, 1]


def test_the_numbers_are_those_of_the_real_flags(rehearsed):
    rehearsal, table, _ = rehearsed
    line = dict(zip(NAMES, table.splitlines(), strict=True))
    # 12 images, 2 ranks x 6, of which 2 batches are an update; 0.016 at 64; a tenth of 20 updates is warm-up
    assert "1 an epoch x 2 ranks x 6 images = 12 of 12, 0 images" in line["steps"]
    assert "0.016 x 24 images an update / 64 = 0.006 after 4 warm-up steps of 40" in line["learning rate"]
    assert "4 + 5 = 9 images, each on one rank; the real run: 6 to 6 a rank, 12 in all" in line["sharding"]
    assert "5 = 9 images, each once" in line["evaluation"] or "4 = 9 images, each once" in line["evaluation"]
    values = rehearsal.sittings[0].ranks[0].trainable_values
    assert values > 50_000 and f"{values * 4 / 1e6:.1f} MB a step" in line["gradients"]


def wrong(rehearsal, spoil) -> list[str]:
    """The names of the checks that fail once `spoil` has changed a copy of the facts."""
    spoiled = copy.copy(rehearsal)
    spoiled.sittings = copy.deepcopy(rehearsal.sittings)
    spoiled.given = dict(rehearsal.given)
    spoil(spoiled)
    return [check.name for check in dry_run_checks.all_checks(spoiled) if not check.passed]


def rank_1(rehearsal, sitting=0):
    return rehearsal.sittings[sitting].ranks[1]


def put(owner, name, value):
    """A change of the facts: `owner(rehearsal).name = value(old)`."""

    def spoil(rehearsal):
        target = owner(rehearsal)
        setattr(target, name, value(getattr(target, name)))

    return spoil


FAULTS = {
    "a rank on its own": (put(rank_1, "world_size", lambda _: 1), ["ranks"]),
    "a rank twice": (put(rank_1, "rank", lambda _: 0), ["ranks", "sharding"]),
    "another Keras": (put(rank_1, "versions", lambda v: v | {"keras": "2.0"}), ["ranks"]),
    "other data": (put(rank_1, "fingerprint", lambda _: "x"), ["ranks"]),
    "a step less": (put(rank_1, "steps", lambda s: [s[0] - 1, *s[1:]]), ["steps"]),
    "an epoch less": (put(rank_1, "steps", lambda s: s[:-1]), ["steps"]),
    "an image twice": (put(rank_1, "shard_ids", lambda i: [*i[:-1], i[0]]), ["sharding"]),
    "an image left out": (put(rank_1, "shard_ids", lambda i: i[:-1]), ["sharding"]),
    "an image of another rank": (put(rank_1, "trained_ids", lambda i: [[-1, *i[0]], *i[1:]]), ["sharding"]),
    "a rate of its own": (
        put(rank_1, "rates", lambda r: [(step, rate * 1.01) for step, rate in r]),
        ["learning rate"],
    ),
    "a wrong table": (
        put(lambda r: r.sittings[1], "rows", lambda rows: [*rows[:-1], rows[-1] | {"learning_rate": "1"}]),
        ["learning rate"],
    ),
    "other weights": (put(lambda r: rank_1(r, 1), "weights", lambda _: "x"), ["weights"]),
    "an image not evaluated": (
        put(lambda r: rank_1(r, 1), "evaluated", lambda e: [e[0][:-1], *e[1:]]),
        ["evaluation"],
    ),
    "evaluated by both": (
        put(rank_1, "evaluated", lambda e: [sorted([*e[0], e[0][0]]), *e[1:]]),
        ["evaluation"],
    ),
    "no evaluation": (put(rank_1, "evaluated", lambda e: e[1:]), ["evaluation"]),
    "another AP": (put(rank_1, "ap", lambda ap: ap + 0.25), ["evaluation"]),
    "no checkpoint": (put(lambda r: r.sittings[1], "manifest", lambda _: None), ["saving"]),
    "an old checkpoint": (
        put(lambda r: r.sittings[0], "manifest", lambda m: m | {"state": m["state"] | {"step": 1}}),
        ["saving"],
    ),
    "damaged weights": (
        put(lambda r: r.sittings[0].ranks[0], "loaded", lambda _: {"last.weights.h5": "it is damaged"}),
        ["saving"],
    ),
    "no room": (put(lambda r: r.sittings[1], "checkpoint_bytes", lambda _: 10**17), ["saving"]),
    "started anew": (put(lambda r: rank_1(r, 1), "first_step", lambda _: 1), ["resume"]),
    "an epoch not in the table": (put(lambda r: r.sittings[1], "rows", lambda rows: rows[1:]), ["resume"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_fact_fails_its_check_and_no_other(rehearsed, fault):
    spoil, names = FAULTS[fault]
    assert wrong(rehearsed[0], lambda rehearsal: None) == []
    assert wrong(rehearsed[0], spoil) == names


def test_a_place_that_cannot_be_written_to(rehearsed, tmp_path):
    (tmp_path / "file").write_text("")

    def spoil(rehearsal):
        rehearsal.given["output_dir"] = f"{tmp_path}/file/run"

    assert wrong(rehearsed[0], spoil) == ["saving"]


@pytest.mark.parametrize("factor", [1 / 2, 2])
def test_a_schedule_that_forgets_the_ranks(rehearsed, monkeypatch, factor):
    module = importlib.import_module(f"{rehearsed[0].app}.optimization")
    right = module.make_schedule
    monkeypatch.setattr(
        module, "make_schedule", lambda config, batch, *more: right(config, batch * factor, *more)
    )
    assert wrong(rehearsed[0], lambda rehearsal: None) == ["learning rate"]


def test_a_failed_check_ends_in_one_line(monkeypatch, drawn, tmp_path, capsys):
    failing = dry_run_checks.Check("steps", False, "rank 1 took 3 steps")
    monkeypatch.setattr(dry_run, "_sit", lambda *_: None)
    monkeypatch.setattr(dry_run_checks, "all_checks", lambda _: [failing])
    with pytest.raises(UserError, match=r"^the rehearsal failed: steps \("):
        start("efficientdet", *coco(drawn), f"--output_dir={tmp_path}/run", "--dry_run=2")
    assert "FAILED  steps           rank 1 took 3 steps\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (["--model_name=efficientdet-nona"], "did you mean 'efficientdet-nano'"),
        (["--hparams=learning_rat=1"], "did you mean 'learning_rate'"),
        (["--train_images=nowhere"], "does not exist"),
        (["--batch_size=7"], "12 images, --batch_size=7 x 2 ranks"),
        (["--num_classes=2"], "--num_classes=2: the data have 3 classes"),
        (["--output_dir="], "--output_dir is missing"),
    ],
)
def test_bad_flags_are_said_before_anything_starts(monkeypatch, drawn, tmp_path, bad, said):
    monkeypatch.setattr(dry_run, "_sit", lambda *_: pytest.fail("it started"))
    with pytest.raises(UserError, match=re.escape(said)):
        start("efficientdet", *coco(drawn), f"--output_dir={tmp_path}/run", "--dry_run=2", *bad)
    assert not (tmp_path / "run").exists()


def test_horovod_missing(monkeypatch, drawn, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="run `make horovod`"):
        start("efficientdet", *coco(drawn), f"--output_dir={tmp_path}/run", "--dry_run=2")


def test_one_process_needs_no_horovod_and_its_problem_is_the_rehearsals(monkeypatch, drawn, tmp_path):
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
    pids: list[int] = []
    try:
        while len(pids) < 2:
            assert process.poll() is None
            try:
                process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                texts = [file.read_text() for file in tmp_path.glob("rehearsal-*/sitting_1/pid_*")]
                pids = [int(text) for text in texts if text]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())
    for pid in pids:
        assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return " Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("real", "small"),
    [((512, 512), (128, 128)), ((384, 640), (128, 224)), ((64, 96), (64, 96)), ((2048, 256), (1024, 128))],
)
def test_small_image_size(real, small):
    assert dry_run.small_image_size(real) == small
