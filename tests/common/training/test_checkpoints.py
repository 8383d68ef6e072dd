import dataclasses
import errno
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.args import Args
from common.distributed.ranks import Ranks
from common.errors import OtherRankError, UserError
from common.files import TEMPORARY
from common.layers import moving_statistics
from common.training.checkpoints import Checkpoints, Identity, RunState, check_directory, claim_directory
from common.training.ema import AveragedWeights
from common.weights import model_metadata
from tests.common.thread_ranks import run_on_ranks
from tests.common.training import soak_saves
from tests.common.training.small_model import assert_same, files_end_at, make_model, values
from tests.refusal import refusal

STEPS_PER_EPOCH = 4
OPTIMIZERS = {
    "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}


class Training:
    """A small run. By default, rank r reads the numbers r, r + 100, r + 200, ...

    `identity` replaces values of the run's identity.
    """

    def __init__(
        self, directory, ranks=None, *, make_dataset=None, kind="momentum", units=6, decay=0.9, **identity
    ):
        self.ranks = ranks or Ranks()
        self.model = make_model(units)
        self.optimizer = OPTIMIZERS[kind]()
        self.optimizer.build(self.model.trainable_variables)
        self.averaged = AveragedWeights(self.model, decay)
        counter = tf.data.Dataset.range(self.ranks.rank, 10**9, 100)
        self.batches = iter(make_dataset() if make_dataset else counter)
        self._directory = directory if self.ranks.rank == 0 else None
        defaults = {"num_ranks": self.ranks.world_size, "steps_per_epoch": STEPS_PER_EPOCH, "seed": 0}
        self._identity = Identity(defaults | identity)
        self.restart()

    def restart(self):
        """Does what a new process does, but faster."""
        parts = self.ranks, self.model, self.optimizer, self.averaged
        options = {"metadata": {"flags": {"batch_size": 4}}, "identity": self._identity}
        self.checkpoints = Checkpoints(self._directory, *parts, **options)
        self.iterators, self.state = [self.batches], RunState()
        return self

    def resume(self):
        """Returns the checkpoint's step or None."""
        state = self.checkpoints.find()
        if state is None:
            return None
        self.state = state
        self.checkpoints.restore(self.state, self.iterators)
        return self.state.step

    def train_step(self):
        """Returns the step's images."""
        images = next(self.batches)
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(tf.reduce_mean((self.model(images, training=True) - 1.0) ** 2))
        self.optimizer.apply(tape.gradient(loss, self.model.trainable_variables))
        self.averaged.update()
        self.set_step(self.state.step + 1)
        return images.numpy()

    def set_step(self, step):
        self.state.step = step
        self.state.epoch, self.state.step_in_epoch = divmod(step, STEPS_PER_EPOCH)

    def set_variables(self, number):
        """Sets all variables to a number, by which a test recognizes the restored checkpoint."""
        for variable in [*self.model.weights, *self.optimizer.variables, *self.averaged.variables]:
            variable.assign(tf.cast(tf.fill(variable.shape, number), variable.dtype))
        return self

    @property
    def number(self):
        return float(self.model.weights[0].numpy().flat[0])

    def variables(self):
        return values(self.model, self.optimizer, self.averaged)

    def save_state(self):
        return self.checkpoints.save(self.state, self.iterators)

    def save(self, step, number=None):
        """Saves a step. All variables are `number`, by default the step."""
        self.set_variables(step if number is None else number).set_step(step)
        return self.save_state()


def saved_names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def fail_at_call(monkeypatch, owner, name, number):
    """After `number` calls, each call raises an I/O error. Returns a list of all calls."""
    function, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) > number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def shuffled_images():
    """Seven images in batches of three, shuffled again in each epoch."""
    numbers = tf.data.Dataset.range(7).shuffle(7, seed=5).repeat()
    return numbers.map(lambda number: tf.fill([8, 8, 3], tf.cast(number, tf.float32) / 7)).batch(3)


