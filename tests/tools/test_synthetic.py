"""Drawn data: valid COCO, true boxes and areas, all sizes and classes, the same bytes for the same seed."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from absl import flags
from PIL import Image
from pycocotools.coco import COCO

from common.errors import UserError
from tools import synthetic

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures():
    return [synthetic.draw_picture(seed=7, index=i) for i in range(120)]


def test_a_picture_depends_on_seed_and_index_alone(pictures):
    again = synthetic.draw_picture(seed=7, index=3)
    np.testing.assert_array_equal(again.image, pictures[3].image)
    np.testing.assert_array_equal(again.boxes_ltwh_px, pictures[3].boxes_ltwh_px)
    other_seed = synthetic.draw_picture(seed=8, index=3)
    assert other_seed.image.shape != pictures[3].image.shape or (other_seed.image != pictures[3].image).any()


def test_the_files_are_valid_and_fewer_images_are_the_beginning_of_more(tmp_path):
    coco = COCO(synthetic.draw_dataset(tmp_path / "a", num_images=6, seed=1))
    synthetic.draw_dataset(tmp_path / "short", num_images=3, seed=1)
    a, short = (
        {p.relative_to(tmp_path / d): p.read_bytes() for p in (tmp_path / d).rglob("*.*")}
        for d in ("a", "short")
    )
    assert {k: v for k, v in short.items() if k.suffix == ".jpg"}.items() <= a.items()
    long, brief = (json.loads(x[pathlib.Path("instances.json")]) for x in (a, short))
    assert long["annotations"][: len(brief["annotations"])] == brief["annotations"]
    assert sorted(image["file_name"] for image in coco.imgs.values()) == [f"{i:06d}.jpg" for i in range(1, 7)]
    for image in coco.imgs.values():
        with Image.open(tmp_path / "a" / "images" / image["file_name"]) as picture:
            assert picture.format == "JPEG"
            assert (picture.height, picture.width) == (image["height"], image["width"])
    for number, annotation in enumerate(long["annotations"], 1):
        assert annotation["id"] == number
        assert annotation["category_id"] in coco.cats and annotation["image_id"] in coco.imgs
        assert annotation["iscrowd"] == 0 and annotation["area"] > 0


def test_images_have_different_sizes_and_some_are_empty(pictures):
    shapes = {p.image.shape for p in pictures}
    assert len(shapes) > 100
    sides = np.array([shape[:2] for shape in shapes])
    assert sides.min() >= 240 and sides.max() <= 640
    assert sum(len(p.category_ids) == 0 for p in pictures) in range(1, 15)  # 5 % of 120 is 6
    assert max(len(p.category_ids) for p in pictures) == synthetic.MAX_OBJECTS


def test_boxes_lie_inside_the_image_and_cover_small_medium_and_large(pictures):
    for p in pictures:
        height, width = p.image.shape[:2]
        left, top, w, h = p.boxes_ltwh_px.T
        assert (left >= 0).all() and (top >= 0).all() and (w > 0).all() and (h > 0).all()
        assert (left + w <= width).all() and (top + h <= height).all()
        assert (w <= synthetic.MAX_OBJECT + 1).all() and (h <= synthetic.MAX_OBJECT + 1).all()
        assert (p.areas > 0).all() and (p.areas <= w * h).all()
    areas = np.concatenate([p.areas for p in pictures])
    assert min((areas < 32**2).sum(), (areas > 96**2).sum(), ((areas > 32**2) & (areas < 96**2)).sum()) > 30


def test_every_category_appears_about_equally_often(pictures):
    ids, counts = np.unique(np.concatenate([p.category_ids for p in pictures]), return_counts=True)
    assert set(ids.tolist()) == set(synthetic.CATEGORIES)
    assert counts.max() < 1.6 * counts.min()
    assert np.diff(sorted(synthetic.CATEGORIES)).max() > 1  # the ids have gaps


def test_the_box_is_the_rectangle_around_the_painted_pixels(monkeypatch):
    """Black backgrounds, white objects, no shadows: the pixels show where the object is."""

    def background(rng, height, width):
        return np.zeros((height, width, 3), np.float32)

    def fill(rng, mask, surroundings):
        return np.full((*mask.shape, 3), 255, np.float32)

    monkeypatch.setattr(synthetic, "_background", background)
    monkeypatch.setattr(synthetic, "_fill", fill)
    monkeypatch.setattr(synthetic, "_cast_shadow", lambda *args: None)
    found = 0
    for index in range(200):
        p = synthetic.draw_picture(seed=11, index=index)
        if len(p.category_ids) != 1:
            continue
        found += 1
        rows, columns = np.nonzero(p.image[..., 0] > 127)
        left, top, width, height = p.boxes_ltwh_px[0]
        np.testing.assert_allclose([left, top], [columns.min(), rows.min()], atol=1)
        np.testing.assert_allclose([left + width, top + height], [columns.max() + 1, rows.max() + 1], atol=1)
        assert abs(p.areas[0] - len(rows)) <= 0.05 * len(rows) + 4
    assert found >= 10


def test_hidden_objects_show_at_least_the_promised_share(monkeypatch):
    """Counts the pixels of each object before and after the later ones are painted over it."""
    full, kept = [], []
    find_place = synthetic._find_place

    def remember(rng, solid, owner, full_areas):
        place = find_place(rng, solid, owner, full_areas)
        if place is not None:
            full.append(int(solid.sum()))
        return place

    monkeypatch.setattr(synthetic, "_find_place", remember)
    for index in range(40):
        kept.extend(synthetic.draw_picture(seed=5, index=index).areas.tolist())
    shares = np.array(kept) / np.array(full)
    assert shares.min() >= synthetic.MIN_VISIBLE
    assert (shares < 0.9).sum() > 10  # and some are hidden


def test_an_object_over_the_border_shows_the_promised_share():
    solid = np.zeros((30, 30), bool)
    solid[:, :10] = True
    for seed in range(50):
        owner = np.full((60, 60), -1)
        top, left = synthetic._find_place(np.random.default_rng(seed), solid, owner, [])
        shown = solid[max(-top, 0) : 60 - top, max(-left, 0) : 60 - left].sum()
        assert shown >= synthetic.MIN_VISIBLE * solid.sum()


@pytest.mark.parametrize(
    ("name", "share"), [("disk", 0.785), ("ring", 0.548), ("triangle", 0.5), ("cross", 0.51)]
)
def test_the_shapes_are_told_apart_by_their_filling(name, share):
    """Share of its box that a shape fills: (pi/4, pi/4 (1 - .55^2), 1/2, ...) by elementary geometry."""
    rng = np.random.default_rng(0)
    found = [synthetic._shape_mask(rng, name, 640).mean() / 255 for _ in range(60)]
    if name in ("disk", "ring"):
        np.testing.assert_allclose(found, share, atol=0.05)
    else:  # turned shapes fill their box differently
        assert abs(np.max(found) - share) < 0.1


@pytest.mark.parametrize("argument", ["--num_images=0", "--seed=-1"])
def test_bad_arguments_are_named(argument):
    fv = flags.FlagValues()
    synthetic.define_flags(fv)
    with pytest.raises(flags.IllegalFlagValueError, match=argument):
        fv(["synthetic", "--output_dir=x", argument])


def test_an_output_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/data: Not a directory"):
        synthetic.draw_dataset(tmp_path / "file" / "data", 1, 0)


def test_the_documented_command_draws_the_same_bytes_in_another_process(tmp_path):
    command = f"tools/synthetic.py --output_dir={tmp_path}/a --num_images=2 --seed=3".split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "a" / "instances.json") in done.stdout
    synthetic.draw_dataset(tmp_path / "b", num_images=2, seed=3)
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / d).rglob("*.*")} for d in ("a", "b"))
    assert a == b and len(a) == 3
