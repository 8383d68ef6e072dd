import json
import sys

import numpy as np
import pytest
from absl import flags
from PIL import Image
from pycocotools.coco import COCO

from tests.commands import run
from tests.refusal import refusal
from tests.small_apps import flag_values
from tools import synthetic


@pytest.fixture(scope="module")
def drawing():
    """60 pictures, and for each object the number of pixels before other objects cover it."""
    full_areas, find_place = [], synthetic._find_place

    def recorded_find_place(rng, solid, owner, areas):
        place = find_place(rng, solid, owner, areas)
        full_areas.extend([solid.sum()] * (place is not None))
        return place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_find_place", recorded_find_place)
        return [synthetic.draw_picture(seed=7, index=i) for i in range(60)], np.array(full_areas)


@pytest.fixture(scope="module")
def pictures(drawing):
    return drawing[0]


def test_another_seed_draws_another_synthetic_picture(pictures):
    picture = synthetic.draw_picture(seed=8, index=3)
    assert picture.image.shape != pictures[3].image.shape or (picture.image != pictures[3].image).any()


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    """The directory of four images."""
    return synthetic.draw_dataset(tmp_path_factory.mktemp("synthetic"), num_images=4, seed=3).parent


def test_synthetic_command_for_two_images_draws_the_first_two_of_a_larger_data_set(data_set, tmp_path):
    command = f"tools/synthetic.py --output_dir={tmp_path} --num_images=2 --seed=3".split()
    assert f"drew 2 images: {tmp_path}/instances.json" in run(sys.executable, *command).stdout
    files = sorted((tmp_path / "images").iterdir())
    assert [file.name for file in files] == ["000001.jpg", "000002.jpg"]
    for file in files:
        assert file.read_bytes() == (data_set / "images" / file.name).read_bytes()
    annotations, expected = (
        json.loads((directory / "instances.json").read_text())["annotations"]
        for directory in (tmp_path, data_set)
    )
    assert expected[: len(annotations)] == annotations and len(expected) > len(annotations)


def test_synthetic_data_set_is_valid_coco(data_set):
    coco = COCO(data_set / "instances.json")
    names = [f"{number:06d}.jpg" for number in range(1, 5)]
    assert [image["file_name"] for image in coco.imgs.values()] == names
    assert sorted(file.name for file in (data_set / "images").iterdir()) == names
    for image in coco.imgs.values():
        with Image.open(data_set / "images" / image["file_name"]) as picture:
            assert picture.format == "JPEG"
            assert (picture.height, picture.width) == (image["height"], image["width"])
    for number, annotation in enumerate(coco.dataset["annotations"], 1):
        assert annotation["id"] == number
        assert annotation["category_id"] in coco.cats and annotation["image_id"] in coco.imgs
        assert annotation["iscrowd"] == 0 and annotation["area"] > 0


def test_synthetic_pictures_have_different_sizes_and_some_have_no_object(pictures):
    sides = np.array([p.image.shape[:2] for p in pictures])
    assert len(np.unique(sides, axis=0)) > 50
    assert 240 <= sides.min() < 260 and 620 < sides.max() <= 640
    assert sum(len(p.category_ids) == 0 for p in pictures) in range(1, 10)
    assert max(len(p.category_ids) for p in pictures) == synthetic.MAX_OBJECTS


def test_synthetic_boxes_are_inside_the_image_and_small_medium_and_large(pictures):
    for p in pictures:
        height, width = p.image.shape[:2]
        left, top, w, h = p.boxes_ltwh_px.T
        assert (left >= 0).all() and (top >= 0).all() and (w > 0).all() and (h > 0).all()
        assert (left + w <= width).all() and (top + h <= height).all()
        assert (w <= synthetic.MAX_OBJECT + 1).all() and (h <= synthetic.MAX_OBJECT + 1).all()
        assert (p.areas > 0).all() and (p.areas <= w * h).all()
    areas = np.concatenate([p.areas for p in pictures])
    assert min((areas < 32**2).sum(), (areas > 96**2).sum(), ((areas > 32**2) & (areas < 96**2)).sum()) > 20