@pytest.mark.parametrize("kind", ["accumulating", "loss scale"])
def test_resumed_run_equals_an_uninterrupted_run_bit_for_bit(tmp_path, kind):
    uninterrupted = Training(tmp_path, make_dataset=shuffled_images, kind=kind)
    for _ in range(3):
        uninterrupted.train_step()
    options = {"seed": 7, "mosaic": True}
    uninterrupted.state.best_ap, uninterrupted.state.loader_options = 0.25, options
    assert uninterrupted.save_state()
    expected_batches = [uninterrupted.train_step() for _ in range(5)]

    resumed = Training(tmp_path, make_dataset=shuffled_images, kind=kind)
    resumed.train_step()
    assert resumed.resume() == 3
    assert resumed.state == RunState(step=3, step_in_epoch=3, best_ap=0.25, loader_options=options)
    assert_same([resumed.train_step() for _ in range(5)], expected_batches)
    assert_same(resumed.variables(), uninterrupted.variables())


def test_search_for_a_checkpoint_to_resume_returns_none_in_a_new_directory(tmp_path):
    assert Training(tmp_path).resume() is None


def test_checkpoint_directory_has_a_manifest_correct_sha256_sums_and_the_state_of_rank_0(tmp_path):
    assert Training(tmp_path).save(5)
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


# --- which checkpoints are kept, and from which one a run resumes ---


# (saved steps, steps of the checkpoints that are kept). An epoch has 4 steps.
PRUNING = {
    "numbers of 8 and 9 digits": ((7, 99_999_999, 100_000_001, 100_000_002), (100_000_001, 100_000_002)),
    "no complete epoch": ((1, 2, 3), (2, 3)),
    "older complete epoch": ((3, 4, 5, 6, 7), (4, 6, 7)),
    "complete epoch among the newest two": ((3, 4, 5, 8, 9), (8, 9)),
}


@pytest.mark.parametrize(("saved", "remaining"), PRUNING.values(), ids=PRUNING)
def test_pruning_keeps_the_newest_two_checkpoints_and_that_of_the_newest_complete_epoch(
    tmp_path, saved, remaining
):
    training = Training(tmp_path)
    for step in saved:
        assert training.save(step)
    assert saved_names(tmp_path) == [f"{step:08d}" for step in remaining]
    again = Training(tmp_path)
    assert (again.resume(), again.number) == (saved[-1], np.float32(saved[-1]))


def test_run_with_a_changed_flag_resumes_from_the_newest_complete_epoch(tmp_path, capfd):
    training = Training(tmp_path)
    for step in (4, 6, 7):
        assert training.save(step)
    capfd.readouterr()  # TensorFlow has logged its start
    changed = Training(tmp_path, seed=1)
    assert changed.resume() == changed.number == 4
    log = capfd.readouterr().err
    assert log.startswith(
        "resumed after epoch 1 (step 4)\n  changed: seed; the run continues from an epoch's end"
    )
    assert log.endswith("  the next checkpoint replaces 00000006, 00000007\n")
    assert saved_names(tmp_path) == ["00000004", "00000006", "00000007"]  # another start may still use them
    with files_end_at(1000):
        assert not changed.save(5)
    output = capfd.readouterr().err
    assert output.startswith("warning: the checkpoint of step 5 cannot be written: ")
    assert output.endswith("File too large; training continues, earlier checkpoints are intact\n")
    assert changed.save(5)
    assert saved_names(tmp_path) == ["00000004", "00000005"]
    again = Training(tmp_path, seed=1)
    assert again.resume() == 5
    assert again.save(6, number=60)
    assert (again.restart().resume(), again.number) == (6, 60)


def test_run_with_a_changed_flag_and_no_checkpoint_of_a_complete_epoch_is_refused(tmp_path):
    assert Training(tmp_path).save(3)
    with pytest.raises(UserError, match=r"has no undamaged checkpoint from an epoch's end"):
        Training(tmp_path, seed=1).resume()


def test_refused_start_with_another_number_of_ranks_leaves_run_json_as_it_is(tmp_path):
    one, two = Identity({"num_replicas": 1, "seed": 0}), Identity({"num_replicas": 2, "seed": 0})
    a = Args(output_dir=str(tmp_path))
    claim_directory(a, Ranks(), one)
    before = (tmp_path / "run.json").read_bytes()
    assert Training(tmp_path, **one.values).save(3)
    assert check_directory(a, Ranks(), two)
    claim_directory(a, Ranks(), two)
    with pytest.raises(UserError, match=r"has no undamaged checkpoint from an epoch's end"):
        Training(tmp_path, **two.values).resume()
    assert (tmp_path / "run.json").read_bytes() == before


