"""Tests that each app can learn four photographs by heart, which needs correct targets, losses and boxes."""

import json
import pathlib

import numpy as np
import pytest

from common.data.coco import load_coco
from tests.apps.conftest import slow_for
from tests.common.record_writing import write_tfrecords

NUM_IMAGES = 4
HPARAMS = {
    "efficientdet": "augmentation=none,flip_prob=0,warmup_epochs=0.1",
    "yolov4": "jitter=0,flip_prob=0,hue=0,saturation=1,exposure=1,mosaic_prob=0,learning_rate=0.006",
}
STEPS = {"efficientdet": 90, "yolov4": 160}


@pytest.fixture(scope="module")
def photographs(coco128, tmp_path_factory) -> pathlib.Path:
    """Photographs whose objects are large enough at 192 pixels."""
    annotations = load_coco(coco128 / "instances.json", None)
    image_areas = annotations.image_sizes.prod(1)[annotations.box_image]
    shares = annotations.boxes_ltwh_px[:, 2:].prod(1) / image_areas
    unfit = annotations.box_image[(shares <= 0.02) | annotations.is_crowd]
    chosen = np.setdiff1d(annotations.box_image, unfit)[:NUM_IMAGES]
    document = annotations.select(np.isin(np.arange(annotations.num_images), chosen)).ground_truth()
    directory = tmp_path_factory.mktemp("photographs")
    (directory / "instances.json").write_text(json.dumps(document))
    (directory / "images").symlink_to(coco128 / "images")
    return directory


@slow_for("efficientdet", "yolov4")
def test_training_on_four_photographs_reaches_ap50_above_90_percent(app, tiny_train, photographs, tmp_path):
    data = photographs
    if app.name == "yolov4":
        data, images = tmp_path / "p", photographs / "images"
        write_tfrecords(load_coco(photographs / "instances.json", images), images, str(data), num_shards=2)
    flags = ["--image_size=192", "--epochs=1", f"--steps_per_epoch={STEPS[app.name]}"]
    flags += [f"--hparams={HPARAMS[app.name]}"]
    metrics = tiny_train(data, tmp_path / "run", *flags, compiled=True)
    assert metrics["AP50"] > 0.9