def test_synthetic_categories_have_gaps_and_appear_about_equally_often(pictures):
    ids, counts = np.unique(np.concatenate([p.category_ids for p in pictures]), return_counts=True)
    assert set(ids.tolist()) == set(synthetic.CATEGORIES)
    assert counts.max() < 1.6 * counts.min()
    assert np.diff(sorted(synthetic.CATEGORIES)).max() > 1


def test_covered_synthetic_object_shows_at_least_the_minimum_share_of_its_area(drawing):
    pictures, full_areas = drawing
    shares = np.concatenate([p.areas for p in pictures]) / full_areas
    assert shares.min() >= synthetic.MIN_VISIBLE
    assert (shares < 0.9).sum() > 20


def test_synthetic_box_is_the_rectangle_around_the_painted_pixels(monkeypatch):
    """White pixels show where the object is."""
    style = synthetic.STYLES["small"]._replace(objects=(1, 1))
    monkeypatch.setattr(synthetic, "_background", lambda rng, h, w: np.zeros((h, w, 3), np.float32))
    monkeypatch.setattr(synthetic, "_fill", lambda rng, mask, _: np.full((*mask.shape, 3), 255, np.float32))
    monkeypatch.setattr(synthetic, "_cast_shadow", lambda *args: None)
    attempts = [synthetic.draw_picture(11, index, style) for index in range(20)]
    pictures = [picture for picture in attempts if len(picture.category_ids)]
    assert len(pictures) >= 15
    for picture in pictures:
        rows, columns = np.nonzero(picture.image[..., 0] > 127)
        ((left, top, width, height),) = picture.boxes_ltwh_px
        np.testing.assert_allclose([left, top], [columns.min(), rows.min()], atol=1)
        np.testing.assert_allclose([left + width, top + height], [columns.max() + 1, rows.max() + 1], atol=1)
        assert abs(picture.areas[0] - len(rows)) <= 0.05 * len(rows) + 4


def test_synthetic_object_over_the_image_border_shows_at_least_the_minimum_share_of_its_area():
    solid = np.pad(np.ones((30, 10), bool), ((0, 0), (0, 20)))
    for seed in range(50):
        rng = np.random.default_rng(seed)
        top, left = synthetic._find_place(rng, solid, np.full((60, 60), -1), [])
        visible = solid[max(-top, 0) : 60 - top, max(-left, 0) : 60 - left].sum()
        assert visible >= synthetic.MIN_VISIBLE * solid.sum()


SHAPES = [("disk", 0.785), ("ring", 0.548), ("triangle", 0.5), ("cross", 0.51)]


@pytest.mark.parametrize(("name", "share"), SHAPES)
def test_synthetic_shape_fills_the_share_of_its_box_that_geometry_gives(name, share):
    """Geometry gives the shares, such as pi/4 for a disk."""
    rng = np.random.default_rng(0)
    shares = [synthetic._shape_mask(rng, name, (12, 250), 640).mean() / 255 for _ in range(60)]
    if name in ("disk", "ring"):
        np.testing.assert_allclose(shares, share, atol=0.05)
    else:  # these shapes are rotated, and then fill less of their box
        assert abs(np.max(shares) - share) < 0.1


@pytest.mark.parametrize("argument", ["--num_images=0", "--seed=-1"])
def test_synthetic_flag_below_its_minimum_is_refused(argument):
    words = ["tools.synthetic", "--output_dir=x", argument]
    assert argument in refusal(flag_values, *words, error=flags.IllegalFlagValueError)


def test_synthetic_data_do_not_replace_the_json_of_another_data_set(tmp_path):
    path = tmp_path / "instances.json"
    path.write_text('{"images": []}')
    assert "is another data set" in refusal(synthetic.draw_dataset, tmp_path, 1, 0)
    assert path.read_text() == '{"images": []}'


def test_synthetic_output_directory_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file/data: Not a directory" in refusal(synthetic.draw_dataset, tmp_path / "file" / "data", 1, 0)
