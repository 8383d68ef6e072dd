import numpy as np
import pytest

from common.data import tf_readers
from common.letterbox import fit
from tests.common.made_annotations import annotations, random_annotations
from tests.oracle.numpy_boxes import to_letterbox
from tools.report import network_boxes as module

PLAIN = {"max_instances": 100, "min_box_size": 0.0}


def network_boxes(truth, image_size, **changes):
    return module.network_boxes(truth, image_size, **PLAIN | changes)


def test_boxes_go_where_the_image_goes():
    truth = random_annotations(np.random.default_rng(0), 20, 6)
    image_size = (96, 160)
    shown = network_boxes(truth, image_size)
    targets = truth.target_boxes
    for i, (height, width) in enumerate(truth.image_sizes.tolist()):
        place = (0, 0, *fit(height, width, image_size))
        mine = shown.image == i
        original = targets.boxes[targets.row_splits[i] : targets.row_splits[i + 1]]
        expected = np.asarray(to_letterbox(original, place, image_size))
        np.testing.assert_allclose(shown.boxes[mine], expected, atol=1e-7)


@pytest.mark.parametrize("max_instances", [1, 7, 100])
def test_what_is_kept_is_what_the_encoder_keeps(max_instances):
    truth = random_annotations(np.random.default_rng(1), 12, 30, smallest=0.004)
    shown = network_boxes(truth, (128, 64), max_instances=max_instances, min_box_size=1.5)
    assert shown.too_small.any()
    assert shown.over_limit.any() == (max_instances < 30)
    assert not (shown.too_small & shown.over_limit).any()
    for i in range(12):
        mine = np.flatnonzero(shown.image == i)
        given = shown.boxes[mine], mine.astype(np.int32)
        _, numbers, _ = tf_readers.select_boxes(*given, (1.5 / 128, 1.5 / 64), max_instances)
        np.testing.assert_array_equal(shown.kept[np.isin(shown.kept, mine)], numbers)


def test_of_equally_large_boxes_the_first_stay():
    rows = [(0, 0, *corner, 50, 50) for corner in ((0, 0), (50, 50), (0, 50))] + [(1, 0, 0, 0, 10, 10)]
    network = network_boxes(annotations([(100, 100)] * 2, rows), (100, 100), max_instances=2)
    assert network.over_limit.tolist() == [False, False, True, False]


def test_sides_are_in_pixels_of_the_network():
    rows = [(0, 0, 1, 1, 2, 2), (1, 2, 10, 20, 30, 40), (1, 1, 50, 60, 4, 9)]
    shown = network_boxes(annotations([(200, 100), (100, 100)], rows), (50, 50))
    np.testing.assert_allclose(shown.sides_px(np.array([1, 2])), [np.sqrt(300), 3], rtol=1e-5)
    assert len(shown.sides_px(np.zeros(0, np.int64))) == 0


def test_images_without_a_true_box_are_no_part_of_the_sample():
    rows = [(1, 0, 1, 1, 9, 9), (2, 0, 1, 1, 9, 9), (4, 0, 1, 1, 0, 9)]
    truth = annotations([(50, 50)] * 5, rows, crowds=[1])
    sample = module.sample_images(truth, 10, np.random.default_rng(0))
    assert sample.image_ids.tolist() == [102, 105]  # image 105 counts, although its box has no area


def test_a_sample_is_drawn_by_seed():
    truth = annotations([(50, 50)] * 300, [(i, 0, 1, 1, 9, 9) for i in range(300)])
    first, again, other = (
        module.sample_images(truth, 40, np.random.default_rng(seed)).image_ids.tolist() for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 40
    assert max(first) - min(first) > 200
