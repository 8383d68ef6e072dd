import contextlib
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn
from nvidia.dali.plugin import tf as dali_tf
from PIL import Image

from common import atomic, weight_files
from common.averaging import AveragedWeights
from common.checkpoints import Checkpoints
from common.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


def make_model(units=6, seed=0):
    """Convolution, batch norm and dropout: trainable weights, statistics, and random state."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(units, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def make_optimizer(model, kind="momentum"):
    optimizer = {
        "momentum": lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.1, 100), momentum=0.9
        ),
        "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    }[kind]()
    optimizer.build(model.trainable_variables)
    return optimizer


def values(*objects):
    return [np.asarray(variable) for thing in objects for variable in thing.variables]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@contextlib.contextmanager
def disk_full_after(size):
    """Every file ends at `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse_to_rename(*args):
    raise OSError(28, "No space left on device")


@pytest.fixture
def jpegs(tmp_path):
    directory = tmp_path / "jpegs" / "0"
    directory.mkdir(parents=True)
    for index in range(7):
        pixels = np.random.default_rng(index).integers(0, 256, (16, 20, 3), np.uint8)
        Image.fromarray(pixels).save(directory / f"{index}.jpg")
    return directory.parent


def dali_batches(directory):
    """Random batches of random crops: the reader's position, its shuffling and the operators' seeds count."""

    @dali.pipeline_def(batch_size=3, num_threads=2, device_id=None, seed=5, enable_checkpointing=True)
    def pipeline():
        encoded, _ = fn.readers.file(file_root=directory, random_shuffle=True, name="reader")
        images = fn.decoders.image(encoded, device="cpu")
        crops = fn.crop(
            images,
            crop=(8, 8),
            crop_pos_x=fn.random.uniform(range=(0, 1)),
            crop_pos_y=fn.random.uniform(range=(0, 1)),
        )
        return fn.cast(crops, dtype=dali.types.FLOAT) / 255

    return dali_tf.DALIDataset(
        pipeline=pipeline(),
        batch_size=3,
        output_shapes=((3, 8, 8, 3),),
        output_dtypes=(tf.float32,),
        device_id=None,
    ).prefetch(2)


class Training:
    """A run in small: model, optimizer, averaged weights, DALI data, and what is restored of them."""

    def __init__(self, directory, jpegs, kind="momentum", units=6, keep=2, decay=0.9):
        self.model = make_model(units)
        self.optimizer = make_optimizer(self.model, kind)
        self.averaged = AveragedWeights(self.model, decay)
        self.batches = iter(dali_batches(jpegs))
        self.saved = Checkpoints(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            averaged=self.averaged,
            iterator=self.batches,
            state={"epoch": 0, "step": 0, "note": None},
            keep=keep,
        )

    def step(self):
        (images,) = next(self.batches)
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(tf.reduce_mean((self.model(images, training=True) - 1.0) ** 2))
        self.optimizer.apply(tape.gradient(loss, self.model.trainable_variables))
        self.averaged.update()
        self.saved.state["step"] += 1
        return images.numpy()

    def everything(self):
        return values(self.model, self.optimizer, self.averaged)


@pytest.mark.parametrize("kind", ["momentum", "accumulating", "loss scale"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, jpegs, kind):
    through = Training(tmp_path / "run", jpegs, kind)
    for _ in range(4):
        through.step()
    through.saved.state["note"] = {"best": 0.25, "names": ["a"]}
    through.saved.save()
    expected_batches = [through.step() for _ in range(5)]

    resumed = Training(tmp_path / "run", jpegs, kind)
    resumed.step()  # whatever happened before is overwritten
    assert resumed.saved.restore_latest()
    assert resumed.saved.state == {"epoch": 0, "step": 4, "note": {"best": 0.25, "names": ["a"]}}
    assert_same([resumed.step() for _ in range(5)], expected_batches)
    assert_same(resumed.everything(), through.everything())


def test_without_a_checkpoint_nothing_is_restored(tmp_path, jpegs):
    training = Training(tmp_path, jpegs)
    before = training.everything()
    assert training.saved.restore_latest() is False
    assert_same(training.everything(), before)


def test_the_newest_checkpoints_stay_and_the_newest_is_restored(tmp_path, jpegs):
    training = Training(tmp_path, jpegs, keep=2)
    for step in (7, 99_999_999, 100_000_000, 100_000_001):  # one digit more than the names are padded to
        training.saved.state["step"] = step
        training.saved.save()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["100000000", "100000001"]
    again = Training(tmp_path, jpegs)
    again.saved.restore_latest()
    assert again.saved.state["step"] == 100_000_001
    again.saved.save()  # the same step once more
    assert Training(tmp_path, jpegs).saved.restore_latest()


@pytest.mark.parametrize(
    "damage", ["data bit", "index bit", "data cut", "index cut", "data lost", "index lost"]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, jpegs, capfd, damage):
    training = Training(tmp_path, jpegs)
    for _ in range(2):
        training.step()
        training.saved.save()
    what, how = damage.split()
    (file,) = (tmp_path / "checkpoints" / "00000002").glob(f"state.{what}*")
    content = bytearray(file.read_bytes())
    if how == "lost":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 3] ^= 4
        file.write_bytes(content)
    resumed = Training(tmp_path, jpegs)
    before = resumed.everything()
    assert resumed.saved.restore_latest()
    assert resumed.saved.state["step"] == 1
    assert "00000002 is damaged" in capfd.readouterr().err
    resumed.step()
    assert_same(resumed.everything(), training.everything())
    shutil.rmtree(tmp_path / "checkpoints" / "00000001")
    untouched = Training(tmp_path, jpegs)
    with pytest.raises(UserError, match=r"all checkpoints in .* are damaged"):
        untouched.saved.restore_latest()
    assert_same(untouched.everything(), before)


def test_the_checksums_are_those_of_sha256sum(tmp_path, jpegs):
    Training(tmp_path, jpegs).saved.save()
    directory = tmp_path / "checkpoints" / "00000000"
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=directory, check=True)
    assert len((directory / "SHA256SUMS").read_text().splitlines()) == len(list(directory.iterdir())) - 1 == 2


@pytest.mark.parametrize("change", [{"units": 7}, {"kind": "accumulating"}, {"decay": 0.0}])
def test_a_checkpoint_of_another_structure_is_refused(tmp_path, jpegs, change):
    training = Training(tmp_path, jpegs)
    training.saved.save()
    with pytest.raises(UserError, match="does not fit this model"):
        Training(tmp_path, jpegs, **change).saved.restore_latest()


def test_an_optimizer_that_is_not_built_is_refused(tmp_path):
    with pytest.raises(ValueError, match="build the optimizer first"):
        Checkpoints(tmp_path, model=make_model(), optimizer=keras.optimizers.SGD(), state={"step": 0})


@pytest.mark.parametrize("failure", ["write", "rename"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, jpegs, monkeypatch, failure):
    training = Training(tmp_path / "run", jpegs)
    training.step()
    training.saved.save()
    after_one = training.everything()
    training.step()
    if failure == "write":
        with (
            disk_full_after(1000),
            pytest.raises(OSError, match=r"00000002 cannot be written: .*File too large$"),
        ):
            training.saved.save()
    else:
        monkeypatch.setattr(os, "replace", refuse_to_rename)
        with pytest.raises(OSError, match="00000002 cannot be written: No space left on device"):
            training.saved.save()
        monkeypatch.undo()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000001"]
    resumed = Training(tmp_path / "run", jpegs)
    assert resumed.saved.restore_latest()
    assert_same(resumed.everything(), after_one)


def test_best_is_the_highest_finite_metric_and_survives_a_restart(tmp_path):
    def start():
        model = make_model()
        return Checkpoints(tmp_path, model=model, optimizer=make_optimizer(model), state={"step": 0})

    saved = start()
    metrics = [float("nan"), 0.2, 0.2, float("inf"), 0.1, float("nan"), 0.3]
    kept = [saved.save_best(metric, {"epoch": epoch}) for epoch, metric in enumerate(metrics)]
    assert kept == [False, True, False, False, False, False, True]
    assert weight_files.read_metadata(tmp_path / "best.weights.h5") == {"epoch": 6, "metric": 0.3}
    assert not start().save_best(0.25, {"epoch": 7})
    (tmp_path / "best.weights.h5").write_bytes(b"damaged")
    assert start().save_best(0.1, {"epoch": 8})
    saved.save_last({"epoch": 9})
    assert weight_files.read_metadata(tmp_path / "last.weights.h5") == {"epoch": 9}


def test_leftovers_of_a_killed_save_are_cleared_away(tmp_path):
    (tmp_path / "checkpoints" / f"{atomic.TEMPORARY}1234-00000001").mkdir(parents=True)
    model = make_model()
    Checkpoints(tmp_path, model=model, optimizer=make_optimizer(model), state={"step": 0})
    assert list((tmp_path / "checkpoints").iterdir()) == []


# --- kill -9 ---

VICTIM = """
import sys
import keras
import numpy as np
import tensorflow as tf
from common import checkpoints, weight_files

directory = sys.argv[1]
model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(1000)])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer.build(model.trainable_variables)
saved = checkpoints.Checkpoints(directory, model=model, optimizer=optimizer, state={"step": 0})
print("restored" if saved.restore_latest() else "new", saved.state["step"], flush=True)
if saved.state["step"]:
    assert all((variable.numpy() == saved.state["step"]).all() for variable in model.weights)
while True:
    saved.state["step"] += 1
    for variable in model.weights:
        variable.assign(tf.fill(variable.shape, float(saved.state["step"])))
    saved.save()
    saved.save_last({"step": saved.state["step"]})
    print("saved", saved.state["step"], flush=True)
"""


def test_a_kill_in_the_middle_of_a_save_loses_nothing_that_was_saved(tmp_path):
    """SIGKILL at arbitrary moments: the state is that of the last finished save, or of the one under way."""
    finished = 0
    rng = np.random.default_rng(0)
    for _ in range(3):
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started, step = victim.stdout.readline().split()
        assert int(step) in (finished, finished + 1), started
        for _ in range(3):
            finished = int(victim.stdout.readline().split()[1])
        time.sleep(rng.uniform(0, 0.03))
        victim.send_signal(signal.SIGKILL)
        rest, _ = victim.communicate()
        finished = max([finished, *(int(line.split()[1]) for line in rest.splitlines())])
        metadata = weight_files.read_metadata(tmp_path / "last.weights.h5")
        assert metadata["step"] in (finished, finished + 1)
        model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(1000)])
        weight_files.load(model, tmp_path / "last.weights.h5")
        assert all((variable.numpy() == metadata["step"]).all() for variable in model.weights)
