"""The walkthroughs of examples/: a picture of each station, from whatever data the model was trained on."""

import importlib

import numpy as np
import PIL.Image

from tests.apps.conftest import eagerly, slow_for
from tests.refusal import refusal

PICTURES = ("1_network_input", "3_targets", "5_candidates", "6_detections")


@slow_for("efficientdet")
def test_every_station_has_its_picture(app, trained, drawn, tmp_path, capsys):
    walkthrough = importlib.import_module(f"examples.{app.name}_walkthrough")
    data = {"images": f"{drawn}/images", "annotations": f"{drawn}/instances.json"}
    with eagerly():
        walkthrough.walk(weights=str(trained), **data, output_dir=str(tmp_path / "walk"))
    said = capsys.readouterr().out
    made = {path.stem for path in (tmp_path / "walk").iterdir()}
    assert made > set(PICTURES)
    assert len(made) == 6
    for name in made:
        assert f"{name}.png: " in said
        with PIL.Image.open(tmp_path / "walk" / f"{name}.png") as picture:
            assert picture.width == 1280
            assert np.asarray(picture).std() > 5
    assert "detection_loss" in said


def test_flags_that_are_missing(app, trained, drawn, tmp_path):
    walkthrough = importlib.import_module(f"examples.{app.name}_walkthrough")
    given = {"weights": str(trained), "images": f"{drawn}/images", "annotations": f"{drawn}/instances.json"}
    given["output_dir"] = str(tmp_path / "walk")
    for name, message in (
        ("output_dir", "--output_dir is missing"),
        ("weights", "--weights is missing"),
        ("annotations", "--images is given without --annotations"),
    ):
        assert message in refusal(walkthrough.walk, **given | {name: None})
    assert not (tmp_path / "walk").exists()
