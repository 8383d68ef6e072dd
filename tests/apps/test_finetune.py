"""Fine-tuning: what is frozen stays still to the last bit, and what trained before loses nothing.

That frozen layers keep their weights, batch norm's among them, is tested with the training command
(test_train.py: test_freeze_keeps_the_named_layers_still).
"""

import pathlib
import re

import keras
import numpy as np

from common import freezing, hparams, passport, weight_files
from common.batch_norm import BatchNormalization

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = ["--steps_per_epoch=3", "--ema_decay=0", "--eval_images=", "--eval_annotations="]


def test_frozen_batch_norms_normalise_with_what_they_had(app):
    """In a training step too, by the fused kernel: the output for an image does not depend on its batch."""
    config = app.package.config.get_config(app.model_name)
    config = hparams.override(config, f"{app.tiny},image_size=64x96")
    model = app.package.train.build_model(app.model_name, 3, config=config)
    freezing.freeze(model, "^backbone")
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


def test_unfreezing_keeps_the_state_of_the_optimizer(app, tiny_train, drawn, tmp_path, monkeypatch, capsys):
    """One epoch of the heads alone, then one of all: momentum and counters go on, new layers start at 0."""
    seen = []
    make_train_step = app.package.train.make_train_step

    def watched(ranks, model, config, optimizer, averaged, **options):
        seen.append((optimizer, slots(optimizer), int(optimizer.iterations)))
        return make_train_step(ranks, model, config, optimizer, averaged, **options)

    def slots(optimizer) -> dict[str, np.ndarray]:
        values = {v.path: np.array(v) for v in optimizer.variables if v.path.count("/") > 1 or len(v.shape)}
        assert values
        return values

    monkeypatch.setattr(app.package.train, "make_train_step", watched)
    run = tmp_path / "run"
    tiny_train(drawn, run, *SHORT, "--epochs=1", "--freeze=^backbone")
    left = slots(seen[0][0])
    tiny_train(drawn, run, *SHORT, "--epochs=2", "--freeze=")
    assert "with another freeze: from a whole epoch" in capsys.readouterr().err
    _, found, updates = seen[1]
    assert updates == 3
    still = [name for name in left if "backbone" in name]
    moving = [name for name in left if name not in still]
    assert still
    assert moving
    by_place = dict(zip(left, found.values(), strict=True))  # optimizers are numbered: paths may differ
    for name, values in left.items():
        np.testing.assert_array_equal(by_place[name], values, err_msg=name)
    assert all(not left[name].any() for name in still)
    assert np.mean([left[name].any() for name in moving]) > 0.9
    after = list(slots(seen[1][0]).values())
    backbone = [values for name, values in zip(left, after, strict=True) if name in still]
    assert np.mean([values.any() for values in backbone]) > 0.9


def test_another_configuration_is_explained(app, tiny_train, trained, drawn, tmp_path, capsys):
    """By the recipe, from weights of another size: a line for each field, with both values."""
    run = tmp_path / "run"
    tiny_train(
        drawn,
        run,
        f"--flagfile={ROOT / app.name}/flags/finetune.txt",
        *SHORT,
        f"--init_from={trained}",
        "--epochs=1",
        "--steps_per_epoch=1",
        "--image_size=96x64",
        "--freeze=^backbone",
    )
    said = capsys.readouterr().err
    assert f"--init_from={trained} was trained otherwise:" in said
    assert "  config.image_size: saved [64, 96], now [96, 64]: it runs, but objects have another size" in said
    assert "  config.epochs: saved 2, now 1: of training alone" in said
    found = passport.read(run)
    assert found["recipe"]["freeze"] == "^backbone"
    assert found["recipe"]["init_from"] == trained.name  # the name alone: a passport names no directories
    assert found["train_data"] == passport.read(trained)["train_data"]
    assert passport.read(run / "checkpoints")["state"]["step"] == 1
    assert passport.read(run / "checkpoints")["anchors"] == found["anchors"]


def test_weights_that_run_otherwise_say_so(app, trained, capsys):
    app.package.predict.load_trained(str(trained))
    assert capsys.readouterr().err == ""
    app.package.predict.load_trained(str(trained), "64x64", f"nms_method={app.other_nms}")
    said = capsys.readouterr().err.splitlines()
    assert re.search(r"best\.weights\.h5 runs otherwise than it was saved:$", said[0])
    assert said[1].startswith("  config.image_size: saved [64, 96], now [64, 64]: ")
    assert re.match(rf"  config\.nms_method: saved \w+, now {app.other_nms}: other detections", said[2])


def test_weights_of_an_earlier_version_load(app, trained, tmp_path, capsys):
    """As files were written before there were passports."""
    model, _, label_map, file = app.load_trained(trained)
    metadata = weight_files.read_metadata(file)
    kept = ("app", "num_classes", "label_map", "config", "eval_data", "epoch")
    old = tmp_path / "old.weights.h5"
    weight_files.save(model, old, {name: metadata[name] for name in kept if name in metadata})
    capsys.readouterr()
    again = app.load_trained(old)
    assert again[2] == label_map
    assert capsys.readouterr().err == ""
    for a, b in zip(model.weights, again[0].weights, strict=True):
        np.testing.assert_array_equal(a, b)
