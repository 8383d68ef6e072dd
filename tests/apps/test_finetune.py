"""Fine-tuning: what is frozen stays still to the last bit, and what trained before loses nothing.

That frozen layers keep their weights, batch norm's among them, is tested with the training command
(test_train.py: test_freeze_keeps_the_named_layers_still).
"""

import contextlib
import dataclasses
import io
import pathlib
import re
import shutil

import keras
import numpy as np
import pytest

from common import hparams
from common.datacheck.datasets import open_coco
from common.layers import BatchNormalization
from common.training import fine_tuning, model_metadata, weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = ["--steps_per_epoch=3", "--batch_size=4", "--ema_decay=0", "--eval_images=", "--eval_annotations="]


@pytest.fixture(scope="module")
def source(drawn):
    return open_coco(str(drawn / "images"), str(drawn / "instances.json"))


@dataclasses.dataclass(frozen=True)
class Earlier:
    """A model, and the run directory where its weights are."""

    model: keras.Model
    run: pathlib.Path


@pytest.fixture(scope="module")
def earlier(app, source, tmp_path_factory) -> Earlier:
    """Of another image size and of more epochs than `tune` has. Nobody has trained it."""
    config = app.package.config.get_config(app.model_name)
    config = hparams.override(config, f"{app.tiny},image_size=64x96,epochs=2")
    model = app.package.train.build_model(app.model_name, 3, config=config)
    run = tmp_path_factory.mktemp("earlier") / "run"
    run.mkdir()
    metadata = app.package.model_metadata.make_metadata(config, source.label_map, 3)
    weights.save(model, run / weights.BEST, metadata)
    return Earlier(model, run)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A training by the recipe, and what it left.

    Attributes:
        run: its directory.
        said: on stderr.
        restored, updates: state of the optimizer and count of its steps when training began.
        left: state of the optimizer when it ended.
    """

    run: pathlib.Path
    said: str
    restored: dict[str, np.ndarray]
    updates: int
    left: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tune(app, tiny_train, drawn, earlier):
    """tune(run, "--epochs=1", ...): three steps an epoch, from the earlier weights, at another image size."""

    def slots(optimizer) -> dict[str, np.ndarray]:
        values = {v.path: np.array(v) for v in optimizer.variables if v.path.count("/") > 1 or len(v.shape)}
        assert values
        return values

    def run(directory: pathlib.Path, *flags: str) -> Tuned:
        seen = []
        make_train_step = app.package.train.make_train_step

        def watched(ranks, model, config, optimizer, averaged, **options):
            seen.append((optimizer, slots(optimizer), int(optimizer.iterations)))
            return make_train_step(ranks, model, config, optimizer, averaged, **options)

        recipe = [f"--flagfile={ROOT / app.name}/flags/finetune.txt", "--image_size=96x64"]
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            patch.setattr(app.package.train, "make_train_step", watched)
            tiny_train(drawn, directory, *recipe, *SHORT, f"--init_from={earlier.run}", *flags)
        ((optimizer, restored, updates),) = seen
        return Tuned(directory, said.getvalue(), restored, updates, slots(optimizer))

    return run


@pytest.fixture(scope="module")
def heads(tune, tmp_path_factory) -> Tuned:
    """One epoch of the heads alone."""
    return tune(tmp_path_factory.mktemp("heads") / "run", "--epochs=1", "--freeze=^backbone")


def test_frozen_batch_norms_normalise_with_what_they_had(app):
    """In a training step too, by the fused kernel: the output for an image does not depend on its batch."""
    config = app.package.config.get_config(app.model_name)
    config = hparams.override(config, f"{app.tiny},image_size=64x96")
    model = app.package.train.build_model(app.model_name, 3, config=config)
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


def test_unfreezing_keeps_the_state_of_the_optimizer(heads, tune, tmp_path):
    """After the heads alone one epoch of all: momentum and counters go on, new layers start at 0."""
    whole = tune(shutil.copytree(heads.run, tmp_path / "run"), "--epochs=2", "--freeze=")
    assert "with another freeze: from a whole epoch" in whole.said
    assert (heads.updates, whole.updates) == (0, 3)
    still = [name for name in heads.left if "backbone" in name]
    moving = [name for name in heads.left if name not in still]
    assert still
    assert moving
    by_place = dict(zip(heads.left, whole.restored.values(), strict=True))  # optimizers are numbered
    for name, values in heads.left.items():
        np.testing.assert_array_equal(by_place[name], values, err_msg=name)
    assert all(not heads.left[name].any() for name in still)
    assert np.mean([heads.left[name].any() for name in moving]) > 0.9
    after = zip(heads.left, whole.left.values(), strict=True)
    assert np.mean([values.any() for name, values in after if name in still]) > 0.9


def test_the_recipe_is_in_the_metadata(heads, earlier, source):
    found = model_metadata.read(heads.run)
    assert found["recipe"]["freeze"] == "^backbone"
    assert found["recipe"]["init_from"] == earlier.run.name  # the name alone: metadata names no directories
    assert found["train_data"] == source.fingerprint
    assert model_metadata.read(heads.run / "checkpoints")["state"]["step"] == 3
    assert model_metadata.read(heads.run / "checkpoints")["anchors"] == found["anchors"]


def test_weights_that_run_otherwise_say_so(app, heads, capsys):
    app.package.predict.load_trained(str(heads.run))
    assert capsys.readouterr().err == ""
    app.package.predict.load_trained(str(heads.run), "64x64", f"nms_method={app.other_nms}")
    said = capsys.readouterr().err.splitlines()
    assert re.search(r"last\.weights\.h5 runs otherwise than it was saved:$", said[0])
    assert said[1] == "  config.image_size: saved [96, 64], now [64, 64]"
    assert re.fullmatch(rf"  config\.nms_method: saved \w+, now {app.other_nms}", said[2])


def test_weights_of_an_earlier_version_load(app, earlier, source, tmp_path, capsys):
    """As files were written before there was metadata."""
    metadata = model_metadata.read(earlier.run)
    kept = ("app", "num_classes", "label_map", "config", "eval_data", "epoch")
    old = tmp_path / "old.weights.h5"
    weights.save(earlier.model, old, {name: metadata[name] for name in kept if name in metadata})
    model, _, label_map, _ = app.load_trained(old)
    assert label_map == source.label_map
    assert capsys.readouterr().err == ""
    for a, b in zip(earlier.model.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)
