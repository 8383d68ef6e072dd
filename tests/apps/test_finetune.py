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
from common.weights import fine_tuning, model_metadata
from common.weights import weight_files as weights
from tests.apps.conftest import one_app, slow_for
from tests.common.weights.test_fine_tuning import values_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
LABELS = LabelMap((5, 7, 8, 9), ("toothbrush", "cow", "car", "emu"))  # the earlier model has no "cat"
SHORT = ["--steps_per_epoch=3", "--batch_size=4", "--ema_decay=0", "--eval_images=", "--eval_annotations="]


class Earlier(NamedTuple):
    model: keras.Model
    run: pathlib.Path


def build(app, num_classes):
    config = app.package.config.get_config(app.model_name)
    config = hparams.override(config, f"{app.tiny},image_size=64x96,epochs=2")
    return app.package.train.build_model(app.model_name, num_classes, config=config), config


@pytest.fixture(scope="module")
def earlier(app, tmp_path_factory) -> Earlier:
    model, config = build(app, 4)
    run = tmp_path_factory.mktemp("earlier") / "run"
    run.mkdir()
    weights.save(model, run / weights.BEST, app.package.model_metadata.make_metadata(config, LABELS, 4))
    return Earlier(model, run)


class Tuned(NamedTuple):
    """A run of the fine-tuning recipe, and its results.

    Attributes:
        run: directory of the run.
        said: what the run printed to stderr.
        begun: weights when training began.
        restored: state of the optimizer when training began.
        updates: number of the optimizer's steps when training began.
        left: state of the optimizer when training ended.
    """

    run: pathlib.Path
    said: str
    begun: dict[str, np.ndarray]
    restored: dict[str, np.ndarray]
    updates: int
    left: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tune(app, tiny_train, drawn, earlier):
    """Gives tune(run, "--epochs=1", ...), which trains from the earlier weights, three steps per epoch."""

    def slots(optimizer) -> dict[str, np.ndarray]:
        values = {v.path: np.array(v) for v in optimizer.variables if v.path.count("/") > 1 or len(v.shape)}
        assert values
        return values

    def run(directory: pathlib.Path, *flags: str) -> Tuned:
        seen = []
        make_train_step = app.package.train.make_train_step

        def watched(ranks, model, config, optimizer, averaged, **options):
            seen.append((optimizer, values_of(model), slots(optimizer), int(optimizer.iterations)))
            return make_train_step(ranks, model, config, optimizer, averaged, **options)

        recipe = [f"--flagfile={ROOT / app.name}/flags/finetune.txt", "--image_size=96x64"]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
            patch.setattr(app.package.train, "make_train_step", watched)
            tiny_train(drawn, directory, *recipe, *SHORT, f"--init_from={earlier.run}", *flags)
        ((optimizer, *begun),) = seen
        return Tuned(directory, said.getvalue(), *begun, slots(optimizer))

    return run


@pytest.fixture(scope="module")
def heads(tune, tmp_path_factory) -> Tuned:
    return tune(tmp_path_factory.mktemp("heads") / "run", "--epochs=1", "--freeze=^backbone")


def test_init_from_copies_classes_by_name(app, heads, earlier):
    before, after = values_of(earlier.model), heads.begun
    report = next(line for line in heads.said.splitlines() if line.startswith("--init_from"))
    total = len(earlier.model.weights)
    assert report == f"--init_from={earlier.run}: {total} of {total} weights taken, new classes: cat"
    for was, now in zip(app.class_rows(before, 4), app.class_rows(after, 3), strict=True):
        np.testing.assert_array_equal(now[..., 0], was[..., 2])
        np.testing.assert_array_equal(now[..., 2], was[..., 0])
        assert not any(np.array_equal(now[..., 1], was[..., row]) and now[..., 1].std() for row in range(4))
    np.testing.assert_array_equal(app.box_bias(after, 3), app.box_bias(before, 4))
    for name in before:
        if before[name].shape == after[name].shape:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def test_freeze_keeps_the_named_layers_still(app, heads, earlier):
    before, after = heads.begun, values_of(app.load_trained(heads.run)[0])
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    backbone = {name for name in after if "backbone" in name}
    assert backbone and changed and not changed & backbone
    at_first = values_of(earlier.model)
    for name in backbone:
        np.testing.assert_array_equal(after[name], at_first[name])


