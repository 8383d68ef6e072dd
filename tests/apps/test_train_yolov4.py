"""What only YOLOv4's training does: mosaic closed at the end, several sizes, letterbox, Darknet files."""

import csv

import numpy as np
import pytest

from common.training import input_feed, weights
from common.training.results import Results

pytestmark = pytest.mark.parametrize("app", ["yolov4"], indirect=True, scope="session")

MOSAIC = "--hparams=width=0.25,optimizer=sgd,mosaic_prob=1"


@pytest.fixture
def opened(app, monkeypatch):
    """(seed, mosaic) of every training loader that was opened."""
    calls = []
    original = input_feed.make_loader

    def remember(*arguments, **options):
        if options["training"]:
            calls.append((options["seed"], options["mosaic"]))
        return original(*arguments, **options)

    monkeypatch.setattr(input_feed, "make_loader", remember)
    return calls


def weights_of(app, run) -> dict[str, np.ndarray]:
    return {w.path: np.asarray(w) for w in app.load_trained(run / weights.LAST)[0].weights}


CLOSED = [MOSAIC, "--epochs=3", "--close_mosaic=1", "--eval_every=0", "--seed=5"]


@pytest.fixture(scope="module")
def unbroken(tiny_train, drawn, tmp_path_factory):
    directory = tmp_path_factory.mktemp("closed") / "unbroken"
    tiny_train(drawn, directory, *CLOSED)
    return directory


@pytest.mark.parametrize("stopped_in", [2, 3])
def test_mosaic_is_closed_for_the_last_epochs_and_resumes_exactly(
    app, tiny_train, unbroken, drawn, tmp_path, monkeypatch, opened, stopped_in
):
    """Stopped before the loader changes, and after: the same images come as in the unbroken run."""
    save_row = Results.save_row

    def save_once(self, epoch, values):
        if epoch == stopped_in:
            raise KeyboardInterrupt
        save_row(self, epoch, values)

    monkeypatch.setattr(Results, "save_row", save_once)
    with pytest.raises(KeyboardInterrupt):
        tiny_train(drawn, tmp_path / "broken", *CLOSED)
    monkeypatch.setattr(Results, "save_row", save_row)
    tiny_train(drawn, tmp_path / "broken", *CLOSED)
    # one to look at, one to read, one without mosaic; then one to look at, that of the saved place, and again
    first = [(5, True), (5, True), (7, False)]
    if stopped_in == 2:
        assert opened == [*first[:2], *first]
    else:  # saved before the evaluation, which came to nothing
        assert opened == [*first, first[0], first[2]]
    expected, found = weights_of(app, unbroken), weights_of(app, tmp_path / "broken")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_later_close_takes_mosaic_up_again(tiny_train, drawn, tmp_path, opened):
    """More epochs on a finished run: what were its last ones are no longer the last ones."""
    run = tmp_path / "run"
    tiny_train(drawn, run, MOSAIC, "--epochs=2", "--close_mosaic=1", "--eval_every=0")
    tiny_train(drawn, run, MOSAIC, "--epochs=4", "--close_mosaic=1", "--eval_every=0")
    # the second sitting: a look, the loader of the saved place, mosaic again, closed again
    assert opened[3:] == [(0, True), (1, False), (2, True), (3, False)]
    with (run / "results.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]


def test_letterbox_travels_with_the_weights(app, tiny_train, command, drawn, tmp_path):
    run = tmp_path / "run"
    tiny_train(drawn, run, "--letterbox", "--epochs=1", "--eval_every=0")
    _, config, _, _ = app.load_trained(run)
    assert config.letterbox
    data = [f"--eval_images={drawn}/images", f"--eval_annotations={drawn}/instances.json"]
    metrics = command("eval", f"--weights={run}", *data)
    assert 0.0 <= metrics["AP"] <= 1.0


def test_several_sizes_train_one_network(app, tiny_train, drawn, tmp_path):
    run = tmp_path / "run"
    tiny_train(drawn, run, "--hparams=width=0.25,multi_scale=2", "--epochs=1", "--steps_per_epoch=5")
    model, config, _, _ = app.load_trained(run)
    assert config.size_range == (1, 4)
    assert model.input_shape == (None, 64, 96, 3)  # evaluation is at one size


def test_weights_go_out_to_darknet_and_come_back(app, tiny_train, trained, drawn, tmp_path, capfd):
    from yolov4.darknet_weights import save_darknet

    model, _, labels, _ = app.load_trained(trained)
    save_darknet(model, tmp_path / "own.weights")
    (tmp_path / "own.names").write_text("".join(f"{name}\n" for name in labels.names))
    run = tmp_path / "run"
    still = ["--epochs=1", "--steps_per_epoch=1", "--learning_rate=0", "--ema_decay=0", "--eval_every=0"]
    hparams = f"--hparams={app.tiny},{app.still}"
    tiny_train(drawn, run, f"--init_from={tmp_path}/own.weights", hparams, *still)
    assert "own.weights" in capfd.readouterr().err
    found = weights_of(app, run)
    for weight in model.weights:
        if "moving" not in weight.path:  # one step moved the statistics
            np.testing.assert_array_equal(found[weight.path], np.asarray(weight), err_msg=weight.path)
