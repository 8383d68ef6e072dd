"""The twin against DALI where nothing is random; against drawn rectangles and NumPy where it is."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from common.datacheck.datasets import open_source
from common.errors import UserError
from efficientdet import pipeline, tf_pipeline
from efficientdet.config import get_config
from efficientdet.pipeline import EfficientDetPipeline
from efficientdet.tf_pipeline import EfficientDetTFPipeline, Random

INPUT = (192, 256)
NANO = dataclasses.replace(
    get_config("efficientdet-nano"), image_size=INPUT, augmentation="none", flip_prob=0.0
)
SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), (192, 256)]
RED, GREY = (230, 20, 30), (90, 110, 100)
DATA = pathlib.Path(
    os.environ.get(
        "DETECTION_TEST_DATA", pathlib.Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
    )
)


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory):
    """23 images of five shapes, JPEG and PNG, each with one red rectangle."""
    random = np.random.default_rng(0)
    pictures = []
    for i in range(23):
        height, width = SIZES[i % len(SIZES)]
        w, h = random.integers(width // 4, width // 2), random.integers(height // 4, height // 2)
        x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
        image = np.full((height, width, 3), GREY, np.uint8)
        image[y : y + h, x : x + w] = RED
        pictures.append((f"{i}.{'png' if i % 2 else 'jpg'}", image, (x, y, w, h)))
    directory = tmp_path_factory.mktemp("rectangles")
    return open_source(images=str(directory), annotations=str(write_coco(directory, pictures)))


def write_coco(directory: pathlib.Path, pictures) -> pathlib.Path:
    """[(file name, uint8 image, its only box, ltwh px)] -> COCO files; image ids count from 10."""
    images, annotations = [], []
    for i, (name, image, box) in enumerate(pictures, 10):
        Image.fromarray(image).save(directory / name, quality=95, subsampling=0)
        images.append({"id": i, "file_name": name, "height": image.shape[0], "width": image.shape[1]})
        annotations.append({"id": i, "image_id": i, "category_id": 5, "bbox": [float(v) for v in box]})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 5, "name": "thing"}]}
    (directory / "instances.json").write_text(json.dumps(document))
    return directory / "instances.json"


def make(source, config=NANO, **options) -> EfficientDetTFPipeline:
    return EfficientDetTFPipeline(
        **({"source": source, "config": config, "batch_size": 4, "training": True} | options)
    )


def compare_twins(source, config, batch_size) -> int:
    """Asserts that both loaders give the same; returns how many anchors went to another box."""
    options = {"source": source, "config": config, "batch_size": batch_size, "training": False}
    dali = EfficientDetPipeline(**options, count_lost=True)
    twin = EfficientDetTFPipeline(**options, count_lost=True)
    steps = dali.steps_per_epoch
    assert (twin.steps_per_epoch, twin.size, twin.element_spec) == (steps, dali.size, dali.element_spec)
    seen, moved = set(), 0
    for (images, targets), (tf_images, tf_targets) in zip(
        dali.dataset().take(steps), twin.dataset().take(steps), strict=True
    ):
        for i, image_id in enumerate(targets["image_ids"].numpy()):
            if image_id in seen:  # both repeat images at the end, not the same ones
                continue
            seen.add(image_id)
            levels = np.abs(images[i] - tf_images[i]) * pipeline.STDDEV_RGB
            assert levels.mean() < 0.5
            height, width = targets["letterbox"][i, 2:].numpy().astype(int)
            # The filters end differently at the border.
            assert levels[1 : height - 1, 1 : width - 1].max() < 1.5
            same = {}
            for level in config.anchors.levels:
                name = f"class_targets_{level}"
                same[level] = (tf_targets[name][i] == targets[name][i]).numpy()
                moved += np.count_nonzero(~same[level])
            for name, tensor in targets.items():
                one, other = tf_targets[name][i].numpy(), tensor[i].numpy()
                if "_targets_" in name:
                    kept = same[int(name[-1])]
                    one, other = (x.reshape(*kept.shape, -1)[kept] for x in (one, other))
                np.testing.assert_allclose(one, other, atol=2e-5, err_msg=f"{name} of image {image_id}")
    assert len(seen) == source.size
    return moved


@pytest.mark.parametrize("antialias", [True, False])
def test_equals_dali_on_drawn_images(rectangles, antialias):
    assert compare_twins(rectangles, dataclasses.replace(NANO, antialias=antialias), 4) == 0


def test_antialiasing_shows_where_an_image_shrinks_and_only_there(rectangles):
    loaders = [
        loader(source=rectangles, config=config, batch_size=5, training=False, with_targets=False)
        for config in (NANO, dataclasses.replace(NANO, antialias=False))
        for loader in (EfficientDetPipeline, EfficientDetTFPipeline)
    ]
    smooth, tf_smooth, rough, tf_rough = (next(iter(loader.dataset())) for loader in loaders)
    for (images, targets), (other, _) in ((smooth, rough), (tf_smooth, tf_rough)):
        shrinks = (targets["letterbox"][:, 2] < tf.cast(targets["image_sizes"][:, 0], tf.float32)).numpy()
        assert 0 < shrinks.sum() < len(shrinks)
        differ = np.abs(images - other).max((1, 2, 3)) > 0.1
        np.testing.assert_array_equal(differ, shrinks)


@pytest.mark.skipif(not (DATA / "coco128").is_dir(), reason="no coco128 in DETECTION_TEST_DATA")
def test_equals_dali_on_photographs():
    source = open_source(
        images=str(DATA / "coco128" / "images"), annotations=str(DATA / "coco128" / "instances.json")
    )
    # A box right between two anchors goes to either by its last bit, which the readers do not share.
    assert compare_twins(source, dataclasses.replace(NANO, max_instances=20), 16) <= 12  # of 1.2 million


def test_evaluation_is_aligned_to_its_epoch_and_complete(rectangles):
    seen = []
    for rank in range(3):
        loader = make(rectangles, training=False, shard_id=rank, num_shards=3, with_targets=False)
        assert loader.steps_per_epoch == 2
        ids = [extra["image_ids"].numpy().tolist() for _, extra in loader.dataset().take(4)]
        assert ids[:2] == ids[2:]  # the second epoch begins where the first one did
        seen += ids[0] + ids[1]
    assert set(seen) == {10 + i for i in range(23)}


AUGMENTATIONS = {
    "scale_jitter": {"augmentation": "scale_jitter", "jitter_min": 0.3, "jitter_max": 2.0},
    "resize_range": {"augmentation": "resize_range", "resize_min": 40, "resize_max": 200},
    "flip": {"flip_prob": 1.0},
    "all": {"augmentation": "scale_jitter", "flip_prob": 0.5, "jitter_min": 0.5},
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_boxes_and_pixels_move_together(rectangles, name):
    config = dataclasses.replace(NANO, **AUGMENTATIONS[name], min_box_size=3.0)
    found = []
    for images, targets in make(rectangles, config, batch_size=8).dataset().take(8):
        for image, boxes, classes in zip(
            images, targets["boxes"].numpy(), targets["classes"].numpy(), strict=True
        ):
            pixels = image * pipeline.STDDEV_RGB + pipeline.MEAN_RGB
            colors = np.array([RED, GREY, pipeline.MEAN_RGB])
            nearest = np.abs(pixels[:, :, np.newaxis] - colors).sum(-1).argmin(-1)
            ys, xs = np.nonzero(nearest == 0)
            if classes[0] < 0 or len(ys) < 12:
                continue
            box = boxes[0] * [INPUT[1], INPUT[0], INPUT[1], INPUT[0]]
            np.testing.assert_allclose([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], box, atol=1.5)
            found.append(boxes[0])
    assert len(found) > 30
    assert len(np.unique(np.round(found, 3), axis=0)) > 20  # the views differ


def draw(function, sizes, count) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(size, window, out_size) of `count` draws for each size."""
    run = tf.function(lambda size, i: function(size, Random(tf.stack([i, 7]))))
    crops = [(size, run(tf.constant(size, tf.float32), i)) for size in sizes for i in tf.range(count)]
    return [(np.array(size), crop.window.numpy(), crop.size.numpy()) for size, crop in crops]


