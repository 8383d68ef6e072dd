"""Tests fine-tuning, and init_from.py of each app."""

import contextlib
import io
import pathlib
import re
import shutil
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest

from common import hparams
from common.data.labels import LabelMap
from common.layers import BatchNormalization
from common.training.results import Results
from common.weights import model_metadata
from common.weights import weight_files as weights
from tests.apps.conftest import one_app, slow_for
from tests.common.weights.test_fine_tuning import values_of
from tests.conftest import ROOT

LABELS = LabelMap((5, 7, 8, 9), ("toothbrush", "cow", "car", "emu"))  # the earlier model has no "cat"
SHORT = ["--steps_per_epoch=3", "--batch_size=4", "--ema_decay=0", "--eval_images=", "--eval_annotations="]


class EarlierRun(NamedTuple):
    model: keras.Model
    directory: pathlib.Path


def build(app, num_classes):
    config = app.package.config.get_config(app.model_name)
    config = hparams.override(config, f"{app.tiny},image_size=64x96,epochs=2")
    return app.package.train.build_model(app.model_name, num_classes, config=config), config


@pytest.fixture(scope="module")
def earlier(app, tmp_path_factory) -> EarlierRun:
    """A run directory with untrained weights for the four classes of LABELS."""
    model, config = build(app, 4)
    directory = tmp_path_factory.mktemp("earlier") / "run"
    directory.mkdir()
    weights.save(model, directory / weights.BEST, app.package.model_metadata.make_metadata(config, LABELS, 4))
    return EarlierRun(model, directory)


class Tuning(NamedTuple):
    """A run of the fine-tuning recipe.

    Attributes:
        directory: directory of the run.
        messages: what the run printed to stderr.
        first_weights, first_slots: weights and state of the optimizer when training began.
        first_update: number of the optimizer's steps when training began.
        last_slots: state of the optimizer when training ended.
    """

    directory: pathlib.Path
    messages: str
    first_weights: dict[str, np.ndarray]
    first_slots: dict[str, np.ndarray]
    first_update: int
    last_slots: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tune(app, tiny_train, drawn, earlier):
    """Gives tune(directory, "--epochs=1", ...), which trains from the earlier weights."""

    def slots(optimizer) -> dict[str, np.ndarray]:
        values = {v.path: np.array(v) for v in optimizer.variables if v.path.count("/") > 1 or len(v.shape)}
        assert values
        return values

    def run(directory: pathlib.Path, *flags: str) -> Tuning:
        starts = []
        make_train_step = app.package.train.make_train_step

        def make_recorded_step(ranks, model, config, optimizer, averaged, **options):
            starts.append((optimizer, values_of(model), slots(optimizer), int(optimizer.iterations)))
            return make_train_step(ranks, model, config, optimizer, averaged, **options)

        recipe = [f"--flagfile={ROOT / app.name}/flags/finetune.txt", "--image_size=96x64"]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as stderr:
            patch.setattr(app.package.train, "make_train_step", make_recorded_step)
            tiny_train(drawn, directory, *recipe, *SHORT, f"--init_from={earlier.directory}", *flags)
        ((optimizer, *first_values),) = starts
        return Tuning(directory, stderr.getvalue(), *first_values, last_slots=slots(optimizer))

    return run


@pytest.fixture(scope="module")
def heads(tune, tmp_path_factory) -> Tuning:
    """A run of one epoch with a frozen backbone."""
    return tune(tmp_path_factory.mktemp("heads") / "run", "--epochs=1", "--freeze=^backbone")


def class_rows(app, values: dict[str, np.ndarray], num_classes: int) -> list[np.ndarray]:
    """Returns kernels and biases of the class scores in the last layers, as (..., anchor, class)."""
    if app.name == "efficientdet":
        names = ("class_net.predict/kernel", "class_net.predict/bias")
        return [values[name].reshape(-1, 1, num_classes) for name in names]
    layers = {name.rpartition("/")[0] for name in values if name.endswith("conv/bias")}
    heads = [values[f"{layer}/{part}"] for layer in sorted(layers) for part in ("kernel", "bias")]
    return [head.reshape(-1, 3, 5 + num_classes)[..., 5:] for head in heads]


def box_bias(app, values: dict[str, np.ndarray], num_classes: int) -> np.ndarray:
    """Returns the biases of the boxes. YOLOv4's also have the objectness."""
    if app.name == "efficientdet":
        return values["box_net.predict/bias"]
    name = sorted(name for name in values if name.endswith("conv/bias"))[0]
    return values[name].reshape(3, 5 + num_classes)[:, :5]


