"""The training command: what it leaves behind, resuming, every flag, and what it refuses."""

import csv
import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import PIL.Image
import pytest

from common import hparams
from common.errors import UserError
from common.labels import LabelMap
from common.training import input_feed, model_metadata, run_directory, weights
from common.training import run as run_module
from common.training.input_feed import InputFeed
from common.training.optimizers import AveragedWeights
from common.training.results import Results
from common.training.watchdog import Watchdog
from tools import replay_step

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def float32_policy():
    """Runs with other precisions must not leak into the next test."""
    yield
    keras.mixed_precision.set_global_policy("float32")


def weights_of(app, path: pathlib.Path) -> dict[str, np.ndarray]:
    return {weight.path: np.asarray(weight) for weight in app.load_trained(path)[0].weights}


def assert_same_weights(app, a: pathlib.Path, b: pathlib.Path, atol: float = 0.0) -> None:
    first, second = weights_of(app, a), weights_of(app, b)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=atol, atol=atol, err_msg=name)


def rows_of(directory: pathlib.Path) -> list[dict]:
    with (directory / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_what_a_run_leaves_behind(trained, drawn):
    rows = rows_of(trained)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert [row["step"] for row in rows] == ["3", "6"]  # 12 images in batches of 4
    for row in rows:
        for name in ("loss", "class_loss", "box_loss", "l2_loss", "learning_rate", "images_per_second", "AP"):
            assert np.isfinite(float(row[name])), name
    metrics = json.loads((trained / "metrics.json").read_text())
    assert {"AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"} <= set(
        metrics
    )
    assert float(rows[-1]["AP"]) == pytest.approx(metrics["AP"], abs=1e-5)
    for name in ("first_batch.png", "loss_curves.png", "pr_curves.png"):
        assert np.asarray(PIL.Image.open(trained / name)).std() > 0
    assert list((trained / "tensorboard").glob("events*"))
    assert "--batch_size=4" in (trained / "flags.txt").read_text().splitlines()
    for name in (weights.BEST, weights.LAST):
        metadata = weights.read_metadata(trained / name)
        assert LabelMap.from_json(metadata["label_map"]).category_ids == (3, 17, 90)
        assert metadata["config"]["image_size"] == [64, 96]


def test_the_flag_file_of_a_run_repeats_it(trained, command, capfd):
    """The same command on the finished directory has nothing left to do and says what it had found."""
    metrics = command("train", f"--flagfile={trained}/flags.txt", "--init_from=gone.weights.h5")
    assert metrics == json.loads((trained / "metrics.json").read_text())
    assert "--init_from=gone.weights.h5 is not read again" in capfd.readouterr().err


@pytest.mark.parametrize("pipeline_type", ["dali_cpu", "tensorflow"])
def test_interrupted_and_resumed_equals_unbroken(
    app, tiny_train, drawn, trained, tmp_path, monkeypatch, pipeline_type
):
    unbroken = trained
    if pipeline_type == "tensorflow" and app.name == "efficientdet":
        pytest.skip("slow: yolov4 resumes the twin, and test_stop_and_resume both apps")
    if pipeline_type == "tensorflow":
        unbroken = tmp_path / "unbroken"
        tiny_train(drawn, unbroken, f"--pipeline_type={pipeline_type}")
    save_row = Results.save_row

    def save_once(self, epoch, values):
        if epoch == 2:
            raise KeyboardInterrupt
        save_row(self, epoch, values)

    broken = tmp_path / "broken"
    monkeypatch.setattr(Results, "save_row", save_once)
    with pytest.raises(KeyboardInterrupt):
        tiny_train(drawn, broken, f"--pipeline_type={pipeline_type}")
    monkeypatch.setattr(Results, "save_row", save_row)
    assert len(rows_of(broken)) == 1
    # who counts may change on the way
    tiny_train(drawn, broken, f"--pipeline_type={pipeline_type}", "--coco_backend=faster")
    assert_same_weights(app, unbroken / weights.LAST, broken / weights.LAST)
    assert (unbroken / "metrics.json").read_bytes() == (broken / "metrics.json").read_bytes()
    assert [row["epoch"] for row in rows_of(broken)] == ["1", "2"]


def test_another_run_in_the_directory_is_refused(app, trained, tiny_train, drawn, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    with pytest.raises(UserError, match=r"batch_size was 4 and is now 2.*--overwrite"):
        tiny_train(drawn, copy, "--batch_size=2")
    assert_same_weights(app, trained / weights.LAST, copy / weights.LAST)  # nothing was touched


def test_overwrite_starts_anew(tiny_train, trained, drawn, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    tiny_train(
        drawn, copy, "--batch_size=2", "--overwrite", "--epochs=1", "--steps_per_epoch=2", "--eval_every=0"
    )
    assert [row["step"] for row in rows_of(copy)] == ["2"]


def test_tfrecords_train_like_coco(app, command, drawn, tmp_path):
    """The same data in the other form; --input_type follows from the flags given."""
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools/convert.py"),
            "--from=coco",
            "--to=tfrecord",
            f"--images={drawn}/images",
            f"--input={drawn}/instances.json",
            f"--output={tmp_path}/drawn",
            "--num_shards=2",
        ],
        check=True,
        capture_output=True,
    )
    metrics = command(
        "train",
        f"--model_name={app.model_name}",
        "--image_size=64",
        f"--hparams={app.tiny}",
        "--batch_size=4",
        "--epochs=1",
        "--pipeline_type=dali_cpu",
        f"--train_file_pattern={tmp_path}/drawn*.tfrecord",
        f"--eval_file_pattern={tmp_path}/drawn*.tfrecord",
        f"--output_dir={tmp_path}/run",
    )
    assert set(metrics["per_class"]) == set(json_names(drawn))


def json_names(directory: pathlib.Path) -> list[str]:
    return [c["name"] for c in json.loads((directory / "instances.json").read_text())["categories"]]


@pytest.mark.parametrize("way", range(2))
def test_every_way_to_train_takes_steps(app, tiny_train, drawn, tmp_path, way):
    take_steps(
        tiny_train, drawn, tmp_path / "run", *(argument.format(tiny=app.tiny) for argument in app.ways[way])
    )


def test_synthetic_data_take_steps(tiny_train, drawn, tmp_path):
    synthetic = ("--pipeline_type=synthetic", "--num_classes=3")
    take_steps(tiny_train, drawn, tmp_path / "run", "--xla", *synthetic, "--learning_rate=0.01")


def take_steps(tiny_train, data: pathlib.Path, run: pathlib.Path, *arguments: str) -> None:
    tiny_train(data, run, "--epochs=1", "--steps_per_epoch=3", "--seed=3", *arguments)
    (row,) = rows_of(run)
    assert np.isfinite(float(row["loss"]))
    assert weights.read_metadata(run / weights.LAST)["epoch"] == 1


def test_freeze_keeps_the_named_layers_still(app, tiny_train, trained, drawn, tmp_path):
    run = tmp_path / "run"
    tiny_train(drawn, run, "--epochs=1", f"--init_from={trained}", "--freeze=^backbone", "--ema_decay=0")
    before, after = weights_of(app, weights.find(trained)), weights_of(app, run / weights.LAST)
    changed = [name for name in after if not np.array_equal(before[name], after[name])]
    same = [name for name in after if name not in changed]
    assert any("backbone" in name for name in same)
    assert changed, "nothing was trained"
    assert not [name for name in changed if "backbone" in name]  # batch-norm statistics included


def test_init_from_copies_classes_by_name(app, tiny_train, trained, drawn, tmp_path, capfd):
    """Other ids, another order, one class less and two new ones: rows follow the names."""
    data = tmp_path / "data"
    shutil.copytree(drawn, data)
    document = json.loads((data / "instances.json").read_text())
    old = {c["id"]: c["name"] for c in document["categories"]}
    first, second, third = (old[i] for i in sorted(old))
    document["categories"] = [
        {"id": 5, "name": third},
        {"id": 7, "name": "new"},
        {"id": 8, "name": first},
        {"id": 9, "name": "newer"},
    ]
    moved = {first: 8, second: 7, third: 5}
    for annotation in document["annotations"]:
        annotation["category_id"] = moved[old[annotation["category_id"]]]
    (data / "instances.json").write_text(json.dumps(document))

    run = tmp_path / "run"
    short = ["--epochs=1", "--steps_per_epoch=1", "--eval_every=0", "--learning_rate=0", "--ema_decay=0"]
    tiny_train(data, run, f"--init_from={trained}", f"--hparams={app.tiny},{app.still}", *short)
    report = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("--init_from"))
    assert "new classes: new, newer" in report
    assert (run / "init_from.txt").read_text().startswith(f"{report}\n\ntaken: ")

    before, after = weights_of(app, weights.find(trained)), weights_of(app, run / weights.LAST)
    for was, now in zip(app.class_rows(before, 3), app.class_rows(after, 4), strict=True):
        # first, second, third; now third, new, first, newer
        np.testing.assert_array_equal(now[..., 0], was[..., 2])
        np.testing.assert_array_equal(now[..., 2], was[..., 0])
        assert not np.array_equal(now[..., 1], was[..., 1])
    np.testing.assert_array_equal(app.box_bias(after, 4), app.box_bias(before, 3))


