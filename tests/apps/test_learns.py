import json
import pathlib

import numpy as np
import pytest

from common.data.check.coco import load_coco
from tests.apps.conftest import slow_for
from tests.common.record_writing import write_tfrecords

NUM_IMAGES = 4


@pytest.fixture(scope="module")
def photographs(coco128, tmp_path_factory) -> pathlib.Path:
    """Photographs whose objects are large enough at 192 pixels."""
    found = load_coco(coco128 / "instances.json", None)
    shares = found.boxes_ltwh_px[:, 2:].prod(1) / found.image_sizes.prod(1)[found.box_image]
    unfit = found.box_image[(shares <= 0.02) | found.is_crowd]
    chosen = np.setdiff1d(found.box_image, unfit)[:NUM_IMAGES]
    document = found.select(np.isin(np.arange(found.num_images), chosen)).ground_truth()
    directory = tmp_path_factory.mktemp("photographs")
    (directory / "instances.json").write_text(json.dumps(document))
    (directory / "images").symlink_to(coco128 / "images")
    return directory


@slow_for("efficientdet", "yolov4")
def test_learns_real_photographs(app, tiny_train, photographs, tmp_path):
    data = photographs
    if app.name == "yolov4":
        data, images = tmp_path / "p", photographs / "images"
        write_tfrecords(load_coco(photographs / "instances.json", images), images, str(data), num_shards=2)
    flags = ["--image_size=192", "--epochs=1", f"--steps_per_epoch={app.steps_by_heart}"]
    flags += [f"--hparams={app.by_heart}"]
    metrics = tiny_train(data, tmp_path / "run", *flags, compiled=True)
    assert metrics["AP50"] > 0.9
