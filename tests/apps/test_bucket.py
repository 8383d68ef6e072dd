"""Training from TFRecords in a bucket: exact resuming after faults of the store."""

import numpy as np

from common.data import storage
from common.data.open import open_tfrecords
from common.evaluation import coco_metrics
from common.training.input_feed import InputFeed
from common.weights import weight_files as weights
from tests.apps.conftest import one_app
from tests.common.training.small_model import rows_of
from tests.refusal import refusal


@one_app
def test_training_that_a_busy_store_and_then_a_changed_object_stop_resumes_with_equal_weights(
    app, tiny_train, command, drawn_records, bucket, faults, tmp_path, monkeypatch
):
    for file in drawn_records.parent.glob("drawn*[!x]"):
        storage.upload(file, f"{bucket}/{file.name}")
    path, flags = f"{bucket}/drawn-00001-of-00003.tfrecord", ("--epochs=1", "--save_every=2", "--seed=4")
    data, flags = f"{bucket}/drawn-", (*flags, "--batch_size=2")
    tiny_train(data, tmp_path / "whole", *flags)

    original, next_batch, steps = storage.read(path), InputFeed.__next__, []

    def stopped_training(at: int, act) -> str:
        """Trains, and calls `act` before batch `at`. Returns the message with which training stops."""
        steps.clear()

        def counted_next(feed):
            steps.append(feed)
            if len(steps) == at:
                act()
            return next_batch(feed)

        with monkeypatch.context() as context:
            context.setattr(InputFeed, "__next__", counted_next)
            return refusal(tiny_train, data, tmp_path / "stopped", *flags)

    def change() -> None:
        (tmp_path / "changed").write_bytes(original[700:] + original[:700])
        storage.upload(tmp_path / "changed", path)

    message = stopped_training(3, lambda: faults.set("status", 503, count=1))
    reason = "the store was busy, or cut an answer off; DALI cannot repeat such a request"
    advice = "Now all objects can be read: run the same command again, which resumes the run"
    assert message == f"the loader (dali_cpu) could not read from {bucket}: {reason}. {advice}"
    assert len(steps) in (4, 5)  # the next batches were already loaded
    message = stopped_training(1, change)
    assert message == f"{path} has changed since the check: restore it, or start a new run"
    assert len(steps) <= 2
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


@one_app
def test_loader_that_is_opened_while_the_store_is_busy_is_refused_and_does_not_end_the_process(
    app, drawn_records, bucket, faults
):
    storage.upload(f"{drawn_records}-00001-of-00003.tfrecord", f"{bucket}/drawn.tfrecord")
    source = open_tfrecords(f"{bucket}/drawn.tfrecord", f"{drawn_records}.label_map.json")
    options = {"config": app.package.config.get_config(app.model_name), "batch_size": 2, "training": False}
    loader = app.make_loader("dali_cpu", source=source, **options)
    faults.set("status", 503, request="/")
    message = refusal(loader.iterator)
    assert message.startswith(f"{bucket}/drawn.tfrecord: ") and "HTTP status 503" in message
    faults.clear()
    next(loader.iterator())
