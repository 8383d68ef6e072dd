"""Tests tiled_inference.py: where tiles lie, what they hold, how their detections are merged, and the AP."""

import json

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import PIL.Image
import pytest

from common.evaluation import coco_metrics
from examples.tiled_inference import corners, cut, detect_objects, merge
from tests.conftest import ROOT
from tests.refusal import refusal
from tests.small_apps import eagerly, flag_values
from tools import synthetic


def test_tiles_cover_the_image_and_one_of_them_has_each_object_that_is_shorter_than_the_overlap():
    rng = np.random.default_rng(1)
    for _ in range(200):
        tile, overlap = rng.integers(32, 64, 2), int(rng.integers(0, 32))
        size = rng.integers(tile + 1, 300)
        top_left = corners(tuple(size), tuple(tile), overlap)
        assert (top_left >= 0).all() and (top_left + tile <= size).all()
        covered = np.zeros(size, bool)
        for top, left in top_left:
            covered[top : top + tile[0], left : left + tile[1]] = True
        assert covered.all()
        side = rng.integers(0, overlap + 1, (50, 2))
        start = (rng.random((50, 2)) * (size - side + 1)).astype(int)
        is_inside = (top_left <= start[:, None]) & (start[:, None] + side[:, None] <= top_left + tile)
        assert is_inside.all(axis=2).any(axis=1).all()
    assert corners((20, 300), (32, 32), 8).tolist()[0] == [0, 0]  # an image that is lower than a tile


def test_cut_tiles_have_the_pixels_of_the_image_and_grey_outside():
    image = np.random.default_rng(0).integers(0, 255, (40, 90, 3), np.uint8)
    top_left = corners((40, 90), (48, 32), 8)
    padded = np.pad(image, ((0, 8), (0, 0), (0, 0)), constant_values=114)
    tiles = cut(ndd.as_tensor(image), top_left, (48, 32))
    assert len(tiles) == 4
    for (top, left), tile in zip(top_left, tiles, strict=True):
        np.testing.assert_array_equal(tile, padded[top : top + 48, left : left + 32])


LEFT_TILE, RIGHT_TILE = (0, 0, 100, 100), (80, 0, 180, 100)  # of an image of 100 x 180 pixels
CASES = {
    # name: (boxes, scores, classes, tiles), indices of the boxes that stay
    "a cut box beside a whole one, in spite of its score": (
        [[90, 10, 100, 22], [90, 10, 102, 22]],
        [0.9, 0.5],
        [0, 0],
        [LEFT_TILE, RIGHT_TILE],
        [1],
    ),
    "a small piece of a whole box": (
        [[98, 10, 100, 22], [90, 10, 102, 22]],
        [0.9, 0.5],
        [0, 0],
        [LEFT_TILE, RIGHT_TILE],
        [1],
    ),
    "a cut box of another class": (
        [[90, 10, 100, 22], [90, 10, 102, 22]],
        [0.9, 0.5],
        [1, 0],
        [LEFT_TILE, RIGHT_TILE],
        [0, 1],
    ),
    "two pieces of an object that no tile holds": (
        [[60, 10, 100, 22], [80, 10, 120, 22]],
        [0.4, 0.5],
        [0, 0],
        [LEFT_TILE, RIGHT_TILE],
        [1, 0],
    ),
    "a box at the image's border": (
        [[170, 90, 180, 100], [0, 0, 9, 9]],
        [0.4, 0.5],
        [0, 0],
        [RIGHT_TILE, LEFT_TILE],
        [1, 0],
    ),
    "the same whole object in both tiles": (
        [[84, 10, 96, 22], [84, 11, 96, 23]],
        [0.4, 0.5],
        [0, 0],
        [LEFT_TILE, RIGHT_TILE],
        [1],
    ),
    "no box": ([], [], [], [], []),
}


@pytest.mark.parametrize(
    ("boxes", "scores", "classes", "tiles", "expected"), [(*case,) for case in CASES.values()], ids=CASES
)
def test_merging_tiles_keeps_one_box_for_each_object(boxes, scores, classes, tiles, expected):
    boxes, tiles = (np.array(each, np.float32).reshape(-1, 4) for each in (boxes, tiles))
    arrays = boxes, np.array(scores, np.float32), np.array(classes, np.int32), tiles
    assert merge(*arrays, (100, 180), iou=0.5).tolist() == expected


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A directory with an image of 640 x 768 pixels, and its json."""
    directory = tmp_path_factory.mktemp("large")
    canvas, annotations = np.zeros((640, 768, 3), np.uint8), []
    sizes = {"heights": (128, 128), "widths": (128, 128), "sides": (24, 60)}
    style = synthetic.STYLES["small"]._replace(**sizes, objects=(1, 2))
    for index, (top, left) in enumerate((y, x) for y in range(0, 640, 128) for x in range(0, 768, 128)):
        picture = synthetic.draw_picture(5, index, style)
        canvas[top : top + 128, left : left + 128] = picture.image
        for box, category_id in zip(
            picture.boxes_ltwh_px + [left, top, 0, 0], picture.category_ids, strict=True
        ):
            annotations.append({"image_id": 1, "category_id": int(category_id), "bbox": box.tolist()})
    (directory / "images").mkdir()
    PIL.Image.fromarray(canvas).save(directory / "images" / "large.png")
    categories = [{"id": key, "name": name} for key, name in synthetic.CATEGORIES.items()]
    images = [{"id": 1, "file_name": "large.png", "height": 640, "width": 768}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (directory / "instances.json").write_text(json.dumps(document))
    return directory


def run(app, directory, tmp_path, *arguments):
    flags = [f"--weights={ROOT}/{app}/demo.weights.h5", f"--images={directory}/images", "--nodraw"]
    flags += [f"--annotations={directory}/instances.json", f"--output_dir={tmp_path}"]
    flags += ["--score_threshold=0.01"]
    module, values = flag_values("examples.tiled_inference", *flags, *arguments)
    with eagerly():
        return detect_objects(module.Args(**values))


@pytest.mark.parametrize("app", [pytest.param("efficientdet", marks=pytest.mark.slow), "yolov4"])
def test_ap_of_each_app_with_tiles_is_higher_than_on_the_whole_image(app, large, tmp_path, capsys):
    truth = json.loads((large / "instances.json").read_text())
    run(app, large, tmp_path, "--tile=192")
    with_tiles = coco_metrics.score(truth, json.loads((tmp_path / "detections.json").read_text()))
    whole = coco_metrics.score(truth, run(app, large, tmp_path, "--tile=768"))
    assert with_tiles.metrics["AP"] > whole.metrics["AP"] + 0.3
    assert f"AP {100 * with_tiles.metrics['AP']:9.1f}\n" in capsys.readouterr().out


def test_overlap_as_large_as_a_tile_is_refused(large, tmp_path):
    message = refusal(run, "yolov4", large, tmp_path, "--tile=64")
    assert message == "--overlap=64: the tiles of 64x64 pixels must be larger"


def test_damaged_image_is_an_error_in_one_line_that_names_it(large, tmp_path):
    content = (large / "images/large.png").read_bytes()
    middle = len(content) // 2
    (tmp_path / "images").mkdir()
    (tmp_path / "images/large.png").write_bytes(content[:middle] + bytes(20) + content[middle + 20 :])
    (tmp_path / "instances.json").write_bytes((large / "instances.json").read_bytes())
    message = refusal(run, "yolov4", tmp_path, tmp_path / "out")
    assert message.startswith(f"images: image with damaged data: '{tmp_path}/images/large.png'")