def test_overwrite_destroys_nothing_before_all_else_is_right(app, tiny_train, trained, drawn, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    with pytest.raises(UserError, match=r"nowhere"):
        tiny_train(drawn, copy, "--overwrite", "--init_from=/nowhere.weights.h5")
    assert_same_weights(app, trained / weights.LAST, copy / weights.LAST)


def test_averages_move_once_an_update(tiny_train, drawn, tmp_path, monkeypatch):
    made = []
    original = AveragedWeights.__init__

    def remember(self, *arguments):
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(AveragedWeights, "__init__", remember)
    options = ["--accumulate_steps=2", "--epochs=1", "--steps_per_epoch=6", "--eval_every=0"]
    tiny_train(drawn, tmp_path / "run", *options)
    assert int(made[0]._num_updates) == 3


def test_a_run_that_ends_without_its_last_checkpoint_fails(app, tiny_train, drawn, tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_directory, "write", write)
    with pytest.raises(UserError, match=r"last checkpoint is not in .*/run: make room"):
        tiny_train(drawn, tmp_path / "run", "--epochs=1", "--steps_per_epoch=1", "--eval_every=0")


def test_a_loader_that_cannot_save_its_place_goes_on_where_it_was(
    app, tiny_train, drawn, tmp_path, monkeypatch
):
    """As on a GPU: every epoch has a seed of its own; within one, what was trained on is read again."""
    seeds, seen = [], []
    original = input_feed.make_loader
    step_of = app.package.train.step_guard.guarded_step

    def unsaveable(*arguments, **options):
        if options["training"]:
            seeds.append(options["seed"])
        return original(*arguments, **options, checkpointing=False)

    def watched(*arguments, **options):
        step = step_of(*arguments, **options)

        def run(images, targets, asked):
            seen.append(tuple(targets["image_ids"].numpy()))
            if len(seen) == stop_at:
                raise KeyboardInterrupt
            return step(images, targets, asked)

        return run

    monkeypatch.setattr(input_feed, "make_loader", unsaveable)
    monkeypatch.setattr(app.package.train.step_guard, "guarded_step", watched)
    options = ["--epochs=2", "--steps_per_epoch=4", "--save_every=2", "--eval_every=0"]
    stop_at = None
    tiny_train(drawn, tmp_path / "unbroken", *options)
    unbroken = seen[:]
    assert len(unbroken) == 8
    assert seeds[-1] == 1  # of the second epoch
    seen.clear()
    stop_at = 8  # the last step: saved are 6 of 8
    with pytest.raises(KeyboardInterrupt):
        tiny_train(drawn, tmp_path / "broken", *options)
    assert seen == unbroken
    seen.clear()
    stop_at = None
    tiny_train(drawn, tmp_path / "broken", *options)
    assert seen == unbroken[6:]
    files = [tmp_path / name / weights.LAST for name in ("unbroken", "broken")]
    assert_same_weights(app, *files, atol=0)


def test_evaluations_within_an_epoch_are_neither_repeated_nor_lost(
    app, tiny_train, drawn, tmp_path, monkeypatch, capsys
):
    """Three epochs of 4 steps with an evaluation every 3, stopped in one, right after one and later."""
    options = ["--epochs=3", "--steps_per_epoch=4", "--eval_every_steps=3", "--eval_every=2", "--patience=9"]
    tiny_train(drawn, tmp_path / "unbroken", *options)
    rows = rows_of(tmp_path / "unbroken")
    assert [row["step"] for row in rows if row["AP"]] == [
        "3",
        "6",
        "8",
        "9",
        "12",
    ]  # 8: epoch 2; 12: the last
    assert [row["epoch"] for row in rows] == ["0.75", "1", "1.5", "2", "2.25", "3"]
    assert [row["step"] for row in rows if row["loss"]] == ["4", "8", "12"]
    assert "step 6: AP" in capsys.readouterr().err

    broken, swapped_in, beat = tmp_path / "broken", AveragedWeights.swapped_in, Watchdog.beat
    save_row = Results.save_row

    def in_evaluation(self, *arguments):
        raise KeyboardInterrupt

    def after_evaluation(self, epoch, values):
        save_row(self, epoch, values)
        if epoch == 1.5:
            raise KeyboardInterrupt

    def between_evaluations(self, doing, *, epoch=0, step=0, at_least=0.0):
        if step == 7 and doing == "training":
            raise KeyboardInterrupt
        beat(self, doing, epoch=epoch, step=step)

    for owner, name, interrupt, kept in (
        (AveragedWeights, "swapped_in", in_evaluation, []),
        (Results, "save_row", after_evaluation, ["3", "4", "6"]),
        (Watchdog, "beat", between_evaluations, ["3", "4", "6"]),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupt)
            tiny_train(drawn, broken, *options)
        assert (
            [row["step"] for row in rows_of(broken)] == kept
            if kept
            else not (broken / "results.csv").exists()
        )
    assert AveragedWeights.swapped_in is swapped_in
    tiny_train(drawn, broken, *options)
    assert_same_weights(app, tmp_path / "unbroken" / weights.LAST, broken / weights.LAST)
    assert_same_weights(app, tmp_path / "unbroken" / weights.BEST, broken / weights.BEST)
    names = ("epoch", "step", "loss", "AP")
    assert [[row[n] for n in names] for row in rows_of(broken)] == [[row[n] for n in names] for row in rows]
    states = [model_metadata.read(path / "checkpoints")["state"] for path in (broken, tmp_path / "unbroken")]
    assert states[0] == states[1]  # --patience has counted each evaluation once


@pytest.mark.gpu
def test_training_evaluation_and_resume_on_a_gpu(tiny_train, command, drawn, tmp_path):
    run = tmp_path / "run"
    tiny_train(drawn, run, "--pipeline_type=dali_gpu", "--epochs=1")
    tiny_train(drawn, run, "--pipeline_type=dali_gpu", "--epochs=2")
    assert len(rows_of(run)) == 2
    data = [f"--eval_images={drawn}/images", f"--eval_annotations={drawn}/instances.json"]
    metrics = command("eval", f"--weights={run}", "--pipeline_type=dali_gpu", *data)
    on_cpu = command("eval", f"--weights={run}", "--pipeline_type=dali_cpu", *data)
    assert metrics["AP"] == pytest.approx(on_cpu["AP"], abs=0.05)


def test_another_freeze_goes_on_from_the_last_whole_epoch(
    app, tiny_train, drawn, tmp_path, monkeypatch, capsys
):
    options = ["--epochs=2", "--steps_per_epoch=4", "--save_every=2", "--eval_every=0"]
    watchdog = run_module.Watchdog
    beat = watchdog.beat

    def stop_in_the_second_epoch(self, doing, *, epoch=0, step=0, at_least=0.0):
        if step == 7:
            raise KeyboardInterrupt
        beat(self, doing, epoch=epoch, step=step)

    monkeypatch.setattr(watchdog, "beat", stop_in_the_second_epoch)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        tiny_train(drawn, run, *options)
    monkeypatch.setattr(watchdog, "beat", beat)
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert steps == [4, 6]
    capsys.readouterr()
    tiny_train(drawn, run, *options, "--freeze=^backbone")
    said = capsys.readouterr().err
    assert "resumed after epoch 1 (step 4)" in said
    assert "with another freeze: from a whole epoch" in said
    assert [row["step"] for row in rows_of(run)] == ["4", "8"]
    with pytest.raises(UserError, match="batch_size was 4 and is now 2"):
        tiny_train(drawn, run, *options, "--freeze=^backbone", "--batch_size=2")


def test_a_diverging_run_stops_with_one_line_and_its_step_can_be_run_again(
    app, tiny_train, drawn, tmp_path, capsys
):
    run = tmp_path / "run"
    flags = ["--learning_rate=1e30", "--clip_norm=0", "--steps_per_epoch=8", "--max_skipped_steps=1"]
    with pytest.raises(
        UserError, match=r"2 steps in a row were skipped.*--learning_rate.*replay_step\.py "
    ) as error:
        tiny_train(drawn, run, *flags)
    said = capsys.readouterr().err
    assert re.search(r"step \d+ is skipped: the loss is not finite; image ids \d+", said)
    file = re.search(r"replay_step\.py (\S+)", str(error.value))[1]
    replay_step.main(file)
    report = capsys.readouterr().out
    assert "image ids" in report
    assert re.search(r"(output of layer|weight|gradient of) \S+: \d+ of \d+ numbers are not finite", report)


def test_a_bad_batch_is_skipped_and_training_goes_on(app, tiny_train, drawn, tmp_path, monkeypatch, capsys):
    """One image whose pixels are not numbers: its step is left out, all others are trained."""
    following, count = InputFeed.__next__, iter(range(100))

    def poisoned(self):
        images, targets = following(self)
        return (images * float("nan") if next(count) == 2 else images), targets

    monkeypatch.setattr(InputFeed, "__next__", poisoned)
    tiny_train(drawn, tmp_path / "run", "--epochs=1", "--steps_per_epoch=5", "--eval_every=0")
    assert "step 3 is skipped: the loss is not finite; image ids" in capsys.readouterr().err
    (row,) = rows_of(tmp_path / "run")
    assert float(row["skipped_steps"]) == 1
    assert np.isfinite(float(row["loss"]))
    assert (tmp_path / "run/skipped/step_00000003.npz").exists()


REFUSED = {
    "unknown model": (["--model_name={typo}"], "did you mean '{model}'"),
    "unknown hyper-parameter": (["--hparams=learning_rat=1"], "did you mean 'learning_rate'"),
    "no data": ([], "--train_images"),
    "missing json": (
        ["--train_images=/tmp", "--train_annotations=/nowhere/instances.json"],
        "/nowhere/instances.json",
    ),
    "glob that matches nothing": (["--train_file_pattern=/nowhere/tr*.tfrecord"], "/nowhere/tr*.tfrecord"),
    "bad image size": (["--image_size=12by3", "--pipeline_type=synthetic"], "12by3"),
    "bad freeze": (["--freeze=(", "--pipeline_type=synthetic"], "--freeze='('"),
    "freeze matches nothing": (["--freeze=xyz", "--pipeline_type=synthetic"], "matches no layer"),
    "missing weights": (["--init_from=/nowhere.h5", "--pipeline_type=synthetic"], "/nowhere.h5"),
    "freeze everything": (["--freeze=.", "--pipeline_type=synthetic"], "nothing to train"),
    "momentum that never fades": (["--hparams=momentum=1", "--pipeline_type=synthetic"], "momentum='1'"),
    "not a number": (["--learning_rate=nan", "--pipeline_type=synthetic"], "learning_rate=nan"),
    "averaging that never moves": (["--ema_decay=1", "--pipeline_type=synthetic"], "ema_decay"),
    "model in hparams": (["--hparams=model_name={model}"], "model_name"),
    "impossible setting": (["--hparams=max_instances=0"], "max_instances='0'"),
    "no GPU": (
        ["--pipeline_type=dali_gpu", "--train_images={d}", "--train_annotations={d}/x.json"],
        "x.json",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(app, command, tmp_path, case):
    arguments, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        command(
            "train",
            f"--model_name={app.model_name}",
            f"--output_dir={tmp_path}/run",
            *(argument.format(d=tmp_path, typo=app.typo, model=app.model_name) for argument in arguments),
        )
    assert message.format(model=app.model_name) in str(error.value)
    assert "\n" not in str(error.value)


def test_exit_code_and_no_traceback(app, tmp_path):
    """As the user types it, in its own process and from another directory."""
    (tmp_path / "broken.json").write_text('{"images": [{"id": 1,')
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / app.name / "train.py"),
            f"--train_images={tmp_path}",
            f"--train_annotations={tmp_path}/broken.json",
            f"--output_dir={tmp_path}/run",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "broken.json" in line
    assert done.stdout == ""


def test_a_directory_with_other_files_is_not_taken(app, command, tmp_path):
    (tmp_path / "thesis.txt").write_text("five years")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        command(
            "train", "--pipeline_type=synthetic", f"--output_dir={tmp_path}", f"--model_name={app.model_name}"
        )


def test_config_survives_the_metadata(app, trained):
    metadata = weights.read_metadata(trained / weights.BEST)
    published = app.package.config.get_config(app.model_name)
    config = hparams.from_json(type(published), metadata["config"])
    expected = hparams.override(published, f"{app.tiny},image_size=64x96,epochs=2")
    assert config == expected
    assert hash(config) == hash(expected)  # lists became tuples again
