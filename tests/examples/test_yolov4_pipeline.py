"""Tests yolov4_pipeline.py: batches equal those of the app, bit for bit. Also bad input to both pipelines."""

import dataclasses
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from examples import yolov4_pipeline
from tests.conftest import ROOT
from tests.examples.standalone import arrays, assert_same_batch, run_alone
from yolov4.config import get_config
from yolov4.pipeline import YOLOv4Pipeline

BATCH, STEPS = 10, 4  # a shard has a third of 100 images: step 4 begins its next epoch
# (fields of both configs, (shard_id, num_shards), file format)
VARIANTS = (
    ({"image_size": (128, 192), "letterbox": True, "max_instances": 15}, (0, 1), "coco"),
    ({"image_size": (96, 96), "min_box_size": 3.0, "flip_prob": 0.0, "hue": 0.0}, (1, 3), "tfrecord"),
    ({"image_size": (160, 64), "letterbox": True, "jitter": 0.1, "hue": 90.0}, (2, 3), "tfrecord"),
    ({"image_size": (64, 128), "max_instances": 1, "saturation": 3.0, "exposure": 1.1}, (0, 2), "coco"),
)


@pytest.mark.parametrize("seed", range(len(VARIANTS)))
@pytest.mark.parametrize("mosaic_prob", [0.0, 0.6])
def test_example_pipeline_with_and_without_mosaic_gives_the_batches_of_the_yolov4_app(
    data, mosaic_prob, seed
):
    fields, shard, reader = VARIANTS[seed]
    fields = fields | {"mosaic_prob": mosaic_prob}
    source, files = data[reader]
    config = dataclasses.replace(get_config("yolov4"), multi_scale=1.0, **fields)
    options = {"source": source, "config": config, "batch_size": BATCH, "training": True, "seed": seed}
    app = YOLOv4Pipeline(**options, shard_id=shard[0], num_shards=shard[1], shuffle="buffer")
    example_config = yolov4_pipeline.Config(**files, **fields, batch_size=BATCH, seed=seed)
    pipeline = yolov4_pipeline.make_pipeline(example_config, *shard)
    for step in range(STEPS):
        assert_same_batch(pipeline, app, f"step {step}")


def test_yolov4_example_dataset_gives_each_output_of_its_dali_pipeline_under_its_name(data):
    fields = {"image_size": (64, 96), "jitter": 0.0, "hue": 0.0, "saturation": 1.0, "exposure": 1.0}
    config = yolov4_pipeline.Config(**data["coco"][1], **fields, batch_size=4)
    batches = iter(yolov4_pipeline.make_dataset(config, 1, 2))
    pipeline = yolov4_pipeline.make_pipeline(config, 1, 2)
    for images, targets in [next(batches) for _ in range(2)]:
        assert list(targets) == ["boxes", "classes", "num_boxes"]
        for tensor, expected in zip([images, *targets.values()], arrays(pipeline), strict=True):
            np.testing.assert_array_equal(tensor, expected.reshape(tensor.shape))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param("efficientdet_pipeline.py --crop=center", "invalid choice: 'center'", id="unknown-crop"),
        pytest.param(
            "efficientdet_pipeline.py --annotations=JSON --file_pattern=../*.toml",
            "pyproject.toml.idx: No such",
            id="missing-index-file",
        ),
        pytest.param(
            "yolov4_pipeline.py --annotations=JSON --file_pattern=no-*",
            "file_pattern=no-* matches no file",
            id="pattern-of-no-file",
        ),
        pytest.param("yolov4_pipeline.py --annotations=JSON", "either --images or", id="missing-images-flag"),
        pytest.param(
            "yolov4_pipeline.py --annotations=JSON --images=nowhere",
            "failed: nowhere/",
            id="missing-images-directory",
        ),
        pytest.param(
            "yolov4_pipeline.py --annotations=../Makefile --images=.",
            "Makefile is not a COCO json",
            id="annotations-not-json",
        ),
        pytest.param(
            "yolov4_pipeline.py --mosaic_prob=2", "mosaic_prob=2.0: use 0 to 1", id="mosaic_prob-above-1"
        ),
    ],
)
def test_bad_input_of_a_pipeline_example_is_reported_in_one_line(data, command, message):
    words = command.replace("JSON", data["coco"][1]["annotations"]).split()
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT / "examples")
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert message in result.stderr


@pytest.mark.parametrize("reader", ["synthetic", "tfrecord"])
def test_copied_yolov4_pipeline_example_writes_a_batch_picture_without_other_project_files(
    data, reader, tmp_path
):
    files = {} if reader == "synthetic" else data[reader][1]
    flags = [f"--{flag}={value}" for flag, value in files.items()]
    run_alone("yolov4_pipeline.py", tmp_path, "--letterbox", "--image_size", 128, 192, *flags)
    picture = np.asarray(PIL.Image.open(tmp_path / "alone" / "batch.png"))
    assert picture.shape == (2 * 128, 4 * 192, 3)
    assert (picture == (255, 0, 0)).all(-1).sum() > 500
    assert len((ROOT / "examples/yolov4_pipeline.py").read_text().splitlines()) <= 300
