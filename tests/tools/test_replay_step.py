import pathlib
import runpy
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.training import results
from common.training.results import Results
from tests.common.training.small_model import full_disk
from tests.refusal import refusal
from tools import replay_step
from tools.replay_step import read

METADATA = {"app": "efficientdet", "num_classes": 2, "config": {"a": 1}}
NO_FILE = "is no readable file of a skipped step: give skipped/step_*.npz"


def make_model(filters=2):
    inputs = keras.Input((4, 4, 3))
    x = keras.layers.Conv2D(filters, 3, name="conv")(inputs)
    x = keras.layers.BatchNormalization(name="bn")(x)
    return keras.Model(inputs, keras.layers.Dropout(0.5, seed=1)(x))


model = pytest.fixture(make_model)


def loss_values(model):
    return lambda images, targets: {
        "loss": tf.reduce_mean(tf.square(model(images, training=True)) * targets["weight"]),
        "other": tf.constant(2.0),
    }


def batch(*, image=1.0, weight=1.0):
    images = tf.fill([2, 4, 4, 3], tf.constant(image, tf.float32)) * tf.constant([[[[1.0]]], [[[2.0]]]])
    return images, {"weight": tf.constant(weight, tf.float32), "image_ids": tf.constant([5, 9], tf.int64)}


def save(directory, model, step, contents=None, metadata=METADATA):
    files = Results(directory, model, metadata, {"epoch": 0})
    return files.save_skipped(Ranks(), step, *(contents or batch()))


def test_the_file_holds_the_batch_and_the_weights(model, tmp_path):
    model.get_layer("bn").moving_mean.assign([3.0, 4.0])
    weights = [np.array(v.value) for v in model.variables]
    images, targets = batch()
    path = save(tmp_path, model, 12, (images, targets))
    assert path == str(tmp_path / "skipped" / "step_00000012.npz")
    found = read(path)
    assert found.metadata == {**METADATA, "step": 12, "rank": 0}
    np.testing.assert_array_equal(found.images, images)
    assert sorted(found.targets) == ["image_ids", "weight"]
    for saved, weight in zip(found.weights, weights, strict=True):
        np.testing.assert_array_equal(saved, weight)
    # A new model gives the loss of the saved step.
    with tf.GradientTape() as tape:
        expected = loss_values(model)(images, targets)["loss"]
    norm = tf.linalg.global_norm(tape.gradient(expected, model.trainable_variables))
    other = make_model()
    assert replay_step.replay(found, other, loss_values(other)).splitlines() == [
        "step 12 of rank 0, image ids 5, 9",
        f"loss = {float(expected):.6g}",
        "other = 2",
        f"the loss is finite here; the norm of the gradients is {float(norm):.6g}",
    ]


NOT_FINITE = [
    ({"image": np.nan}, 0, ["input images: 96 of 96", "output of layer conv: 16 of 16"], "weight"),
    ({"weight": np.inf}, 0, ["input weight: 1 of 1", "loss = nan"], "output of layer"),
    ({}, np.inf, ["weight conv/bias: 1 of 2 numbers are not finite"], "input"),
]


@pytest.mark.parametrize(("contents", "bias", "blamed", "not_blamed"), NOT_FINITE)
def test_it_says_where_numbers_stop_being_finite(model, tmp_path, contents, bias, blamed, not_blamed):
    model.get_layer("conv").bias.assign([bias, 0.0])
    path, other = save(tmp_path, model, 1, batch(**contents)), make_model()
    report = replay_step.replay(read(path), other, loss_values(other))
    assert all(text in report for text in [*blamed, "gradient of conv/kernel"])
    assert f"\n{not_blamed} " not in report and "the loss is finite" not in report


def test_the_newest_files_stay_and_a_full_disk_costs_only_the_file(model, tmp_path, monkeypatch, capsys):
    for step in (3, 20, 100):
        save(tmp_path, model, step)
    names = sorted(path.name for path in (tmp_path / "skipped").iterdir())
    assert names == ["step_00000020.npz", "step_00000100.npz"]

    monkeypatch.setattr(results, "write_bytes", full_disk)
    assert save(tmp_path, model, 200) is None
    assert "No space left on device; training continues" in capsys.readouterr().err
    assert save(None, model, 7) is None


def test_other_files_are_refused(model, tmp_path):
    other = save(tmp_path / "other", model, 2, metadata={"app": "other"})
    assert "is of the app 'other', not of efficientdet or yolov4" in refusal(replay_step.main, other)
    assert "give one file, not 2:" in refusal(replay_step.main, other, other)
    path, bad = pathlib.Path(save(tmp_path, model, 1)), tmp_path / "bad.npz"
    np.savez(bad, metadata="{}")
    for content in (bad.read_bytes(), b"", b"PK\3\4 nothing", path.read_bytes()[:900]):
        bad.write_bytes(content)
        assert f"bad.npz {NO_FILE}" in refusal(read, bad)
    small = make_model(filters=1)
    assert "do not fit the model" in refusal(replay_step.replay, read(path), small, loss_values(small))


def test_the_command_takes_the_file_and_a_bad_one_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["replay_step.py", "absent.npz"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(replay_step.__file__, run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: absent.npz {NO_FILE}\n"
