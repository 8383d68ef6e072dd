"""The training command learns photographs by heart: from COCO json by DALI, from TFRecords by tf.data."""

import json
import pathlib

import pytest

from common.datacheck.coco import load_coco
from tools.conversion.coco_to_tfrecord import write_tfrecords

NUM_IMAGES = 4


@pytest.fixture(scope="module")
def photographs(coco128, tmp_path_factory) -> pathlib.Path:
    """A json of the first photographs whose objects are all large enough for 192 pixels."""
    document = json.loads((coco128 / "instances.json").read_text())
    chosen = []
    for image in document["images"]:
        objects = [a for a in document["annotations"] if a["image_id"] == image["id"]]
        smallest = min((a["bbox"][2] * a["bbox"][3] for a in objects), default=0)
        if smallest > 0.02 * image["width"] * image["height"] and not any(a["iscrowd"] for a in objects):
            chosen.append(image["id"])
    chosen = set(chosen[:NUM_IMAGES])
    document["images"] = [image for image in document["images"] if image["id"] in chosen]
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] in chosen]
    path = tmp_path_factory.mktemp("photographs") / "instances.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pipeline_type"), [("coco", "dali_cpu"), ("tfrecord", "tensorflow")])
def test_learns_real_photographs(app, command, coco128, photographs, tmp_path, kind, pipeline_type):
    if (app.name, kind) == ("efficientdet", "tfrecord"):
        pytest.skip("the slower of the two apps learns by one loader; its twin gives the same batches")
    if kind == "coco":
        data = [
            f"--{split}_{what}"
            for split in ("train", "eval")
            for what in (f"images={coco128}/images", f"annotations={photographs}")
        ]
    else:
        annotations = load_coco(photographs, coco128 / "images")
        write_tfrecords(annotations, coco128 / "images", str(tmp_path / "p"), num_shards=2)
        data = [f"--{split}_file_pattern={tmp_path}/p*.tfrecord" for split in ("train", "eval")]
    metrics = command(
        "train",
        *data,
        f"--model_name={app.model_name}",
        "--image_size=192",
        f"--batch_size={NUM_IMAGES}",
        f"--pipeline_type={pipeline_type}",
        f"--steps_per_epoch={app.steps_by_heart}",
        "--epochs=1",
        f"--hparams={app.by_heart}",
        f"--output_dir={tmp_path}/run",
    )
    assert metrics["AP50"] > 0.9