def test_resumed_run_with_another_number_of_ranks_is_written_to_run_json(tmp_path):
    claim_directory(Args(output_dir=str(tmp_path)), Ranks(), Identity({"num_replicas": 1}))
    assert Training(tmp_path, num_replicas=1).save(4)
    assert Training(tmp_path, num_replicas=2).resume() == 4
    assert json.loads((tmp_path / "run.json").read_bytes())["num_replicas"] == 2


def test_checkpoint_saved_last_is_the_newest_even_at_an_earlier_step(tmp_path):
    training = Training(tmp_path)
    assert training.save(350) and training.save(170)
    assert training.restart().resume() == 170


# --- damage ---


DAMAGED_FILES = [
    ("state.data*", "flipped bit", r"\(state.data"),
    ("state.data*", "cut", r"\(state.data"),
    ("state.index", "cut", r"\(state.index"),
    ("rank_0.data*", "deleted", r"\("),
    ("manifest.json", "flipped bit", r"\(manifest.json"),
    ("manifest.json", "cut", r"\(manifest.json"),
    ("manifest.json", "deleted", r"\("),
    ("SHA256SUMS", "flipped bit", r"\("),
    ("SHA256SUMS", "cut", r"\("),
    ("SHA256SUMS", "deleted", r"\("),
    ("SHA256SUMS", "not text", r"\(SHA256SUMS is not text"),
]


@pytest.mark.parametrize(
    ("pattern", "damage", "message"),
    DAMAGED_FILES,
    ids=[f"{file} {damage}" for file, damage, _ in DAMAGED_FILES],
)
def test_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, capfd, pattern, damage, message):
    training = Training(tmp_path)
    assert training.save(1) and training.save(2)
    (file,) = (tmp_path / "checkpoints" / "00000002").glob(pattern)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= {"flipped bit": 4, "not text": 128}.get(damage, 0)
    file.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    if damage == "deleted":
        file.unlink()
    assert training.set_variables(0).restart().resume() == training.number == 1
    output = capfd.readouterr().err
    assert re.search(f"00000002 is damaged {message}", output)
    assert training.save(3)
    assert saved_names(tmp_path) == ["00000001", "00000003"]


def test_resuming_with_all_checkpoints_damaged_is_refused_and_changes_no_variable(tmp_path):
    training = Training(tmp_path)
    assert training.save(1) and training.save(2)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "state.index").write_bytes(b"")
    expected = training.set_variables(5).variables()
    with pytest.raises(UserError, match=r"has no undamaged checkpoint: give --overwrite"):
        training.restart().resume()
    assert_same(training.variables(), expected)


# --- checkpoints of other models and versions ---


@pytest.mark.parametrize("option", [{"units": 7}, {"kind": "accumulating"}, {"decay": 0.0}], ids=str)
def test_checkpoint_of_another_model_optimizer_or_ema_setting_is_refused(tmp_path, option):
    assert Training(tmp_path).save(1)
    with pytest.raises(UserError, match="the checkpoint of step 1 does not fit this model"):
        Training(tmp_path, **option).resume()


def test_checkpoint_of_other_library_versions_is_restored_with_a_warning(tmp_path, monkeypatch, capfd):
    training = Training(tmp_path)
    assert training.save(1)
    assert training.restart().resume() == 1
    assert "warning" not in capfd.readouterr().err
    versions = model_metadata.versions()
    assert {"tensorflow", "keras", "nvidia-dali-cuda120"} <= versions.keys()
    assert "absent" not in versions.values()
    monkeypatch.setattr(model_metadata, "versions", lambda: versions | {"keras": "9.9", "python": "3.0"})
    assert training.restart().resume() == 1
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert warnings == [f"warning: keras was {versions['keras']} and is now 9.9: results may differ"]


def test_run_state_of_a_checkpoint_with_other_fields_is_refused_with_their_names():
    fields = dataclasses.asdict(RunState()) | {"warmth": 1}
    del fields["best_ap"]
    message = refusal(RunState.from_json, fields, "checkpoint 00000031")
    assert message.startswith("checkpoint 00000031 is of another version of this project, whose state ")
    assert "differs in best_ap, warmth. Continue with that version, or give --overwrite" in message


