"""Replay files: the batch of a skipped step, taken up again elsewhere."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.errors import UserError
from common.training import results
from common.training.results import Results
from tools import replay_step
from tools.replay_step import read

ROOT = pathlib.Path(__file__).parents[2]
METADATA = {"app": "efficientdet", "num_classes": 2, "config": {"a": 1}}


def make_model():
    inputs = keras.Input((4, 4, 3))
    x = keras.layers.Conv2D(2, 3, name="conv")(inputs)
    x = keras.layers.BatchNormalization(name="bn")(x)
    return keras.Model(inputs, keras.layers.Dropout(0.5, seed=1)(x))


def loss_values(model):
    return lambda images, targets: {
        "loss": tf.reduce_mean(tf.square(model(images, training=True)) * targets["weight"]),
        "other": tf.constant(2.0),
    }


def batch(*, image=1.0, weight=1.0):
    images = tf.fill([2, 4, 4, 3], tf.constant(image, tf.float32)) * tf.constant([[[[1.0]]], [[[2.0]]]])
    return images, {"weight": tf.constant(weight, tf.float32), "image_ids": tf.constant([5, 9], tf.int64)}


def save(directory, model, step, contents):
    files = Results(directory, model, METADATA, {"epoch": 0})
    return files.save_skipped(Ranks(), step, *contents)


def test_the_file_holds_the_batch_and_the_weights(tmp_path):
    model = make_model()
    model.get_layer("bn").moving_mean.assign([3.0, 4.0])
    weights = [np.array(v.value) for v in model.variables]
    images, targets = batch()
    path = save(tmp_path, model, 12, (images, targets))
    assert path == str(tmp_path / "skipped" / "step_00000012.npz")
    found = read(path)
    assert found.metadata == {**METADATA, "step": 12, "rank": 0}
    np.testing.assert_array_equal(found.images, images)
    assert sorted(found.targets) == ["image_ids", "weight"]
    for saved, own in zip(found.weights, weights, strict=True):
        np.testing.assert_array_equal(saved, own)
    # The same loss, in another process' model, as that step had.
    expected = float(loss_values(model)(images, targets)["loss"])
    other = make_model()
    report = replay_step.replay(found, other, loss_values(other))
    assert "step 12 of rank 0, image ids 5, 9" in report
    assert f"loss = {expected:.6g}" in report
    assert "other = 2" in report
    assert "the loss is finite here; the norm of the gradients is" in report
    assert "not finite" not in report


@pytest.mark.parametrize(
    ("contents", "blamed", "not_blamed"),
    [
        ({"image": np.nan}, ["input images: 96 of 96", "output of layer conv: 16 of 16"], ["weight"]),
        ({"weight": np.inf}, ["input weight: 1 of 1", "loss = nan"], ["output of layer"]),
    ],
)
def test_it_says_where_numbers_stop_being_finite(tmp_path, contents, blamed, not_blamed):
    model = make_model()
    report = replay_step.replay(
        read(save(tmp_path, model, 1, batch(**contents))),
        model,
        loss_values(model),
    )
    assert all(text in report for text in [*blamed, "gradient of conv/kernel"])
    assert not any(f"\n{text} " in report for text in not_blamed)


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    model = make_model()
    model.get_layer("conv").bias.assign([np.inf, 0.0])
    path = save(tmp_path, model, 1, batch())
    other = make_model()
    report = replay_step.replay(read(path), other, loss_values(other))
    assert "weight conv/bias: 1 of 2 numbers are not finite" in report


def test_the_newest_files_stay_and_a_full_disk_costs_only_the_file(tmp_path, monkeypatch, capsys):
    model = make_model()
    for step in (3, 20, 100):
        save(tmp_path, model, step, batch())
    names = sorted(path.name for path in (tmp_path / "skipped").iterdir())
    assert names == ["step_00000020.npz", "step_00000100.npz"]

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "write_bytes", full)
    assert save(tmp_path, model, 200, batch()) is None
    assert "No space left on device; training continues" in capsys.readouterr().err
    assert save(None, model, 7, batch()) is None  # not rank 0


def test_other_files_are_refused(tmp_path):
    model = make_model()
    files = Results(tmp_path, model, {"app": "other"}, {"epoch": 0})
    other = files.save_skipped(Ranks(), 2, *batch())
    with pytest.raises(UserError, match="is of 'other', not of efficientdet or yolov4"):
        replay_step.main(other)
    path = save(tmp_path, model, 1, batch())
    with pytest.raises(UserError, match="is missing, damaged or not the file of a skipped step"):
        read(tmp_path / "absent.npz")
    for content in (b"", b"PK\3\4 nothing", (tmp_path / "skipped" / "step_00000001.npz").read_bytes()[:900]):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match="is missing, damaged or not the file of a skipped step"):
            read(tmp_path / "bad.npz")
    np.savez(tmp_path / "other.npz", metadata="{}")
    with pytest.raises(UserError, match="is missing, damaged or not the file of a skipped step"):
        read(tmp_path / "other.npz")
    inputs = keras.Input((4, 4, 3))
    small = keras.Model(inputs, keras.layers.Conv2D(1, 3)(inputs))
    with pytest.raises(UserError, match="do not fit the model"):
        replay_step.replay(read(path), small, loss_values(small))


@pytest.mark.parametrize("files", [[], ["absent.npz"]])
def test_a_bad_command_line_ends_in_one_line(files):
    command = [sys.executable, "tools/replay_step.py", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ("absent.npz is missing, damaged or not" if files else "give one") in line
    assert "Traceback" not in done.stderr
