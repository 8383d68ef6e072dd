"""The training command learns photographs by heart: from COCO json by DALI, from TFRecords by tf.data."""

import json
import pathlib

import pytest

from common.datacheck.coco import load_coco
from tools.conversion.coco_to_tfrecord import write_tfrecords

NUM_IMAGES = 4


@pytest.fixture(scope="module")
def photographs(coco128, tmp_path_factory) -> pathlib.Path:
    """A directory of the first photographs whose objects are all large enough for 192 pixels."""
    document = json.loads((coco128 / "instances.json").read_text())
    chosen = []
    for image in document["images"]:
        objects = [a for a in document["annotations"] if a["image_id"] == image["id"]]
        smallest = min((a["bbox"][2] * a["bbox"][3] for a in objects), default=0)
        if smallest > 0.02 * image["width"] * image["height"] and not any(a["iscrowd"] for a in objects):
            chosen.append(image["id"])
    document["images"] = [image for image in document["images"] if image["id"] in chosen[:NUM_IMAGES]]
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] in chosen[:NUM_IMAGES]]
    directory = tmp_path_factory.mktemp("photographs")
    (directory / "instances.json").write_text(json.dumps(document))
    (directory / "images").symlink_to(coco128 / "images")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "pipeline_type"),
    [("efficientdet", "dali_cpu"), ("yolov4", "dali_cpu"), ("yolov4", "tensorflow")],
    indirect=["app"],
)
def test_learns_real_photographs(app, tiny_train, photographs, tmp_path, pipeline_type):
    data = photographs
    if pipeline_type == "tensorflow":
        data, images = tmp_path / "p", photographs / "images"
        write_tfrecords(load_coco(photographs / "instances.json", images), images, str(data), num_shards=2)
    flags = ["--image_size=192", "--epochs=1", f"--steps_per_epoch={app.steps_by_heart}"]
    flags += [f"--hparams={app.by_heart}"]
    metrics = tiny_train(data, tmp_path / "run", *flags, f"--pipeline_type={pipeline_type}", compiled=True)
    assert metrics["AP50"] > 0.9