@pytest.mark.parametrize(
    ("loader_options", "expected"),
    [({}, "global"), ({"seed": 3, "shuffle": "buffer"}, "buffer")],
    ids=["new run", "resumed run"],
)
def test_order_of_records_is_that_of_the_flag_or_else_of_the_resumed_run(loader_options, expected):
    state = RunState(loader_options=loader_options)
    assert (state.choose_shuffle("global"), state.choose_shuffle(None)) == ("global", expected)


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
    ids=["step saved before", "new step"],
)
def test_io_error_at_any_file_call_of_a_checkpoint_save_loses_only_that_checkpoint(
    tmp_path, capfd, step, places
):
    failures = 0
    training = Training(tmp_path)
    assert training.save(1) and training.save(2)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    for owner, name in places:
        for number in range(30):
            shutil.rmtree(tmp_path / "checkpoints")
            shutil.copytree(tmp_path / "copy", tmp_path / "checkpoints")
            training.restart()
            capfd.readouterr()
            with pytest.MonkeyPatch.context() as patch:
                calls = fail_at_call(patch, owner, name, number)
                is_saved = training.save(step, number=30)
            output = capfd.readouterr().err
            assert output.count("warning: ") == (len(calls) > number), (name, number, output)
            restored = training.set_variables(0).restart().resume(), training.number
            assert restored == (step, 30) if is_saved else restored in ((2, 2), (step, 30))
            if number == 0:
                assert training.save(4)
                assert training.restart().resume() == 4
            if len(calls) <= number:
                break
            failures += 1
        assert is_saved, f"{name} was called more than {number} times"
    assert failures > 3 * len(places)  # of shutil.rmtree, Python 3.11.2 sees one call less than 3.11.7


def test_file_in_place_of_the_checkpoints_directory_is_a_user_error(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"--output_dir=.*: File exists"):
        Training(tmp_path)


def test_saving_a_checkpoint_keeps_foreign_files_and_removes_unfinished_checkpoints(tmp_path):
    training = Training(tmp_path)
    assert training.save(1)
    directory = tmp_path / "checkpoints"
    shutil.copytree(directory / "00000001", directory / "00000001.bak")
    (directory / "00000001.tar.gz").write_bytes(b"packed")
    (directory / f"{TEMPORARY}1234-00000003").mkdir()
    assert training.save(2) and training.save(3) and training.save(4)
    assert training.restart().resume() == 4
    assert saved_names(tmp_path) == ["00000001.bak", "00000001.tar.gz", "00000003", "00000004"]


# --- several ranks ---


def local_variables(training):
    """Returns the variables that differ between ranks: statistics, their averages, seeds."""
    statistics = moving_statistics(training.model)
    seeds = [variable.value for variable in training.model.variables if "seed" in variable.path]
    return statistics, training.averaged.averages_of(statistics), seeds


def local_state(training):
    """Returns the values of statistics, averages and seeds, and the next number of the data."""
    numbers = [
        {float(n) for v in variables for n in v.numpy().flat} for variables in local_variables(training)
    ]
    return (*numbers, int(next(training.batches)))


def save_on_ranks(directory, world_size, step):
    """On rank r, statistics and seeds are r + 5, averages 10 (r + 5), and r + 5 batches were read."""

    def save(ranks):
        training = Training(directory, ranks).set_variables(1)
        training.checkpoints.find()
        number = ranks.rank + 5
        for variables, value in zip(local_variables(training), (number, 10 * number, number), strict=True):
            for variable in variables:
                variable.assign(tf.fill(variable.shape, tf.cast(value, variable.dtype)))
        for _ in range(number):
            next(training.batches)
        training.set_step(step)
        return training.save_state()

    assert run_on_ranks(world_size, save) == [True] * world_size


def test_each_rank_restores_its_batch_norm_statistics_seeds_and_data_position(tmp_path):
    save_on_ranks(tmp_path, 3, 2)
    assert len(list((tmp_path / "checkpoints" / "00000002").glob("rank_*"))) == 6

    def resume(ranks):
        training = Training(tmp_path, ranks)
        assert training.resume() == 2
        assert all((v.numpy() == 1).all() for v in training.model.trainable_variables)
        return local_state(training), values(training.optimizer)

    results = run_on_ranks(3, resume)
    for rank, (state, slots) in enumerate(results):
        number = rank + 5
        assert state == ({number}, {10 * number}, {number}, rank + 100 * number)
        assert_same(slots, results[0][1])


