"""Tests train.py and show_batch.py of each app."""

import json
import re
import shutil

import numpy as np
import PIL.Image
import pytest

from common import hparams
from common.data.labels import LabelMap
from common.evaluation import coco_metrics
from common.training.ema import AveragedWeights
from common.training.input_feed import InputFeed
from common.weights import weight_files as weights
from tests.apps.conftest import coco_flags, slow_for
from tests.common.training.small_model import rows_of
from tests.refusal import refusal
from tests.small_apps import TINY


def test_train_py_of_each_app_writes_results_csv_metrics_json_pictures_flags_txt_and_weights(app, trained):
    rows = rows_of(trained)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert [row["step"] for row in rows] == ["3", "6"]
    for row in rows:
        for name in ("loss", "class_loss", "box_loss", "l2_loss", "learning_rate", "images_per_second", "AP"):
            assert np.isfinite(float(row[name])), name
        for name in ("boxes_dropped", "boxes_over_limit"):
            assert float(row[name]) >= 0
    metrics = json.loads((trained / "metrics.json").read_text())
    assert set(coco_metrics.NAMES) <= set(metrics)
    assert float(rows[-1]["AP"]) == pytest.approx(metrics["AP"], abs=1e-5)
    for name in ("first_batch.png", "loss_curves.png", "pr_curves.png"):
        assert np.asarray(PIL.Image.open(trained / name)).std() > 0
    assert list((trained / "tensorboard").glob("events*"))
    assert "--batch_size=4" in (trained / "flags.txt").read_text().splitlines()
    published = app.package.config.get_config(app.model_name)
    expected = hparams.override(published, f"{app.tiny},image_size=64x96,epochs=2")
    for name in (weights.BEST, weights.LAST):
        metadata = weights.read_metadata(trained / name)
        assert LabelMap.from_json(metadata["label_map"]).category_ids == (3, 17, 90)
        config = hparams.from_json(type(published), metadata["config"])
        assert config == expected and hash(config) == hash(expected)


def test_train_py_with_flags_txt_of_a_finished_run_accepts_the_run_and_returns_its_metrics(
    trained, command, tmp_path
):
    copy = shutil.copytree(trained, tmp_path / "copy")
    more = [f"--output_dir={copy}", "--init_from=gone.weights.h5", "--coco_backend=faster"]
    metrics = command("train", f"--flagfile={copy}/flags.txt", *more)
    assert metrics == json.loads((copy / "metrics.json").read_text())


def test_train_py_refused_for_a_changed_flag_or_missing_init_from_file_keeps_earlier_weights(
    app, trained, tiny_train, drawn, tmp_path
):
    copy = shutil.copytree(trained, tmp_path / "copy")
    message = refusal(tiny_train, drawn, copy, "--batch_size=2")
    assert re.search("batch_size was 4 and is now 2.*--overwrite", message)
    assert "nowhere" in refusal(tiny_train, drawn, copy, "--overwrite", "--init_from=/nowhere.weights.h5")
    expected, remaining = (app.load_trained(path / weights.LAST)[0].weights for path in (trained, copy))
    for a, b in zip(expected, remaining, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=a.path)


@pytest.fixture
def take_steps(tiny_train, drawn, tmp_path, monkeypatch):
    """Gives run(data, "--clip_norm=0", ...), which trains four steps.

    The function returns the number of updates of the averaged weights.
    """
    instances, init = [], AveragedWeights.__init__

    def remember(self, *arguments):
        init(self, *arguments)
        instances.append(self)

    monkeypatch.setattr(AveragedWeights, "__init__", remember)

    def run(data, *flags):
        metrics = tiny_train(data, tmp_path, "--epochs=1", "--steps_per_epoch=4", "--seed=3", *flags)
        (row,) = rows_of(tmp_path)
        assert np.isfinite(float(row["loss"]))
        metadata = weights.read_metadata(tmp_path / weights.LAST)
        assert metadata["epoch"] == 1
        assert metadata["config"].get("letterbox", False) == ("--letterbox" in flags)
        categories = json.loads((drawn / "instances.json").read_text())["categories"]
        assert set(metrics["per_class"]) == {category["name"] for category in categories}
        return int(instances[0]._num_updates)

    return run