@one_app
def test_frozen_batch_norms_normalise_with_what_they_had(app):
    model, _ = build(app, 3)
    fine_tuning.freeze(model, "^backbone")
    layers = [layer for layer in model.layers if isinstance(layer, BatchNormalization)]
    frozen = [layer for layer in layers if layer.name.startswith("backbone")]
    free = [layer for layer in layers if layer not in frozen]
    random = np.random.default_rng(3)
    for layer in layers:
        layer.moving_mean.assign(random.normal(0, 0.1, layer.moving_mean.shape))
    before = {layer: np.asarray(layer.moving_mean) for layer in layers}
    inner = keras.Model(model.inputs, [frozen[-1].output, *model.outputs])
    pixels = random.normal(0.5, 1.0, (4, 64, 96, 3)).astype(np.float32)
    alone = [np.asarray(part) for part in inner([pixels[:1]], training=True)]
    together = [np.asarray(part)[:1] for part in inner([pixels], training=True)]
    np.testing.assert_allclose(alone[0], together[0], rtol=1e-4, atol=1e-5)
    assert np.abs(alone[1] - together[1]).max() > 1e-3 * np.abs(alone[1]).max()
    for layer in layers:
        moved = not np.array_equal(before[layer], np.asarray(layer.moving_mean))
        assert moved == (layer in free), layer.name
    fine_tuning.freeze_batch_norms(model)
    used = inner([pixels], training=False)
    for trained, expected in zip(inner([pixels], training=True), used, strict=True):
        np.testing.assert_allclose(trained, expected, rtol=1e-4, atol=1e-5)


@slow_for("efficientdet")
def test_batch_norms_that_are_frozen_stay_and_the_run_resumes_exactly(app, tune, tmp_path, monkeypatch):
    flags = ("--epochs=2", "--freeze_batch_norm", "--ema_decay=0.9")
    whole = tune(tmp_path / "whole", *flags)
    model = app.load_trained(whole.run)[0]
    norms = (layer for layer in model.layers if isinstance(layer, BatchNormalization))
    still = {weight.path for layer in norms for weight in layer.weights}
    after = values_of(model)
    changed = {name for name in after if not np.array_equal(whole.begun[name], after[name])}
    assert still and not changed & still and len(changed) > 0.9 * len(after.keys() - still)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Results, "save_row", mock.Mock(side_effect=[None, KeyboardInterrupt]))
        tune(tmp_path / "parts", *flags)
    parts = tune(tmp_path / "parts", *flags)
    assert parts.updates == 3
    for name, values in values_of(app.load_trained(parts.run)[0]).items():
        np.testing.assert_array_equal(values, after[name], err_msg=name)


@one_app
def test_unfreezing_keeps_the_weights_and_the_state_of_the_optimizer(app, heads, tune, tmp_path):
    whole = tune(shutil.copytree(heads.run, tmp_path / "run"), "--epochs=2", "--freeze=")
    assert "changed: freeze; the run continues from an epoch's end" in whole.said
    assert (heads.updates, whole.updates) == (0, 3)
    still = [name for name in heads.left if "backbone" in name]
    moving = [name for name in heads.left if name not in still]
    assert still and moving
    for path, values in values_of(app.load_trained(heads.run)[0]).items():
        np.testing.assert_array_equal(whole.begun[path], values, err_msg=path)
    by_place = dict(zip(heads.left, whole.restored.values(), strict=True))
    for name, values in heads.left.items():
        np.testing.assert_array_equal(by_place[name], values, err_msg=name)
    assert all(not heads.left[name].any() for name in still)
    assert np.mean([heads.left[name].any() for name in moving]) > 0.9
    after = zip(heads.left, whole.left.values(), strict=True)
    assert np.mean([values.any() for name, values in after if name in still]) > 0.9


@one_app
def test_the_recipe_is_in_the_metadata(heads, earlier, source):
    found = model_metadata.read(heads.run)
    assert found["recipe"]["freeze"] == "^backbone"
    assert found["recipe"]["init_from"] == earlier.run.name
    assert found["train_data"] == source.fingerprint
    assert model_metadata.read(heads.run / "checkpoints")["state"]["step"] == 3
    assert model_metadata.read(heads.run / "checkpoints")["anchors"] == found["anchors"]


@one_app
def test_weights_that_run_otherwise_say_so(app, heads, capsys):
    app.package.predict.load_trained(str(heads.run))
    assert capsys.readouterr().err == ""
    app.package.predict.load_trained(str(heads.run), "64x64", f"nms_method={app.other_nms}")
    said = capsys.readouterr().err.splitlines()
    assert re.search(r"last\.weights\.h5 runs with other settings than it was saved with:$", said[0])
    assert said[1] == "  config.image_size: saved [96, 64], now [64, 64]"
    assert re.fullmatch(rf"  config\.nms_method: saved \w+, now {app.other_nms}", said[2])


@one_app
def test_weights_of_an_earlier_version_load(app, earlier, tmp_path, capsys):
    metadata = model_metadata.read(earlier.run)
    kept = ("app", "num_classes", "label_map", "config", "eval_data", "epoch")
    old = tmp_path / "old.weights.h5"
    weights.save(earlier.model, old, {name: metadata[name] for name in kept if name in metadata})
    model, _, label_map, _ = app.load_trained(old)
    assert label_map == LABELS
    assert capsys.readouterr().err == ""
    for a, b in zip(earlier.model.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)