def test_init_from_copies_weights_of_classes_by_name_and_all_other_weights(app, heads, earlier):
    before, after = values_of(earlier.model), heads.first_weights
    report = next(line for line in heads.messages.splitlines() if line.startswith("--init_from"))
    total = len(earlier.model.weights)
    assert report == f"--init_from={earlier.directory}: {total} of {total} weights taken, new classes: cat"
    for old, new in zip(class_rows(app, before, 4), class_rows(app, after, 3), strict=True):
        np.testing.assert_array_equal(new[..., 0], old[..., 2])
        np.testing.assert_array_equal(new[..., 2], old[..., 0])
        assert not any(np.array_equal(new[..., 1], old[..., row]) and new[..., 1].std() for row in range(4))
    np.testing.assert_array_equal(box_bias(app, after, 3), box_bias(app, before, 4))
    for name in before:
        if before[name].shape == after[name].shape:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def test_training_with_freeze_changes_only_layers_that_are_not_frozen(app, heads, earlier):
    before, after = heads.first_weights, values_of(app.load_trained(heads.directory)[0])
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    backbone = {name for name in after if "backbone" in name}
    assert backbone and changed and not changed & backbone
    earlier_values = values_of(earlier.model)
    for name in backbone:
        np.testing.assert_array_equal(after[name], earlier_values[name])


@slow_for("efficientdet")
def test_run_with_freeze_batch_norm_keeps_batch_norms_and_resumes_exactly(app, tune, tmp_path, monkeypatch):
    flags = ("--epochs=2", "--freeze_batch_norm", "--ema_decay=0.9")
    unbroken = tune(tmp_path / "unbroken", *flags)
    model = app.load_trained(unbroken.directory)[0]
    norms = (layer for layer in model.layers if isinstance(layer, BatchNormalization))
    frozen = {weight.path for layer in norms for weight in layer.weights}
    after = values_of(model)
    changed = {name for name in after if not np.array_equal(unbroken.first_weights[name], after[name])}
    assert frozen and not changed & frozen and len(changed) > 0.9 * len(after.keys() - frozen)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Results, "save_row", mock.Mock(side_effect=[None, KeyboardInterrupt]))
        tune(tmp_path / "resumed", *flags)
    resumed = tune(tmp_path / "resumed", *flags)
    assert resumed.first_update == 3
    for name, values in values_of(app.load_trained(resumed.directory)[0]).items():
        np.testing.assert_array_equal(values, after[name], err_msg=name)


@one_app
def test_run_continued_without_freeze_keeps_weights_and_optimizer_state(app, heads, tune, tmp_path):
    unfrozen = tune(shutil.copytree(heads.directory, tmp_path / "run"), "--epochs=2", "--freeze=")
    assert "changed: freeze; the run continues from an epoch's end" in unfrozen.messages
    assert (heads.first_update, unfrozen.first_update) == (0, 3)
    frozen = [name for name in heads.last_slots if "backbone" in name]
    trained = [name for name in heads.last_slots if name not in frozen]
    assert frozen and trained
    for path, values in values_of(app.load_trained(heads.directory)[0]).items():
        np.testing.assert_array_equal(unfrozen.first_weights[path], values, err_msg=path)
    # Slots are compared by position, because their names may differ.
    restored = dict(zip(heads.last_slots, unfrozen.first_slots.values(), strict=True))
    for name, values in heads.last_slots.items():
        np.testing.assert_array_equal(restored[name], values, err_msg=name)
    assert all(not heads.last_slots[name].any() for name in frozen)
    assert np.mean([heads.last_slots[name].any() for name in trained]) > 0.9
    after = zip(heads.last_slots, unfrozen.last_slots.values(), strict=True)
    assert np.mean([values.any() for name, values in after if name in frozen]) > 0.9


@one_app
def test_metadata_of_weights_and_checkpoint_hold_the_recipe_and_the_data(heads, earlier, source):
    metadata = model_metadata.read(heads.directory)
    assert metadata["recipe"]["freeze"] == "^backbone"
    assert metadata["recipe"]["init_from"] == earlier.directory.name
    assert metadata["train_data"] == source.fingerprint
    assert model_metadata.read(heads.directory / "checkpoints")["state"]["step"] == 3
    assert model_metadata.read(heads.directory / "checkpoints")["anchors"] == metadata["anchors"]


@one_app
def test_weights_loaded_with_another_image_size_or_nms_than_saved_give_a_warning_with_both_values(
    app, heads, capsys
):
    app.load_trained(heads.directory)
    assert capsys.readouterr().err == ""
    other_nms = {"efficientdet": "hard", "yolov4": "diou"}[app.name]
    app.package.predict.load_trained(str(heads.directory), "64x64", f"nms_method={other_nms}")
    messages = capsys.readouterr().err.splitlines()
    assert re.search(r"last\.weights\.h5 runs with other settings than it was saved with:$", messages[0])
    assert messages[1] == "  config.image_size: saved [96, 64], now [64, 64]"
    assert re.fullmatch(rf"  config\.nms_method: saved \w+, now {other_nms}", messages[2])
