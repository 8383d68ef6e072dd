"""Two ranks that train from a bucket, and a store that is busy meanwhile."""

import time

import numpy as np
import pytest

from common.data import storage
from tests.common.training.small_model import weights_of
from tests.distributed import launching
from tests.small_apps import TINY

pytestmark = pytest.mark.slow
TIMEOUT = 400
FLAGS = ("--image_size=64x96", "--pipeline_type=dali_cpu", "--num_threads=1", "--batch_size=2", "--epochs=2")
FLAGS += ("--steps_per_epoch=12", "--save_every=2", "--strategy=horovod")


def command(app, data, output_dir):
    words = [f"--model_name={app}-nano", f"--hparams={TINY[app]}", f"--train_file_pattern={data}-*.tfrecord"]
    return [launching.ROOT / app / "train.py", *words, *FLAGS, f"--output_dir={output_dir}"]


def test_two_ranks_train_from_a_bucket_like_from_a_disk_and_resume_after_the_store_was_busy(
    drawn_records, bucket, faults, tmp_path
):
    for file in drawn_records.parent.glob("drawn*[!x]"):
        storage.upload(file, f"{bucket}/{file.name}")
    on_disk = command("yolov4", drawn_records, tmp_path / "disk")
    launching.run_two_replicas("horovod", on_disk, timeout=TIMEOUT)

    words = command("yolov4", f"{bucket}/drawn", tmp_path / "bucket")
    with launching.start(2, words) as job:
        while job.poll() is None and not list(tmp_path.glob("bucket/checkpoints/0*/manifest.json")):
            time.sleep(0.05)
        faults.set("status", 503, count=1)
        result = job.finish(TIMEOUT)
    assert result.returncode == 1
    message = f"error: the loader (dali_cpu) could not read from {bucket}: the store was busy"
    assert result.stderr.count(message) == 1 and "<stderr>:Traceback" not in result.stderr
    (result,) = launching.run_two_replicas("horovod", words, timeout=TIMEOUT)
    assert "resumed after epoch 0" in result.stderr
    weights, expected = (weights_of(tmp_path / name / "last.weights.h5") for name in ("bucket", "disk"))
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
