"""Tests contact sheets by the places of their images, and which images they show."""

import itertools
import math

import numpy as np
import pytest

from common.data.open import open_coco
from common.evaluation import drawing, sheets

WHITE = np.array(sheets.BACKGROUND)


def panel(height, width, red=0, title=""):
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = red
    return drawing.make_panel(image, np.zeros((0, 4)), np.zeros(0, int), (), title=title)


def extent(sheet, red):
    rows, columns = np.nonzero((sheet == (red, 0, 0)).all(axis=-1))
    box = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    assert len(rows) == (box[2] - box[0]) * (box[3] - box[1])
    return box


def test_contact_sheet_shows_images_in_order_with_their_aspect_ratios_in_rows_without_gaps():
    sizes = [(100, 200), (200, 100), (50, 50), (480, 640), (31, 150), (64, 64), (300, 90)]
    tiles = [[panel(*size, 30 * n)] for n, size in enumerate(sizes, start=1)]
    sheet = sheets.contact_sheet(tiles)
    assert sheet.dtype == np.uint8 and sheet.shape[1:] == (sheets.WIDTH, 3)
    boxes = [extent(sheet, 30 * n) for n in range(1, 8)]
    assert sorted(boxes, key=lambda box: (box[1], box[0])) == boxes
    for (left, top, right, bottom), (height, width) in zip(boxes, sizes, strict=True):
        assert (right - left) / (bottom - top) == pytest.approx(width / height, rel=0.02)
    assert (sheet == WHITE).all(axis=-1).mean() < 0.05
    assert {box[2] for box in boxes if box[0] > 0} >= {sheets.WIDTH}


def test_contact_sheet_of_one_narrow_image_is_narrow_and_at_most_three_rows_high():
    assert sheets.contact_sheet([[panel(1500, 150)]]).shape == (960, 96, 3)
    assert sheets.contact_sheet([[panel(1, 4000)]]).shape == (1, 1280, 3)
    assert sheets.contact_sheet([[panel(4000, 1)]]).shape == (960, 1, 3)


def test_panels_of_a_tile_stand_side_by_side_below_their_titles():
    tiles = [[panel(300, 400, 90, "ground truth"), panel(300, 400, 120, "detections")]] * 2
    sheet = sheets.contact_sheet(tiles)
    (left, top, right, bottom), other = [extent(sheet[:, :640], red) for red in (90, 120)]
    assert other == (right + sheets.GAP, top, 2 * right + sheets.GAP, bottom) and left == 0
    for start in (left, other[0]):
        letters = (sheet[:top, start : start + right] < 128).any(axis=-1)
        assert letters.any() and not letters[:, -20:].any()


def test_rows_of_a_contact_sheet_are_the_best_of_all_partitions():
    random = np.random.default_rng(0)

    def cost(aspects, lengths):
        splits = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        return sum(math.log(sheets.WIDTH / sum(aspects[a:b]) / sheets.ROW_HEIGHT) ** 2 for a, b in splits)

    for count in (1, 2, 5, 8):
        aspects = np.exp(random.normal(0, 0.7, count)).tolist()
        partitions = [
            np.diff([0, *splits, count]).tolist()
            for number in range(count)
            for splits in itertools.combinations(range(1, count), number)
        ]
        best = min(cost(aspects, lengths) for lengths in partitions)
        assert cost(aspects, sheets.row_lengths(aspects)) == pytest.approx(best)


CHOICES = {
    "new classes, then many objects": ([[1], [1, 2], [1, 1, 1], [3], []], [1, 3, 2, 0, 4]),
    "many classes before many objects": ([[1] * 9, [1, 2], [1, 2, 2]], [2, 1, 0]),
    "equal images in order": ([[5], [5], [5]], [0, 1, 2]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_sheet_shows_images_with_new_classes_then_with_many_classes_and_objects(case):
    classes, expected = CHOICES[case]
    assert sheets.varied(classes, 9) == expected
    assert sheets.varied(classes, 2) == expected[:2]


@pytest.fixture
def source(drawn):
    return open_coco(drawn / "images", drawn / "instances.json")


def test_detection_sheet_shows_the_ground_truth_beside_confident_detections_of_known_classes(
    source, monkeypatch
):
    monkeypatch.setattr(sheets, "contact_sheet", lambda tiles: tiles)
    annotations = source.annotations
    chosen = sheets.varied(
        [annotations.category_ids[annotations.box_image == row].tolist() for row in range(source.size)]
    )
    box, image_id = [2.0, 3.0, 20.0, 10.0], int(annotations.image_ids[chosen[0]])
    rows = [(image_id, 17, 0.8), (image_id, 17, 0.29), (image_id, 999, 0.9), (10**6, 17, 0.9)]
    results = [
        {"image_id": image_id, "category_id": category_id, "bbox": box, "score": score}
        for image_id, category_id, score in rows
    ]
    tiles = sheets.detection_sheet(source, results)
    assert len(tiles) == sheets.SHOWN_IMAGES
    assert [len(tile[1].labels) for tile in tiles] == [1, 0, 0, 0, 0, 0]
    assert tiles[0][1].labels == ["cat 0.80"] and tiles[0][1].boxes_px.tolist() == [[2, 3, 22, 13]]
    for row, (truth, detections) in zip(chosen, tiles, strict=True):
        assert truth.title == f"ground truth of {annotations.file_names[row]}"
        assert detections.title == "detections (score ≥ 0.3)"
        np.testing.assert_array_equal(truth.image, drawing.read_image(source.encoded(row)))
        assert len(truth.labels) == np.count_nonzero(annotations.box_image == row)


def test_unreadable_image_of_a_sheet_is_no_os_error_which_would_stand_for_a_full_disk(source, monkeypatch):
    monkeypatch.setattr(source, "encoded", lambda row: b"no image")
    with pytest.raises(ValueError, match=r"^image \d+ \('00\.jpg'\): cannot identify"):
        sheets.read(source, 0)