def test_jittered_view_has_the_range_of_dali_s():
    scales, starts = [], []
    for size, window, out in draw(lambda s, r: tf_pipeline.jittered_crop(s, INPUT, 0.1, 2.0, r), SIZES, 60):
        start, length = window[:2], window[2:]
        assert (start >= 0).all() and (start + length <= size).all() and (length >= 1).all()
        assert (out >= 1).all() and (out <= INPUT).all() and (out == np.round(out)).all()
        scale = out / length / min(INPUT[0] / size[0], INPUT[1] / size[1])
        slack = 0.5 / out + 0.5 / length
        assert abs(scale[0] - scale[1]) <= (scale * slack).sum() + 1e-6
        assert (scale >= 0.1 * (1 - slack) - 1e-6).all() and (scale <= 2.0 * (1 + slack) + 1e-6).all()
        assert (out[length < size] == np.array(INPUT)[length < size]).all()
        scales.append(scale[np.argmax(out)])
        free = size - length
        starts += list(start[free > 20] / free[free > 20])
    assert np.histogram(scales, 4, (0.1, 2.0))[0].min() > 0.6 * len(scales) / 4
    assert np.histogram(starts, 4, (0, 1))[0].min() > 0.5 * len(starts) / 4


EVERYTHING = {
    "augmentation": "scale_jitter",
    "flip_prob": 0.5,
}


