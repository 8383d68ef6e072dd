import errno
import itertools
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.errors import OtherRankError, UserError
from common.files import TEMPORARY
from common.layers import moving_statistics
from common.training.checkpoints import Checkpoints, RunState
from common.training.ema import AveragedWeights
from common.training.run_directory import Identity
from common.weights import model_metadata
from tests.common.thread_ranks import run_on_ranks
from tests.common.training import soak_saves
from tests.common.training.small_model import assert_same, files_end_at, make_model, values

OPTIMIZERS = {
    "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}


def fail_at_call(monkeypatch, owner, name, number):
    """After `number` calls, each call raises an I/O error. Returns a list of all calls."""
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) > number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def shuffled_images():
    """Seven images in batches of three, shuffled again in each epoch."""
    numbers = tf.data.Dataset.range(7).shuffle(7, seed=5).repeat()
    return numbers.map(lambda number: tf.fill([8, 8, 3], tf.cast(number, tf.float32) / 7)).batch(3)


class Training:
    """A small run. By default, rank r reads the numbers r, r + 100, r + 200, ..."""

    def __init__(
        self, directory, make_dataset=None, *, kind="momentum", units=6, decay=0.9, ranks=None, metadata=None
    ):
        self.ranks = ranks or Ranks()
        self.model = make_model(units)
        self.optimizer = OPTIMIZERS[kind]()
        self.optimizer.build(self.model.trainable_variables)
        self.averaged = AveragedWeights(self.model, decay)
        counter = tf.data.Dataset.range(self.ranks.rank, 10**9, 100)
        self.batches = iter(make_dataset() if make_dataset else counter)
        self._directory, self._metadata = directory, metadata or {}
        self.start()

    def start(self, identity=None):
        """Like a new process, but faster."""
        directory = self._directory if self.ranks.rank == 0 else None
        parts = self.ranks, self.model, self.optimizer, self.averaged
        identity = identity or Identity({"num_ranks": self.ranks.world_size, "steps_per_epoch": 4})
        self.checkpoints = Checkpoints(directory, *parts, metadata=self._metadata, identity=identity)
        self.iterators, self.state = [self.batches], RunState()
        return self

    def save_now(self):
        return self.checkpoints.save(self.state, self.iterators)

    def resume(self, boundary=False):
        """Returns the checkpoint's step or None."""
        if boundary:
            self.start(Identity({"num_ranks": 1, "steps_per_epoch": 4, "seed": "now"}))
            self.checkpoints._metadata["identity"] = {"num_ranks": 1, "steps_per_epoch": 4}
        state = self.checkpoints.find()
        if state is None:
            return None
        self.state = state
        self.checkpoints.restore(self.state, self.iterators)
        return self.state.step

    def step(self):
        images = next(self.batches)
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(tf.reduce_mean((self.model(images, training=True) - 1.0) ** 2))
        self.optimizer.apply(tape.gradient(loss, self.model.trainable_variables))
        self.averaged.update()
        self.go_to(self.state.step + 1)
        return images.numpy()

    def go_to(self, step, step_in_epoch=None):
        self.state.step, self.state.epoch = step, step // 4
        self.state.step_in_epoch = step % 4 if step_in_epoch is None else step_in_epoch
        return self

    def set_all(self, number):
        """A test recognizes the restored checkpoint by `number`."""
        for variable in [*self.model.weights, *self.optimizer.variables, *self.averaged.variables]:
            variable.assign(tf.cast(tf.fill(variable.shape, number), variable.dtype))
        return self

    def save(self, step, step_in_epoch=None):
        return self.set_all(step).go_to(step, step_in_epoch).save_now()

    @property
    def number(self):
        return float(self.model.weights[0].numpy().flat[0])

    def everything(self):
        return values(self.model, self.optimizer, self.averaged)


