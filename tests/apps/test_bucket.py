"""Training from TFRecords in a bucket: exact resuming, and an object that changes during training."""

import numpy as np

from common.data import storage
from common.evaluation import coco_metrics
from common.training.input_feed import InputFeed
from common.weights import weight_files as weights
from tests.apps.conftest import one_app
from tests.common.training.small_model import rows_of
from tests.refusal import refusal


@one_app
def test_training_stops_before_it_saves_steps_of_a_changed_object_and_resumes_with_equal_weights(
    app, tiny_train, command, drawn_records, bucket, tmp_path, monkeypatch
):
    for file in drawn_records.parent.glob("drawn*[!x]"):
        storage.upload(file, f"{bucket}/{file.name}")
    path, flags = f"{bucket}/drawn-00001-of-00003.tfrecord", ("--epochs=1", "--save_every=2", "--seed=4")
    data, flags = f"{bucket}/drawn-", (*flags, "--batch_size=2")
    tiny_train(data, tmp_path / "whole", *flags)

    original, next_batch, steps = storage.read(path), InputFeed.__next__, []

    def change_at_third_step(feed):
        steps.append(feed)
        if len(steps) == 3:
            (tmp_path / "changed").write_bytes(original[700:] + original[:700])
            storage.upload(tmp_path / "changed", path)
        return next_batch(feed)

    with monkeypatch.context() as context:
        context.setattr(InputFeed, "__next__", change_at_third_step)
        message = refusal(tiny_train, data, tmp_path / "stopped", *flags)
    assert message == f"{path} has changed since the check: restore it, or start a new run"
    assert len(steps) == 4
    (tmp_path / "changed").write_bytes(original)
    storage.upload(tmp_path / "changed", path)
    metrics = tiny_train(data, tmp_path / "stopped", *flags)
    assert [row["step"] for row in rows_of(tmp_path / "stopped")] == ["6"]
    a, b = (app.load_trained(tmp_path / name / weights.LAST)[0].weights for name in ("whole", "stopped"))
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=one.path)
    again = command(
        "eval", f"--weights={tmp_path}/stopped", f"--eval_file_pattern={data}*.tfrecord", "--batch_size=4"
    )
    assert {name: again[name] for name in coco_metrics.NAMES} == {
        name: metrics[name] for name in coco_metrics.NAMES
    }
