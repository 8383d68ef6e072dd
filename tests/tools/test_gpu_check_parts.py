"""Tests parts.py, images.py and dali_alone.py of tools/gpu_checks on a CPU."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tools.gpu_checks import images, parts

ALONE = """
import json, sys
import numpy
from tools.gpu_checks import parts
numpy.savez(sys.argv[2], **parts._batch(parts._loader(**json.loads(sys.argv[1]))))
assert not {"h5py", "keras.src", "tensorflow.python"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kinds")
    images.draw_kinds(directory)
    return {"images": f"{directory}/images", "annotations": f"{directory}/instances.json"}


@pytest.mark.parametrize("app", ["efficientdet", "yolov4"])
def test_without_tensorflow_the_batch_is_the_same(app, kinds, tmp_path, monkeypatch):
    given = {"app": app, "device": "cpu", "training": True, "batch_size": 4, "num_threads": 1, **kinds}
    command = [sys.executable, "-c", ALONE, json.dumps(given), tmp_path / "alone.npz"]
    subprocess.run(command, cwd=ROOT, check=True)
    monkeypatch.setattr(parts.dali_alone, "install", lambda: None)
    expected, alone = parts._batch(parts._loader(**given)), np.load(tmp_path / "alone.npz")
    assert set(alone) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(alone[name], value, err_msg=name)


def test_the_parts_run_on_a_cpu(kinds, monkeypatch):
    for given in ({"what": "compare", "app": "yolov4", "training": False, **kinds}, {"what": "facts"}):
        what, device = given.pop("what"), {"device": "cpu"} if len(given) > 1 else {}
        command = [sys.executable, "-m", "tools.gpu_checks.parts", what, json.dumps(given | device)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == dict.fromkeys(images.KINDS, 0.0) if device else ("gpus" in found) ^ ("error" in found)
    assert parts.nccl().get("nccl") or parts.nccl() == {"error": "Horovod has no NCCL"}
    assert parts.tensorflow("CPU").keys() == {"cuda", "cudnn"} and "error" in parts.tensorflow("NO")
    monkeypatch.setattr(parts.dali_alone, "install", lambda: None)
    found = parts.decode(**kinds, load=0.65, roi=True, device="cpu")
    assert found["images_per_second"] > 0 and found["cpu_ms_per_image"] > 0


def test_images_of_every_kind(kinds):
    with open(kinds["annotations"]) as file:
        content = json.load(file)
    files = {images.kind_of(row["id"]): f"{kinds['images']}/{row['file_name']}" for row in content["images"]}
    opened = {kind: Image.open(path) for kind, path in files.items()}
    assert [opened[kind].mode for kind in ("4:2:0", "grey", "CMYK", "grey PNG")] == ["RGB", "L", "CMYK", "L"]
    # Sampling factors of the first component: 2x2 is 4:2:0, 1x1 is 4:4:4.
    assert [opened[kind].layer[0][1:3] for kind in ("4:2:0", "4:4:4")] == [(2, 2), (1, 1)]
    assert opened["progressive"].info["progressive"] and opened["EXIF"].getexif()[0x0112] == 6
    assert max(row["image_id"] for row in content["annotations"]) <= 2 * len(images.KINDS)


TOO_DIFFERENT = [
    ("images", 2 / 255, "PNG is 2 levels off, more than 0.5"),
    ("images", np.nan, "4:2:0 is nan levels off, more than 1.5"),
    ("boxes", 0.25, "boxes differs by up to 0.25"),
]


@pytest.mark.parametrize(("name", "change", "said"), TOO_DIFFERENT)
def test_what_differs_too_much_is_told(monkeypatch, name, change, said):
    size = len(images.KINDS)
    batch = {"images": np.zeros((size, 4, 4, 3)), "boxes": np.zeros((size, 2, 4))}
    batches = {"cpu": batch, "gpu": batch | {name: batch[name] + change}}
    monkeypatch.setattr(parts, "_loader", lambda *_, device, **__: device)
    monkeypatch.setattr(
        parts, "_batch", lambda device: batches[device] | {"image_ids": np.arange(1, size + 1)}
    )
    assert said in parts.compare("yolov4", "", "", training=False)["error"].split("; ")
