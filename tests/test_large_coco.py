"""Draws a small data set with benchmarks/large_coco.py."""

import json

from benchmarks.large_coco import LargeArgs, draw
from common.data.coco import load_coco


def drawn(directory, **options) -> bytes:
    directory.mkdir()
    draw(directory, LargeArgs(num_images=70, num_boxes=500, **options))
    return (directory / "instances.json").read_bytes()


def test_drawn_data_set_has_the_given_numbers_valid_boxes_and_different_images(tmp_path):
    content = drawn(tmp_path / "a")
    annotations = load_coco(tmp_path / "a" / "instances.json", tmp_path / "a" / "images")
    assert (annotations.num_images, annotations.num_boxes) == (70, 500)
    assert [issue.kind for issue in annotations.issues] == ["image-without-boxes"]
    assert len(set(annotations.checksums.tolist())) == 70
    assert all(len(record["segmentation"][0]) >= 8 for record in json.loads(content)["annotations"])


def test_drawn_data_set_depends_on_the_seed_alone(tmp_path):
    first, second, other = (drawn(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert first == second != other