def steps(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.mark.parametrize("kind", ["accumulating", "loss scale"])
def test_resumed_run_equals_the_unbroken_run_bit_for_bit(tmp_path, kind):
    through = Training(tmp_path, shuffled_images, kind=kind)
    for _ in range(3):
        through.step()
    through.state.best_ap, through.state.loader_options = 0.25, {"seed": 7, "mosaic": True}
    assert through.save_now()
    expected_batches = [through.step() for _ in range(5)]

    resumed = Training(tmp_path, shuffled_images, kind=kind)
    resumed.step()
    assert resumed.resume() == 3
    options = {"seed": 7, "mosaic": True}
    assert resumed.state == RunState(step=3, step_in_epoch=3, best_ap=0.25, loader_options=options)
    assert_same([resumed.step() for _ in range(5)], expected_batches)
    assert_same(resumed.everything(), through.everything())


def test_find_without_a_checkpoint_returns_none(tmp_path):
    assert Training(tmp_path).resume() is Training(tmp_path).resume(boundary=True) is None


# --- which checkpoints stay, and which is found ---


# (saved steps, checkpoints that stay). An epoch has 4 steps.
SAVED = [
    ((7, 99_999_999, 100_000_001, 100_000_002), (100_000_001, 100_000_002)),
    ((1, 2, 3), (2, 3)),
    ((3, 4, 5, 6, 7), (4, 6, 7)),
    ((3, 4, 5, 8, 9), (8, 9)),  # step 8 ends an epoch and is one of the two newest
]


@pytest.mark.parametrize(("saved", "staying"), SAVED)
def test_pruning_keeps_the_newest_two_and_the_newest_of_a_whole_epoch(tmp_path, saved, staying):
    training = Training(tmp_path)
    for step in saved:
        assert training.save(step)
    assert steps(tmp_path) == [f"{step:08d}" for step in staying]
    again = Training(tmp_path)
    assert (again.resume(), again.number) == (saved[-1], np.float32(saved[-1]))
    boundaries = [step for step in staying if step % 4 == 0]
    if boundaries:
        assert again.resume(boundary=True) == again.number == max(boundaries)
    else:
        with pytest.raises(UserError, match=r"has no undamaged checkpoint from an epoch's end"):
            again.resume(boundary=True)


def test_resuming_from_a_whole_epoch_replaces_newer_checkpoints_at_the_next_save(tmp_path, capfd):
    first = Training(tmp_path)
    for step in (4, 6, 7):
        assert first.save(step)
    back = Training(tmp_path)
    assert back.resume(boundary=True) == 4
    log = capfd.readouterr().err
    assert log.startswith(
        "resumed after epoch 1 (step 4)\n  changed: seed; the run continues from an epoch's end"
    )
    assert log.endswith("  the next checkpoint replaces 00000006, 00000007\n")
    assert steps(tmp_path) == ["00000004", "00000006", "00000007"]  # another start may still use them
    with files_end_at(1000):
        assert not back.save(5)
    output = capfd.readouterr().err
    assert output.startswith("warning: the checkpoint of step 5 cannot be written: ")
    assert output.endswith("File too large; training continues, earlier checkpoints are intact\n")
    assert back.save(5)
    assert steps(tmp_path) == ["00000004", "00000005"]
    again = Training(tmp_path)
    assert again.resume() == 5
    assert again.set_all(60).go_to(6).save_now()
    assert (again.start().resume(), again.number) == (6, 60)


def test_checkpoint_saved_last_is_the_newest_at_any_step(tmp_path):
    training = Training(tmp_path)
    for step in (350, 170):
        assert training.save(step, step_in_epoch=1)
    assert training.start().resume() == 170


# --- damage ---


DAMAGE = [
    *itertools.product(("state.data*", "manifest.json", "SHA256SUMS"), ("bit", "cut", "lost")),
    ("state.index", "cut"),
    ("rank_0.data*", "lost"),
    ("SHA256SUMS", "no text"),
]


@pytest.mark.parametrize(("what", "how"), DAMAGE)
def test_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, capfd, what, how):
    training = Training(tmp_path)
    for step in (1, 2):
        assert training.save(step)
    (file,) = (tmp_path / "checkpoints" / "00000002").glob(what)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= {"bit": 4, "no text": 128}.get(how, 0)
    file.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    if how == "lost":
        file.unlink()
    assert training.set_all(0).start().resume() == training.number == 1
    output = capfd.readouterr().err
    assert "00000002 is damaged (" in output
    assert how == "lost" or what == "SHA256SUMS" or f"({what.rstrip('*')}" in output
    assert how != "no text" or "SHA256SUMS is not text" in output
    assert training.save(3)
    assert steps(tmp_path) == ["00000001", "00000003"]


def test_error_with_all_checkpoints_damaged_leaves_variables_unchanged(tmp_path):
    training = Training(tmp_path)
    assert training.save(1) and training.save(2)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "state.index").write_bytes(b"")
    before = training.set_all(5).everything()
    with pytest.raises(UserError, match=r"has no undamaged checkpoint: give --overwrite"):
        training.start().resume()
    assert_same(training.everything(), before)


def test_checkpoint_has_manifest_checksums_and_parts_of_ranks(tmp_path):
    assert Training(tmp_path, metadata={"flags": {"batch_size": 4}}).save(5)
    directory = tmp_path / "checkpoints" / "00000005"
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=directory, check=True)
    assert len((directory / "SHA256SUMS").read_text().splitlines()) == len(list(directory.iterdir())) - 1 == 5
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["flags"], manifest["identity"]["num_ranks"]) == ({"batch_size": 4}, 1)
    assert manifest["state"]["step"] == 5 and manifest["state"]["step_in_epoch"] == 1
    assert manifest["world_size"] == 1
    reader = tf.train.load_checkpoint(str(directory / "rank_0"))
    names = {name.split("/")[0] for name in reader.get_variable_to_shape_map()}
    assert names == {"iterators", "seeds", "_CHECKPOINTABLE_OBJECT_GRAPH"}