@pytest.mark.parametrize(
    ("saved_ranks", "resumed_ranks"), [(2, 3), (3, 1)], ids=["more ranks", "fewer ranks"]
)
def test_run_resumed_with_another_number_of_ranks_continues_from_a_complete_epoch(
    tmp_path, saved_ranks, resumed_ranks
):
    save_on_ranks(tmp_path, saved_ranks, 4)
    save_on_ranks(tmp_path, saved_ranks, 6)

    def resume(ranks):
        training = Training(tmp_path, ranks, steps_per_epoch=8)
        training.iterators = []
        assert training.resume() == int(training.optimizer.iterations) == 8
        assert all((v.numpy() == 1).all() for v in training.model.trainable_variables)
        return local_state(training)

    for rank, (statistics, averages, _, number) in enumerate(run_on_ranks(resumed_ranks, resume)):
        assert (statistics, averages, number) == ({5}, {50}, rank)


def test_failed_checkpoint_save_returns_false_on_all_ranks_and_is_logged_once(tmp_path, capfd):
    save_on_ranks(tmp_path, 2, 1)

    def save_twice(ranks):
        training = Training(tmp_path, ranks)
        training.resume()
        ranks.gather(None)
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 0:
                fail_at_call(patch, os, "replace", 0)
            first = training.save(2)
        return first, training.save(3)

    assert run_on_ranks(2, save_twice) == [(False, True)] * 2
    assert capfd.readouterr().err.count("warning: the checkpoint of step 2 cannot be written") == 1
    assert saved_names(tmp_path) == ["00000001", "00000003"]


def test_checkpoint_that_rank_0_cannot_read_ends_all_ranks(tmp_path):
    save_on_ranks(tmp_path, 2, 1)

    def resume(ranks):
        training = Training(tmp_path, ranks, units=7)
        with pytest.raises(UserError, match="does not fit this model") as raised:
            training.resume()
        return type(raised.value)

    assert run_on_ranks(2, resume) == [UserError, OtherRankError]


# --- kill -9 and full disks ---


def save_until_killed(directory, function, number, pipe):
    """Kills this process after `number` calls of a function of os."""
    subject = soak_saves.Subject(directory, units=9)
    subject.restore()
    original, num_calls = getattr(os, function), 0

    def call(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls > number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, function, call)
    subject.state.best_ap = 0.5
    pipe.send(subject.save())


@pytest.mark.parametrize("function", ["replace", pytest.param("fsync", marks=pytest.mark.slow), "rmdir"])
def test_kill_at_any_file_call_of_a_checkpoint_save_leaves_an_intact_checkpoint_of_the_step(
    tmp_path, function
):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.common.training.soak_saves"])
    for number in range(20):
        shutil.rmtree(tmp_path)
        subject = soak_saves.Subject(tmp_path, units=9)
        subject.step()
        assert subject.save()
        receiver, sender = context.Pipe()
        process = context.Process(target=save_until_killed, args=(tmp_path, function, number, sender))
        process.start()
        sender.close()
        process.join()
        state = soak_saves.Subject(tmp_path, units=9).checkpoints.find()
        assert state.step == 1
        assert set(saved_names(tmp_path)) <= {"00000001", "00000001.2"}
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0 and receiver.recv() and state.best_ap == 0.5
    assert saved_names(tmp_path) == ["00000001", "00000001.2"]
    assert number >= 1


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_finished_checkpoint(tmp_path):
    lines = soak_saves.kill_saves(tmp_path, rounds=5, seed=1)
    assert sum("killed in a save" in line for line in lines) >= 1


@pytest.mark.slow
def test_disk_that_fills_up_during_a_checkpoint_save_keeps_earlier_checkpoints(tmp_path):
    lines = soak_saves.fill_disks(tmp_path, rounds=5, seed=1)
    if lines is None:
        pytest.skip("this user may not mount a disk in memory")
    assert len(lines) == 5
