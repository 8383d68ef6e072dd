"""Tests augmentations by what is left of drawn rectangles, and the presets of --augmentation_preset."""

import dataclasses
import types

import numpy as np
import pytest
from nvidia.dali import fn

from common import augmentations, hparams
from common.data.open import open_coco
from common.errors import UserError
from tests.common.reading import run_graph

FILL = 7.0
COLORS = [(250, 20, 20), (20, 250, 20), (20, 20, 250), (250, 250, 20)]


def rectangles(random, height, width, count):
    """Returns an image with rectangles of different colours, and their boxes, ltrb in pixels."""
    image = np.full((height, width, 3), 128, np.uint8)
    boxes = []
    for color, left in zip(COLORS[:count], np.arange(count) * width // 4, strict=False):
        x, y = left + random.integers(0, width // 16), random.integers(0, height // 2)
        w, h = random.integers(width // 8, width // 6), random.integers(height // 8, height // 2)
        image[y : y + h, x : x + w] = color
        boxes.append([x, y, x + w, y + h])
    return image, np.float32(boxes).reshape(-1, 4)


def test_boxes_of_rotated_images_enclose_their_rotated_rectangles():
    random = np.random.default_rng(0)
    drawings = [
        rectangles(random, *(int(n) for n in random.integers(90, 260, 2)), count=i % 5) for i in range(30)
    ]
    images = [image for image, _ in drawings]
    sizes = [np.float32(image.shape[1::-1] * 2) for image in images]
    no_area = np.float32([[0.2, 0.2, 0.2, 0.9], [0.5, 0.5, 0.5, 0.5]])
    boxes = [np.concatenate([px / size, no_area]) for (_, px), size in zip(drawings, sizes, strict=True)]
    labels = [np.arange(1, len(image_boxes) + 1, dtype=np.int32) for image_boxes in boxes]

    def rotate(*nodes):
        return augmentations.random_rotation(*nodes, degrees=40.0, fill=FILL)

    num_rotated = num_inside = 0
    results = run_graph(rotate, images, boxes, labels)
    for image, before, size, (rotated, after, numbers) in zip(images, boxes, sizes, results, strict=True):
        assert rotated.shape == image.shape and after.dtype == np.float32
        num_rotated += (rotated == FILL).all(-1).any()
        has_area = (after[:, 2:] > after[:, :2]).all(1)
        boxes_px = dict(zip(numbers[has_area].tolist(), after[has_area] * size, strict=True))
        assert not {len(before), len(before) - 1} & boxes_px.keys()
        for label in range(1, len(before) - 1):
            rows, columns = np.nonzero(np.abs(rotated - np.float32(COLORS[label - 1])).max(-1) < 60)
            if len(rows):
                expected = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                outwards = (boxes_px[label] - expected) * (-1, -1, 1, 1)
                assert (outwards > -1.5).all()
                is_inside = min(expected[:2]) > 0 and (expected[2:] < size[2:]).all()
                assert not is_inside or (outwards < 2.0).all()
                num_inside += is_inside
    assert num_rotated > 25 and num_inside > 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suite", ["RAND_AUGMENT", "TRIVIAL_AUGMENT"])
def test_operations_of_rand_augment_and_trivial_augment_change_colours_and_move_no_pixels(suite):
    image, _ = rectangles(np.random.default_rng(1), 120, 160, 4)
    image[:, :, 1] //= 2  # makes grey pixels coloured, so that saturation changes them
    operations = getattr(augmentations, suite)
    assert len(operations) == 9 and len({operation.name for operation in operations}) == 9
    inside = np.zeros(image.shape[:2], bool)
    inside[2:-2, 2:-2] = np.all(
        [np.roll(image, (y, x), (0, 1)) == image for y in (-1, 0, 1) for x in (-1, 0, 1)], axis=(0, -1)
    )[2:-2, 2:-2]
    changed = 0
    for operation in operations:

        def change(node, operation=operation):
            return [operation(fn.reshape(node, layout="HWC"), magnitude_bin=30, num_magnitude_bins=31)]

        ((result,),) = run_graph(change, [image])
        assert result.dtype == np.uint8
        for colour in np.unique(image.reshape(-1, 3), axis=0):
            new_colours = result[(image == colour).all(-1) & inside]
            assert len(np.unique(new_colours, axis=0)) == 1, operation.name
        changed += not np.array_equal(result, image)
    assert changed >= 7


def test_cutout_with_probability_half_fills_one_square_in_about_half_of_the_images():
    images = [np.full((80 + 10 * i, 200 - 10 * i, 3), 255, np.uint8) for i in range(12)] * 4
    fill = (10.0, 20.0, 30.0)

    def cut_out(node):
        return [augmentations.random_cutout(fn.reshape(node, layout="HWC"), 0.5, fill)]

    outputs = run_graph(cut_out, images)
    count = 0
    for image, (result,) in zip(images, outputs, strict=True):
        hidden = (result == np.uint8(fill)).all(-1)
        np.testing.assert_array_equal(result[~hidden], 255)
        rows, columns = np.flatnonzero(hidden.any(1)), np.flatnonzero(hidden.any(0))
        assert hidden.sum() == len(rows) * len(columns)
        at_border = {*rows[[0, -1]][: len(rows)], *columns[[0, -1]]} if len(rows) else set()
        low, high = np.array(augmentations.CUTOUT_SIDE) * min(image.shape[:2])
        if len(rows):
            count += 1
            assert len(rows) <= high + 1 and len(columns) <= high + 1
            if not at_border & {0, image.shape[0] - 1, image.shape[1] - 1}:
                assert abs(len(rows) - len(columns)) <= 1 and len(rows) >= low - 1
    assert 12 <= count <= 36


def test_augmentation_presets_replace_defaults_of_the_model_and_hparams_replace_presets(app):
    config = app.package.config
    row = config.get_config(app.model_name)

    def resolve(preset, spec=None):
        flags = types.SimpleNamespace(hparams=spec)
        return hparams.resolve(row, flags, preset=config.PRESETS[preset])

    assert [*config.PRESETS] == ["none", "light", "default", "strong"]
    assert resolve("default") == row
    assert (resolve("light").flip_prob, resolve("none").flip_prob) == (0.5, 0)
    assert resolve("none", "flip_prob=0.25,rotation=3").flip_prob == 0.25
    strong = resolve("strong")
    changed = {name for name, value in dataclasses.asdict(row).items() if getattr(strong, name) != value}
    assert changed == {"auto_augment", "cutout_prob", {"yolov4": "mixup_prob"}.get(app.name, "rotation")}
    with pytest.raises(UserError, match=r"rand_augment_magnitude=31: need .* at most 30"):
        resolve("strong", "rand_augment_magnitude=31")


def test_training_batch_with_preset_none_equals_the_evaluation_batch(app, drawn):
    config = app.package.config
    row = hparams.override(config.get_config(app.model_name), "image_size=64x96,min_box_size=0")
    plain = hparams.replace(row, config.PRESETS["none"])
    source = open_coco(f"{drawn}/images", f"{drawn}/instances.json")
    batches = []
    for training in (True, False):
        loader = app.make_loader(
            "dali_cpu", source=source, config=plain, batch_size=12, training=training, name_images=True
        )
        images, targets = next(iter(loader.dataset()))
        order = np.argsort(targets["image_ids"])
        batches.append([images.numpy()[order], targets["boxes"].numpy()[order]])
    for trained, evaluated in zip(*batches, strict=True):
        np.testing.assert_array_equal(trained, evaluated)