# --- checkpoints of other models and versions ---


@pytest.mark.parametrize("change", [{"units": 7}, {"kind": "accumulating"}, {"decay": 0.0}])
def test_checkpoint_of_another_model_is_refused(tmp_path, change):
    assert Training(tmp_path).save(1)
    with pytest.raises(UserError, match="the checkpoint of step 1 does not fit this model"):
        Training(tmp_path, **change).resume()


def test_checkpoint_of_other_library_versions_is_restored_with_a_warning(tmp_path, monkeypatch, capfd):
    training = Training(tmp_path)
    assert training.save(1)
    assert training.start().resume() == 1
    assert "warning" not in capfd.readouterr().err
    now = model_metadata.versions()
    assert {"tensorflow", "keras", "nvidia-dali-cuda120"} <= now.keys() and "absent" not in now.values()
    monkeypatch.setattr(model_metadata, "versions", lambda: now | {"keras": "9.9", "python": "3.0"})
    assert training.start().resume() == 1
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert warnings == [f"warning: keras was {now['keras']} and is now 9.9: results may differ"]


# --- failing disks ---

CALLS = {  # no os.scandir: how often pathlib and shutil call it depends on Python's version
    os: ("mkdir", "open", "fsync", "replace"),
    shutil: ("rmtree",),
    pathlib.Path: ("iterdir", "open", "write_bytes", "write_text"),
}
PLACES = [(owner, name) for owner, names in CALLS.items() for name in names]


@pytest.mark.parametrize(
    ("step", "places"),
    [(2, [(os, "replace"), (os, "fsync"), (shutil, "rmtree")]), (3, PLACES)],
    ids=["a step once more", "a new step"],
)
def test_io_error_at_any_call_of_a_save_loses_only_that_save(tmp_path, capfd, step, places):
    failed = 0
    training = Training(tmp_path)
    assert training.save(1) and training.save(2)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "saved before")
    for owner, name in places:
        for number in range(30):
            shutil.rmtree(tmp_path / "checkpoints")
            shutil.copytree(tmp_path / "saved before", tmp_path / "checkpoints")
            training.start()
            capfd.readouterr()
            with pytest.MonkeyPatch.context() as patch:
                calls = fail_at_call(patch, owner, name, number)
                worked = training.set_all(30).go_to(step).save_now()
            output = capfd.readouterr().err
            assert output.count("warning: ") == (len(calls) > number), (name, number, output)
            restored = training.set_all(0).start().resume(), training.number
            assert restored == (step, 30) if worked else restored in ((2, 2), (step, 30))
            if number == 0:
                assert training.save(4)
                assert training.start().resume() == 4
            if len(calls) <= number:
                break
            failed += 1
        assert worked, f"{name} was called more than {number} times"
    assert failed > 3 * len(places)  # of shutil.rmtree, Python 3.11.2 sees one call less than 3.11.7


def test_unusable_directory_is_a_user_error(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"--output_dir=.*: File exists"):
        Training(tmp_path)


def test_saving_keeps_foreign_files_and_removes_unfinished_saves(tmp_path):
    training = Training(tmp_path)
    assert training.save(1)
    directory = tmp_path / "checkpoints"
    shutil.copytree(directory / "00000001", directory / "00000001.bak")
    (directory / "00000001.tar.gz").write_bytes(b"packed")
    (directory / f"{TEMPORARY}1234-00000003").mkdir()
    assert training.save(2) and training.save(3) and training.save(4)
    assert training.start().resume() == 4
    assert steps(tmp_path) == ["00000001.bak", "00000001.tar.gz", "00000003", "00000004"]


# --- several ranks ---


def see_own_images(training):
    """Gives each rank its own statistics, averages, seeds and position in the data."""
    training.set_all(1)
    number = training.ranks.rank + 5
    statistics = moving_statistics(training.model)
    seeds = [v for v in training.model.variables if "seed" in v.path]
    averages = training.averaged.averages_of(statistics)
    for variables, value in ((statistics, number), (averages, 10 * number), (seeds, number)):
        for variable in variables:
            variable.assign(tf.fill(variable.shape, tf.cast(value, variable.dtype)))
    for _ in range(number):
        next(training.batches)


def own_things(training):
    statistics = moving_statistics(training.model)
    variables = [*statistics, *training.averaged.averages_of(statistics)]
    seeds = [v for v in training.model.variables if "seed" in v.path]
    return {
        "statistics": sorted({float(v) for variable in variables for v in variable.numpy().flat}),
        "seed": {int(v) for seed in seeds for v in np.asarray(seed).flat},
        "next": int(next(training.batches)),
    }