FLOAT16 = {
    "efficientdet": [f"--hparams={TINY['efficientdet']},augmentation=min_iou_crop,hue=20"],
    "yolov4": ["--hparams=width=0.25,mosaic_prob=1,nms_method=diou", "--letterbox"],
}
BFLOAT16 = {
    "efficientdet": f"{TINY['efficientdet']},augmentation=resize_range,grid_mask_prob=1",
    "yolov4": f"{TINY['yolov4']},multi_scale=1.5,mosaic_prob=0.5,mixup_prob=0.5,cutmix_prob=0.5,max_delta=5",
}


@slow_for("efficientdet")
def test_float16_training_without_ema_from_coco_is_finite_and_updates_no_averages(app, take_steps, drawn):
    flags = ["--precision=mixed_float16", "--ema_decay=0", *FLOAT16[app.name]]
    assert take_steps(drawn, *flags) == 0


@slow_for("efficientdet")
def test_bfloat16_training_from_tfrecords_updates_averages_with_the_weights(app, take_steps, drawn_records):
    """With --accumulate_steps=2, the weights change in every second step."""
    flags = ["--precision=mixed_bfloat16", "--clip_norm=0", "--accumulate_steps=2"]
    assert take_steps(drawn_records, *flags, f"--hparams={BFLOAT16[app.name]}") == 2


@pytest.mark.slow
def test_training_on_synthetic_data_with_xla_is_finite(tiny_train, tmp_path):
    flags = ["--epochs=1", "--steps_per_epoch=3", "--xla", "--num_classes=3", "--learning_rate=0.01"]
    tiny_train(tmp_path / "none", tmp_path / "run", *flags, "--pipeline_type=synthetic", compiled=True)
    (row,) = rows_of(tmp_path / "run")
    assert np.isfinite(float(row["loss"]))


@slow_for("efficientdet")
def test_diverging_run_names_the_images_of_skipped_steps_and_stops(
    app, tiny_train, tmp_path, monkeypatch, capsys
):
    next_batch, count = InputFeed.__next__, iter(range(1, 100))

    def poisoned(self):
        images, targets = next_batch(self)
        return (images * float("nan") if next(count) in (2, 4, 5) else images), targets

    monkeypatch.setattr(InputFeed, "__next__", poisoned)
    flags = ["--pipeline_type=synthetic", "--num_classes=3", "--steps_per_epoch=8", "--max_skipped_steps=1"]
    message = refusal(tiny_train, tmp_path / "none", tmp_path / "run", *flags)
    assert "2 steps in a row were skipped, the last is step 5" in message
    log = capsys.readouterr().err
    skipped = re.findall(r"step (\d+) is skipped: the loss is not finite; image ids \d+", log)
    assert skipped == ["2", "4", "5"]


@pytest.mark.gpu
def test_eval_py_gives_weights_of_a_resumed_gpu_run_the_same_ap_with_gpu_and_cpu_loader(
    tiny_train, command, drawn, tmp_path
):
    run = tmp_path / "run"
    for epochs in (1, 2):
        tiny_train(drawn, run, "--pipeline_type=dali_gpu", f"--epochs={epochs}", compiled=True)
    assert len(rows_of(run)) == 2
    data = [f"--weights={run}", *coco_flags(drawn, "eval")]
    metrics, on_cpu = (command("eval", *data, f"--pipeline_type=dali_{kind}") for kind in ("gpu", "cpu"))
    assert metrics["AP"] == pytest.approx(on_cpu["AP"], abs=0.05)


SYNTHETIC = "--pipeline_type=synthetic"
REFUSED = {
    "unknown model": (["--model_name={app}-nona"], "did you mean '{model}'"),
    "no data": ([], "--train_images"),
    "momentum of 1": (["--hparams=momentum=1", SYNTHETIC], "momentum='1'"),
    "EMA decay of 1": (["--ema_decay=1", SYNTHETIC], "ema_decay"),
    "model in hparams": (["--hparams=model_name={model}"], "model_name"),
    "impossible setting": (["--hparams=max_instances=0"], "max_instances='0'"),
    "frozen batch norms of new weights": (["--freeze_batch_norm", SYNTHETIC], "add --init_from"),
    "too few classes": (["--num_classes=2", *coco_flags("{data}", "train")], "data have 3 classes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_train_py_refuses_invalid_flags_with_a_one_line_message(app, command, drawn, tmp_path, case):
    arguments, message = REFUSED[case]
    flags = [text.format(data=drawn, app=app.name, model=app.model_name) for text in arguments]
    flags = [f"--model_name={app.model_name}", f"--output_dir={tmp_path}/run", *flags]
    assert message.format(model=app.model_name) in refusal(command, "train", *flags)