def test_seed_decides_everything(rectangles):
    config = dataclasses.replace(NANO, **EVERYTHING)

    def run(**options):
        images = [images.numpy() for images, _ in make(rectangles, config, **options).dataset().take(3)]
        return np.stack(images)

    first = run(seed=0, num_threads=1)
    np.testing.assert_array_equal(first, run(seed=0, num_threads=2))
    assert not np.array_equal(first, run(seed=1))
    assert not np.array_equal(first, run(seed=0, shard_id=1, num_shards=2))


def test_every_image_is_augmented_anew(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    annotations = write_coco(tmp_path, [(f"{i}.png", image, (9, 9, 30, 30)) for i in range(4)])
    source = open_source(images=str(tmp_path), annotations=str(annotations))
    config = dataclasses.replace(NANO, augmentation="scale_jitter")
    pictures = []
    for rank in (0, 1):
        for images, _ in make(source, config, shard_id=rank, num_shards=2).dataset().take(2):
            pictures += [picture.numpy().tobytes() for picture in images]
    assert len(set(pictures)) == 16  # of one and the same image


def test_iterator_resumes_bit_exactly(rectangles, tmp_path):
    config = dataclasses.replace(NANO, **EVERYTHING)
    iterator = iter(make(rectangles, config, seed=3).dataset())
    for _ in range(3):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "loader")
    expected = [next(iterator) for _ in range(5)]
    restored = iter(make(rectangles, config, seed=3).dataset())
    tf.train.Checkpoint(iterator=restored).restore(path).assert_consumed()
    for images, targets in expected:
        got_images, got_targets = next(restored)
        np.testing.assert_array_equal(got_images, images)
        for name, tensor in targets.items():
            np.testing.assert_array_equal(got_targets[name], tensor)


@pytest.mark.parametrize(
    "changes",
    [
        {"augmentation": "min_iou_crop"},
        *({name: 0.5} for name in ("grid_mask_prob", "brightness", "contrast", "saturation", "hue")),
    ],
)
def test_what_only_dali_has_is_refused(rectangles, changes):
    config = dataclasses.replace(NANO, **changes)
    (setting,) = changes.items()
    with pytest.raises(UserError, match="--pipeline_type=tensorflow cannot do {}={}".format(*setting)):
        make(rectangles, config)
    make(rectangles, config, training=False)
