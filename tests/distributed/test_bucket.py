"""Two ranks that train from a bucket, and a store that is busy meanwhile.

tests/apps/test_bucket.py compares the weights of one such process with those of a run without faults.
"""

import time

import numpy as np
import pytest

from common.data import storage
from tests.common.training.small_model import rows_of
from tests.distributed import launching
from tests.small_apps import TINY

pytestmark = pytest.mark.slow
TIMEOUT = 400
FLAGS = ("--image_size=64x96", "--pipeline_type=dali_cpu", "--num_threads=1", "--batch_size=2", "--epochs=2")
FLAGS += ("--steps_per_epoch=12", "--save_every=2", "--strategy=horovod")


def test_busy_store_ends_two_ranks_with_one_message_and_the_same_command_resumes_them(
    drawn_records, bucket, faults, tmp_path
):
    for file in drawn_records.parent.glob("drawn*[!x]"):
        storage.upload(file, f"{bucket}/{file.name}")
    model = ["--model_name=yolov4-nano", f"--hparams={TINY['yolov4']}"]
    data = f"--train_file_pattern={bucket}/drawn-*.tfrecord"
    words = [launching.ROOT / "yolov4/train.py", *model, data, *FLAGS, f"--output_dir={tmp_path}/run"]
    with launching.start(2, words) as job:
        while job.poll() is None and not list(tmp_path.glob("run/checkpoints/0*/manifest.json")):
            time.sleep(0.05)
        faults.set("status", 503, count=1)
        result = job.finish(TIMEOUT)
    assert result.returncode == 1
    message = f"error: the loader (dali_cpu) could not read from {bucket}: the store was busy"
    assert result.stderr.count(message) == 1 and "<stderr>:Traceback" not in result.stderr
    (result,) = launching.run_two_replicas("horovod", words, timeout=TIMEOUT)
    assert "resumed after epoch 0" in result.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == ["12", "24"]
    assert all(np.isfinite(float(row["loss"])) for row in rows)