def save_on(directory, world_size, step):
    def save(ranks):
        training = Training(directory, ranks=ranks)
        training.checkpoints.find()
        see_own_images(training)
        return training.go_to(step).save_now()

    assert run_on_ranks(world_size, save) == [True] * world_size


def test_each_rank_restores_its_own_statistics_seeds_and_data_position(tmp_path):
    save_on(tmp_path, 3, 2)
    assert len(list((tmp_path / "checkpoints" / "00000002").glob("rank_*"))) == 6

    def resume(ranks):
        training = Training(tmp_path, ranks=ranks)
        assert training.resume() == 2
        assert all((v.numpy() == 1).all() for v in training.model.trainable_variables)
        return own_things(training), values(training.optimizer)

    results = run_on_ranks(3, resume)
    for rank, (own, slots) in enumerate(results):
        number = rank + 5
        expected = {"statistics": [number, 10 * number], "seed": {number}, "next": rank + 100 * number}
        assert own == expected
        assert_same(slots, results[0][1])


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1)])
def test_another_number_of_ranks_resumes_from_a_whole_epoch(tmp_path, before, now):
    save_on(tmp_path, before, 4)
    save_on(tmp_path, before, 6)

    def resume(ranks):
        training = Training(tmp_path, ranks=ranks)
        training.iterators = []
        assert training.resume() == 4
        assert int(training.optimizer.iterations) == 4
        assert all((v.numpy() == 1).all() for v in training.model.trainable_variables)
        return own_things(training)

    for rank, own in enumerate(run_on_ranks(now, resume)):
        assert own["statistics"] == [5, 50]
        assert own["next"] == rank


def test_failed_save_is_known_to_all_ranks_and_logged_once(tmp_path, capfd):
    save_on(tmp_path, 2, 1)

    def fail(ranks):
        training = Training(tmp_path, ranks=ranks)
        training.resume()
        ranks.gather(None)
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 0:
                fail_at_call(patch, os, "replace", 0)
            first = training.go_to(2).save_now()
        return first, training.go_to(3).save_now()

    assert run_on_ranks(2, fail) == [(False, True)] * 2
    assert capfd.readouterr().err.count("warning: the checkpoint of step 2 cannot be written") == 1
    assert steps(tmp_path) == ["00000001", "00000003"]


def test_checkpoint_that_rank_0_cannot_read_ends_all_ranks(tmp_path):
    save_on(tmp_path, 2, 1)

    def resume(ranks):
        training = Training(tmp_path, ranks=ranks, units=7)
        with pytest.raises(UserError, match="does not fit this model") as raised:
            training.resume()
        return type(raised.value)

    assert run_on_ranks(2, resume) == [UserError, OtherRankError]


# --- kill -9 and full disks ---


def _die_at_call(directory, function, number, pipe):
    """Kills this process at call `number` of a function of os."""
    subject = soak_saves.Subject(directory, units=9)
    subject.restore()
    real, left = getattr(os, function), number

    def dying(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, function, dying)
    subject.state.best_ap = 0.5
    pipe.send(subject.save())


@pytest.mark.parametrize("function", ["replace", pytest.param("fsync", marks=pytest.mark.slow), "rmdir"])
def test_kill_at_any_call_of_a_save_leaves_a_checkpoint_of_the_step(tmp_path, function):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.common.training.soak_saves"])
    for number in range(20):
        shutil.rmtree(tmp_path)
        subject = soak_saves.Subject(tmp_path, units=9)
        subject.step()
        assert subject.save()
        here, there = context.Pipe()
        victim = context.Process(target=_die_at_call, args=(tmp_path, function, number, there))
        victim.start()
        there.close()
        victim.join()
        again = soak_saves.Subject(tmp_path, units=9)
        state = again.checkpoints.find()
        assert state.step == 1
        assert set(steps(tmp_path)) <= {"00000001", "00000001.2"}
        if victim.exitcode == 0:
            break
        assert victim.exitcode == -signal.SIGKILL
    assert victim.exitcode == 0 and here.recv() and state.best_ap == 0.5
    assert steps(tmp_path) == ["00000001", "00000001.2"]
    assert number >= 1


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_finished_save(tmp_path):
    lines = soak_saves.kills(tmp_path, rounds=5, seed=1)
    assert sum("killed in a save" in line for line in lines) >= 1


@pytest.mark.slow
def test_disk_that_fills_during_a_save_keeps_earlier_checkpoints(tmp_path):
    lines = soak_saves.full_disks(tmp_path, rounds=5, seed=1)
    if lines is None:
        pytest.skip("this user may not mount a disk in memory")
    assert len(lines) == 5
