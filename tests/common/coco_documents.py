"""COCO documents, changed copies of them, and the comparison of Annotations with a document."""

import copy
import functools
import json
import operator
import pathlib

import numpy as np
import PIL.Image
import pytest

from common.data.check.images import ImagePolicy
from common.data.check.issues import DataError
from common.data.coco import load_coco

SMALL = {
    "info": {"year": 2017},
    "images": [
        {"id": 42, "file_name": "a.jpg", "width": 20, "height": 10, "license": 3},
        {"id": 7, "file_name": "sub/b.jpg", "width": 30, "height": 40},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 9, "bbox": [1, 2, 3.5, 4], "area": 12.5, "iscrowd": 0},
        {"id": 5, "image_id": 42, "category_id": 2, "bbox": [0, 0, 20, 10], "area": 99, "iscrowd": 1},
        {"id": 3, "image_id": 7, "category_id": 2, "bbox": [0.25, 0, 2, 2], "area": 4, "iscrowd": 0},
        {"id": 8, "image_id": 42, "category_id": 2, "bbox": [0, 0, 5, 6], "segmentation": [[0, 0, 5, 0]]},
    ],
    "categories": [{"id": 2, "name": "two", "supercategory": "x"}, {"id": 9, "name": "nine"}],
}
LARGE = 2**63 - 1


def draw_images(directory):
    (directory / "sub").mkdir()
    for image in SMALL["images"]:
        pixels = np.random.default_rng(image["width"]).integers(0, 255, (image["height"], image["width"], 3))
        PIL.Image.fromarray(pixels.astype(np.uint8)).save(directory / image["file_name"])
    return directory


def write_json(directory: pathlib.Path, document) -> pathlib.Path:
    """`document` is a dict, text or bytes."""
    path = directory / "instances.json"
    if isinstance(document, dict):
        document = json.dumps(document)
    path.write_bytes(document.encode() if isinstance(document, str) else document)
    return path


def changed(path, value, document=SMALL):
    """Returns a copy with `value` at `path`. If `value` is `...`, deletes the key at `path`."""
    document = copy.deepcopy(document)
    parent = functools.reduce(operator.getitem, path[:-1], document)
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return document


def refused(path, images_dir=None, **policy):
    """Asserts that load_coco refuses a json. Returns the errors as {kind: issue}."""
    with pytest.raises(DataError) as error:
        load_coco(path, images_dir, policy=ImagePolicy(**policy))
    (issues,) = error.value.issues
    assert issues.origin == str(path)
    stopping = {issue.kind: issue for issue in issues.stopping}
    assert all(f"{path}: {issue.line()}" in str(error.value) for issue in stopping.values())
    return stopping


def assert_is(annotations, document):
    """Compares annotations with a document that plain loops read."""
    images, objects = document["images"], document["annotations"]
    assert annotations.image_ids.tolist() == [image["id"] for image in images]
    assert annotations.file_names == [image["file_name"] for image in images]
    assert annotations.image_sizes.tolist() == [[image["height"], image["width"]] for image in images]
    categories = sorted((c["id"], c["name"]) for c in document["categories"])
    assert [(c["id"], c["name"]) for c in annotations.label_map.categories()] == categories
    pairs = [(i, o) for i, image in enumerate(images) for o in objects if o["image_id"] == image["id"]]
    assert len(pairs) == len(objects) and annotations.box_image.tolist() == [i for i, _ in pairs]
    objects = [o for _, o in pairs]
    boxes = [list(map(float, o["bbox"])) for o in objects]
    assert annotations.boxes_ltwh_px.tolist() == boxes
    assert annotations.category_ids.tolist() == [o["category_id"] for o in objects]
    assert annotations.is_crowd.tolist() == [bool(o.get("iscrowd", 0)) for o in objects]
    for area, o, (_, _, width, height) in zip(annotations.areas.tolist(), objects, boxes, strict=True):
        assert area == (width * height if o.get("area") is None else float(o["area"]))
