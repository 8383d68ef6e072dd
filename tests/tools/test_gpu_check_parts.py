"""tools/gpu_checks: parts.py, images.py and dali_alone.py on a CPU."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from common.datasets import open_source
from efficientdet.config import get_config as efficientdet_config
from efficientdet.pipeline import EfficientDetPipeline
from tests.conftest import ROOT
from tools.gpu_checks import images, parts
from yolov4.config import get_config as yolov4_config
from yolov4.pipeline import YOLOv4Pipeline

LOADERS = {
    "efficientdet": (EfficientDetPipeline, efficientdet_config("efficientdet-d0")),
    "yolov4": (YOLOv4Pipeline, yolov4_config("yolov4")),
}
ALONE = """
import sys
import numpy
from tools.gpu_checks import parts
loader = parts._loader(sys.argv[1], *sys.argv[2:4], device="cpu", training=True, batch_size=4, num_threads=1)
numpy.savez(sys.argv[4], **parts._batch(loader))
assert not {"h5py", "keras.src", "tensorflow.python", "nvidia.dali.plugin.base_iterator"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kinds")
    images.draw_kinds(directory)
    return directory


@pytest.mark.parametrize("app", LOADERS)
def test_without_tensorflow_the_batch_is_the_same(app, drawn, tmp_path):
    files = [str(drawn / "images"), str(drawn / "instances.json")]
    command = [sys.executable, "-c", ALONE, app, *files, str(tmp_path / "alone.npz")]
    subprocess.run(command, cwd=ROOT, check=True)
    kind, config = LOADERS[app]
    source = open_source(*files, split="")
    loader = kind(source=source, config=config, batch_size=4, training=True, num_threads=1)
    expected, alone = parts._batch(loader), np.load(tmp_path / "alone.npz")
    assert set(alone) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(alone[name], value, err_msg=name)


def test_images_of_every_kind(kinds):
    content = json.loads((kinds / "instances.json").read_bytes())
    opened = {
        images.kind_of(row["id"]): Image.open(kinds / "images" / row["file_name"])
        for row in content["images"]
    }
    assert [opened[kind].mode for kind in ("4:2:0", "grey", "CMYK", "grey PNG")] == ["RGB", "L", "CMYK", "L"]
    # Sampling factors of the first component: 2x2 is 4:2:0, 1x1 is 4:4:4.
    assert [opened[kind].layer[0][1:3] for kind in ("4:2:0", "4:4:4")] == [(2, 2), (1, 1)]
    assert opened["progressive"].info["progressive"] and opened["EXIF"].getexif()[0x0112] == 6
    assert max(row["image_id"] for row in content["annotations"]) <= 2 * len(images.KINDS)


def test_both_graphs_of_a_cpu_are_equal(kinds):
    given = {"app": "yolov4", "images": f"{kinds}/images", "annotations": f"{kinds}/instances.json"}
    words = json.dumps(given | {"training": False, "device": "cpu"})
    command = [sys.executable, "-m", "tools.gpu_checks.parts", "compare", words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(images.KINDS, 0.0)


DIFFERENCES = {
    "pixels": (lambda b: b | {"images": b["images"] + 2 / 255}, "PNG is 2 levels off, more than 0.5"),
    "no number": (lambda b: b | {"images": b["images"] * np.nan}, "4:2:0 is nan levels off, more than 1.5"),
    "boxes": (lambda b: b | {"boxes": b["boxes"] + 0.25}, "boxes differs by up to 0.25"),
}


@pytest.mark.parametrize(("change", "said"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_differs_too_much_is_told(monkeypatch, change, said):
    size = len(images.KINDS)
    batch = {
        "images": np.zeros((size, 4, 4, 3)),
        "boxes": np.zeros((size, 2, 4)),
        "image_ids": np.arange(1, size + 1),
    }
    monkeypatch.setattr(parts, "_loader", lambda *_, device, **__: device)
    monkeypatch.setattr(
        parts, "_batch", lambda device: dict(batch) if device == "cpu" else change(dict(batch))
    )
    result = parts.compare("yolov4", "", "", training=False)
    assert said in result["error"].split("; ") and set(images.KINDS) < set(result)


def test_rates_and_facts(kinds):
    for roi in (False, True):
        found = parts.decode(str(kinds / "images"), load=0.65, roi=roi, device="cpu", seconds=0.1)
        assert found["images_per_second"] > 0 and found["cpu_ms_per_image"] > 0
    facts = parts.facts()
    assert facts["cores"] >= 1 and facts["jpeg_engines"] in (None, *range(20))
