"""Runs docs/tutorial.ipynb and checks its pictures and the values of its variables."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.notebook import run_cells

PATH = ROOT / "docs/tutorial.ipynb"
PICTURES = 13


def pictures_of(notebook: dict) -> list[Image.Image]:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    files = [output["data"]["image/png"] for output in outputs if "data" in output]
    return [Image.open(io.BytesIO(base64.b64decode(file))) for file in files]


def test_committed_tutorial_notebook_has_outputs_and_no_paths_of_this_machine():
    notebook = json.loads(PATH.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len(pictures_of(notebook)) == PICTURES
    assert PATH.stat().st_size < 2e6
    lines = [line for cell in code for output in cell["outputs"] for line in output.get("text", ())]
    assert lines and not [line for line in lines if "/" in line]


@pytest.mark.slow
@pytest.mark.parametrize("images", ["synthetic", "user"])
def test_tutorial_notebook_runs_on_synthetic_images_and_on_images_of_the_user(images, drawn, monkeypatch):
    monkeypatch.chdir(PATH.parent)
    notebook, names = json.loads(PATH.read_text()), {}
    if images == "user":
        settings = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        text = "".join(settings["source"])
        for old, new in {
            'IMAGES = ""': f'IMAGES = "{drawn}/images"',
            'ANNOTATIONS = ""': f'ANNOTATIONS = "{drawn}/instances.json"',
            "NUMBER = 8": "NUMBER = 1",
        }.items():
            assert old in text
            text = text.replace(old, new)
        settings["source"] = [text]
    run_cells(notebook, names)
    pictures = pictures_of(notebook)
    assert len(pictures) == PICTURES
    assert all(np.asarray(picture.convert("RGB")).std() > 5 for picture in pictures)
    check_stages(names)
    assert (names["source"].size == 24) == (images == "synthetic")


def check_stages(names: dict) -> None:
    """Checks the notebook's variables `names`: crop, resize, flip, padding, targets, losses and mosaics."""
    top, left, height, width = names["window"]
    window = names["stored"][top : top + height, left : left + width]
    np.testing.assert_array_equal(names["cropped"], window)
    assert names["resized"].shape == (*names["new_size"], 3)
    np.testing.assert_array_equal(names["flipped"], names["resized"][:, ::-1])
    rows, columns = names["new_size"]
    np.testing.assert_array_equal(names["pixels"][:rows, :columns], names["flipped"])
    assert not names["network_input"][rows:].any() and not names["network_input"][:, columns:].any()

    boxes, targets = names["boxes"], names["targets"]
    assert len(boxes) and len(names["found"]) == len(boxes)
    assert names["distance"].min(1).max() * 512 < 0.01
    assert len(names["decoded"]) == targets["num_positives"]
    for part, total in ((names["class_parts"], "class_loss"), (names["box_parts"], "box_loss")):
        weight = names["config"].box_loss_weight if total == "box_loss" else 1
        np.testing.assert_allclose(sum(part), weight * names["untrained"][total], rtol=1e-4)
    assert names["perfect"]["detection_loss"] < 0.05 * names["untrained"]["detection_loss"]

    for mosaic, boxes_px, (cut_y, cut_x), sources in zip(
        names["pasted"], names["boxes_px"], names["cuts"], names["sources"], strict=True
    ):
        for box in boxes_px:
            assert (box[0] >= cut_x or box[2] <= cut_x) and (box[1] >= cut_y or box[3] <= cut_y)
        upper_left = mosaic[:cut_y, :cut_x]
        canvas = names["canvases"][sources[0]]
        starts = [(y, x) for y in range(416 - cut_y + 1) for x in range(416 - cut_x + 1)]
        assert any(np.array_equal(canvas[y : y + cut_y, x : x + cut_x], upper_left) for y, x in starts)
