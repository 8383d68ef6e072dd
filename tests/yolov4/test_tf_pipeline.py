"""The twin against DALI where nothing is random; against drawn rectangles and NumPy where it is."""

import dataclasses
import itertools
import json
import pathlib

import cv2
import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn
from PIL import Image

from common import letterbox
from common.datacheck.datasets import open_source
from common.errors import UserError
from common.tf_readers import Random
from yolov4 import color, crops, pipeline, tf_pipeline
from yolov4.config import get_config
from yolov4.pipeline import YOLOv4Pipeline
from yolov4.tf_pipeline import YOLOv4TFPipeline

INPUT = (160, 224)  # height, width: not square, so that a swapped axis shows
OFF = {"jitter": 0.0, "flip_prob": 0.0, "hue": 0.0, "saturation": 1.0, "exposure": 1.0, "mosaic_prob": 0.0}
NANO = dataclasses.replace(get_config("yolov4-nano"), image_size=INPUT, **OFF)
SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), (160, 224)]
GREY = (90, 110, 100)
COLORS = [(230, 20, 30), (20, 200, 40), (30, 40, 240), (240, 230, 20), (230, 30, 240), (20, 220, 230)]
BATCH = len(COLORS)


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory):
    """24 images of five shapes, JPEG and PNG, with one rectangle each, whose colour tells its class."""
    random = np.random.default_rng(0)
    pictures = []
    for i in range(24):
        height, width = SIZES[i % len(SIZES)]
        w, h = random.integers(width // 4, width // 2), random.integers(height // 4, height // 2)
        x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
        image = np.full((height, width, 3), GREY, np.uint8)
        image[y : y + h, x : x + w] = COLORS[i % len(COLORS)]
        pictures.append((f"{i}.{'png' if i % 2 else 'jpg'}", image, [(i % len(COLORS), (x, y, w, h))]))
    return write_coco(tmp_path_factory.mktemp("rectangles"), pictures)


def write_coco(directory: pathlib.Path, pictures):
    """[(file name, uint8 image, [(class, ltwh px)])] -> a source; image ids count from 10."""
    images, annotations = [], []
    for i, (name, image, objects) in enumerate(pictures, 10):
        Image.fromarray(image).save(directory / name, quality=95, subsampling=0)
        images.append({"id": i, "file_name": name, "height": image.shape[0], "width": image.shape[1]})
        annotations += [
            {"image_id": i, "category_id": c + 1, "bbox": list(map(float, b))} for c, b in objects
        ]
    document = {
        "images": images,
        "annotations": [{"id": i, **annotation} for i, annotation in enumerate(annotations, 1)],
        "categories": [{"id": i, "name": f"colour {i}"} for i in range(1, len(COLORS) + 1)],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    return open_source(images=str(directory), annotations=str(directory / "instances.json"))


def make(source, config=NANO, **options) -> YOLOv4TFPipeline:
    return YOLOv4TFPipeline(
        **({"source": source, "config": config, "batch_size": BATCH, "training": True} | options)
    )


def batches(loader: YOLOv4TFPipeline, count: int) -> list[dict[str, np.ndarray]]:
    return [
        {"images": images.numpy(), **{name: tensor.numpy() for name, tensor in targets.items()}}
        for images, targets in loader.dataset().take(count)
    ]


def dali_stage(define, samples: list[tuple[np.ndarray, ...]]) -> list[list[np.ndarray]]:
    """Runs a stage of the DALI pipeline on a batch. -> [output][sample]."""
    pipe = dali.Pipeline(batch_size=len(samples), num_threads=1, device_id=None, seed=3, exec_dynamic=True)
    with pipe:
        columns = [list(column) for column in zip(*samples, strict=True)]
        nodes = [fn.external_source(source=itertools.repeat(c), batch=True) for c in columns]
        pipe.set_outputs(*define(*nodes))
    return [[np.array(sample) for sample in output] for output in pipe.run()]


# --- evaluation: equal to DALI ---


def compare_twins(source, config, batch_size) -> None:
    options = {"source": source, "config": config, "batch_size": batch_size, "training": False}
    dali_loader = YOLOv4Pipeline(**options, count_lost=True)
    twin = YOLOv4TFPipeline(**options, count_lost=True)
    steps = dali_loader.steps_per_epoch
    assert (twin.steps_per_epoch, twin.size) == (steps, dali_loader.size)
    assert list(twin.element_spec.items()) == list(dali_loader.element_spec.items())
    assert twin.dataset().element_spec == dali_loader.dataset().element_spec
    seen = set()
    for (images, targets), (tf_images, tf_targets) in zip(
        dali_loader.dataset().take(steps), twin.dataset().take(steps), strict=True
    ):
        for i, image_id in enumerate(targets["image_ids"].numpy()):
            if image_id in seen:  # both repeat images at the end, not the same ones
                continue
            seen.add(image_id)
            levels = np.abs(images[i] - tf_images[i]) * 255
            assert levels.mean() < 0.5
            top, left, height, width = targets["letterbox"][i].numpy().astype(int)
            # The filters end differently at the border.
            assert levels[top + 1 : top + height - 1, left + 1 : left + width - 1].max() < 1.5
            for name, tensor in targets.items():
                np.testing.assert_allclose(
                    tf_targets[name][i], tensor[i], atol=1e-6, err_msg=f"{name} of image {image_id}"
                )
    assert len(seen) == source.size


@pytest.mark.parametrize("keep_aspect, antialias", [(True, True), (False, True), (False, False)])
def test_equals_dali_on_drawn_images(rectangles, keep_aspect, antialias):
    compare_twins(rectangles, dataclasses.replace(NANO, letterbox=keep_aspect, antialias=antialias), 5)


@pytest.mark.parametrize("keep_aspect", [True, False])
def test_equals_dali_on_photographs(coco128, keep_aspect):
    source = open_source(images=str(coco128 / "images"), annotations=str(coco128 / "instances.json"))
    compare_twins(source, dataclasses.replace(NANO, letterbox=keep_aspect), 16)


def test_evaluation_is_never_augmented(rectangles):
    config = dataclasses.replace(get_config("yolov4"), image_size=INPUT, letterbox=True)
    (one,) = batches(make(rectangles, config, training=False, seed=1), 1)
    (other,) = batches(make(rectangles, dataclasses.replace(config, **OFF), training=False, seed=2), 1)
    np.testing.assert_array_equal(one["images"], other["images"])
    np.testing.assert_array_equal(one["boxes"], other["boxes"])
    assert one["images"].shape == (BATCH, *INPUT, 3)


# --- training: the drawn rectangles are found again ---


def painted(shape: tuple[int, int], boxes: np.ndarray, classes: np.ndarray, grow: float) -> np.ndarray:
    """bool (classes, H, W): the pixels whose centres lie in boxes that grew by `grow` pixels on each side."""
    height, width = shape
    y, x = np.mgrid[:height, :width] + 0.5
    masks = np.zeros((len(COLORS), height, width), bool)
    for (left, top, right, bottom), index in zip(boxes * ([width, height] * 2), classes, strict=True):
        masks[index] |= (x > left - grow) & (x < right + grow) & (y > top - grow) & (y < bottom + grow)
    return masks


def nearest_color(image: np.ndarray) -> np.ndarray:
    """int (H, W): which of COLORS; more for what is nearer to the background or the padding."""
    palette = np.array([*COLORS, GREY, (pipeline.FILL,) * 3])
    return np.abs(image[:, :, np.newaxis] * 255 - palette).sum(-1).argmin(-1)


def count_found(batch: dict[str, np.ndarray]) -> int:
    """Asserts that every colour fills the boxes of its class, to 1.5 pixels, and shows nowhere else."""
    found = 0
    for image, boxes, classes, count in zip(
        batch["images"], batch["boxes"], batch["classes"], batch["num_boxes"], strict=True
    ):
        assert (classes[:count] >= 0).all() and (classes[count:] == -1).all() and (boxes[count:] == -1).all()
        assert (boxes[:count] >= 0).all() and (boxes[:count] <= 1).all()
        nearest = nearest_color(image)
        inner = painted(image.shape[:2], boxes[:count], classes[:count], -1.5)
        outer = painted(image.shape[:2], boxes[:count], classes[:count], 1.5)
        for index in range(len(COLORS)):
            assert not (nearest[~outer[index]] == index).any()
            assert (nearest[inner[index]] == index).all()
        found += count
    return found


VIEWS = {
    "stretch": {},
    "letterbox": {"letterbox": True},
    "flip": {"flip_prob": 1.0, "letterbox": True},
    "jitter": {"jitter": 0.3},
    "jitter, letterbox, flip": {"jitter": 0.3, "letterbox": True, "flip_prob": 0.5},
    "multi-scale": {"multi_scale": 1.5, "jitter": 0.2, "flip_prob": 0.5},
    "mosaic": {"mosaic_prob": 1.0},
    "mosaic of jittered": {"mosaic_prob": 1.0, "jitter": 0.3, "letterbox": True, "flip_prob": 0.5},
    "mosaic, multi-scale": {"mosaic_prob": 0.5, "jitter": 0.3, "multi_scale": 1.5},
}


@pytest.mark.parametrize("name", VIEWS)
def test_boxes_and_pixels_move_together(rectangles, name):
    # Every rectangle that shows has a box, however small.
    config = dataclasses.replace(NANO, **VIEWS[name], min_box_size=0.01)
    found = [count_found(batch) for batch in batches(make(rectangles, config), 6)]
    assert sum(found) >= (30 if "mosaic" not in name else 50)


def test_mosaic_false_closes_all_mixing(rectangles):
    config = dataclasses.replace(NANO, mosaic_prob=1.0)
    (closed,) = batches(make(rectangles, config, mosaic=False), 1)
    (plain,) = batches(make(rectangles), 1)
    np.testing.assert_array_equal(closed["images"], plain["images"])


# --- the stages that chance decides, against DALI's and NumPy ---


def quantiles(values) -> np.ndarray:
    return np.quantile(np.array(values, float), (0.05, 0.25, 0.5, 0.75, 0.95), axis=0)


@pytest.mark.parametrize("keep_aspect", [True, False])
@pytest.mark.parametrize("size", [(300, 500), (420, 200)])
def test_jittered_view_is_distributed_as_dali_s(size, keep_aspect):
    count, jitter = 1000, 0.3

    @tf.function
    def twin(i):
        random = Random(tf.stack([i, 7]))
        return tf_pipeline.jittered_crop(tf.constant(size), tf.constant(INPUT), jitter, keep_aspect, random)

    ours = np.array([np.concatenate(twin(i)) for i in tf.range(count)])
    samples = [(np.array(size, np.int32), np.array(INPUT, np.int32))] * count
    windows, places = dali_stage(lambda s, i: crops.jittered_crop(s, i, jitter, keep_aspect), samples)
    theirs = np.concatenate([windows, places], 1)

    for drawn in (ours, theirs):
        start, length, place, shown = drawn[:, :2], drawn[:, 2:4], drawn[:, 4:6], drawn[:, 6:]
        assert (start >= 0).all() and (length >= 1).all() and (start + length <= size).all()
        assert (place >= 0).all() and (shown >= 1).all() and (place + shown <= INPUT).all()
        whole = (length == size).all(1).mean()  # all edges moved outwards
        assert 0.01 < whole < 0.5 if keep_aspect else 0.03 < whole < 0.12
    scale = np.array([*size, *size, *INPUT, *INPUT])
    np.testing.assert_allclose(quantiles(ours / scale), quantiles(theirs / scale), atol=0.035)


def test_jittered_view_follows_darknet():
    """src/data.c: each edge moves by up to jitter times the side, and the crop is stretched."""
    size, jitter = np.array([300, 500], np.int32), 0.3
    edges = []
    for i in range(300):
        random = Random(tf.constant([i, 7]))
        window, place = tf_pipeline.jittered_crop(
            tf.constant(size), tf.constant(INPUT), jitter, False, random
        )
        window, place = window.numpy(), place.numpy()
        scale = place[2:] / window[2:]  # of the view: that of the whole crop, to the rounding
        crop_start = window[:2] - place[:2] / scale
        crop_end = window[:2] + window[2:] + (INPUT - place[:2] - place[2:]) / scale
        edges.append(np.concatenate([crop_start / size, 1 - crop_end / size]))
    edges = np.array(edges)
    assert (abs(edges) <= jitter + 0.02).all()
    for edge in edges.T:
        assert np.histogram(edge, 4, (-jitter, jitter))[0].min() > 0.6 * len(edges) / 4
    correlation = np.corrcoef(edges.T) - np.eye(4)
    assert abs(correlation).max() < 0.2


def test_whole_view_is_the_letterbox():
    random = np.random.default_rng(0)
    for size in [(1, 1), (1, 5000), (4001, 3072), *SIZES, *random.integers(1, 4097, (60, 2)).tolist()]:
        window, place = tf_pipeline.whole_image(tf.constant(size), tf.constant(INPUT), True)
        assert window.numpy().tolist() == [0, 0, *size]
        assert tuple(place.numpy()) == letterbox.geometry(*size, INPUT, centered=True)
        window, place = tf_pipeline.whole_image(tf.constant(size), tf.constant(INPUT), False)
        assert place.numpy().tolist() == [0, 0, *INPUT]


def test_flip_moves_pixels_boxes_and_padding_together_or_not_at_all():
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (5, 8, 3), np.uint8)
    boxes = np.array([[1, 1, 3, 4.5], [0, 0, 8, 5]], np.float32)
    run = tf.function(
        lambda i: tf_pipeline.random_flip(
            image, boxes, tf.constant([1, 1, 4, 5]), 0.5, Random(tf.stack([i, 3]))
        )
    )
    turned = 0
    for got, got_boxes, place in (run(i) for i in tf.range(100)):
        if (got.numpy() == image).all():
            np.testing.assert_array_equal(got_boxes, boxes)
            assert place.numpy().tolist() == [1, 1, 4, 5]
        else:
            turned += 1
            np.testing.assert_array_equal(got, image[:, ::-1])
            np.testing.assert_array_equal(got_boxes, [[5, 1, 7, 4.5], [0, 0, 8, 5]])
            assert place.numpy().tolist() == [1, 2, 4, 5]
    assert 30 < turned < 70


class Fixed:
    """Stands in for Random: gives these numbers, one a call."""

    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def uniform(self, low, high):
        return self._values.pop(0)


@pytest.mark.parametrize("turn", [-36.0, 0.0, 25.0])
@pytest.mark.parametrize("saturation, value", [(1.0, 1.0), (1.4, 1 / 1.3), (1 / 1.5, 1.5)])
def test_hsv_is_opencv_s(turn, saturation, value):
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    draws = [turn]
    for factor in (saturation, value):
        draws += [factor, 0.0] if factor >= 1 else [1 / factor, 0.9]
    got = tf_pipeline.random_hsv(tf.constant(image), 36.0, 1.5, 1.5, Fixed(*draws)).numpy()
    hsv = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)  # degrees, 0..1, 0..1
    hsv[..., 0] = (hsv[..., 0] + turn) % 360
    hsv[..., 1:] = np.minimum(hsv[..., 1:] * (saturation, value), 1.0)
    expected = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * 255
    assert np.abs(got - expected).max() < 0.51 + 0.02


def test_factors_are_distributed_as_dali_s():
    count, limit = 2000, 1.5
    run = tf.function(lambda i: tf_pipeline.random_factor(limit, Random(tf.stack([i, 3]))))
    ours = np.array([run(i).numpy() for i in tf.range(count)])
    (theirs,) = dali_stage(lambda _: [color.random_factor(limit, 1)], [(np.float32(0),)] * count)
    assert ours.min() >= 1 / limit - 1e-6 and ours.max() <= limit
    np.testing.assert_allclose(quantiles(ours), quantiles(np.concatenate(theirs)), atol=0.04)
    assert abs((ours < 1).mean() - 0.5) < 0.04
    # one over a uniform number is not uniform: half of the lower half lies below 1 / 1.25
    assert abs((ours < 1 / 1.25).mean() - 0.25) < 0.04


def test_hue_is_distributed_as_dali_s():
    """On a colour that DALI's linear map turns like the true one; grey tells the brightness alone."""
    red = np.full((2, 2, 3), (200, 100, 100), np.uint8)
    run = tf.function(lambda i: tf_pipeline.random_hsv(red, 36.0, 1.0, 1.0, Random(tf.stack([i, 3]))))
    ours = [run(i).numpy() / 255 for i in tf.range(300)]
    (theirs,) = dali_stage(lambda i: color.random_hsv([i], 36.0, 1.0, 1.0), [(red,)] * 300)

    def hues(images):
        hsv = np.array([cv2.cvtColor(i.astype(np.float32), cv2.COLOR_RGB2HSV)[0, 0] for i in images])
        return (hsv[:, 0] + 180) % 360 - 180

    assert abs(hues(ours)).max() <= 36.5 and np.ptp(hues(ours)) > 65
    # The linear map turns by the angle about the axis of greys, which is not quite the hue.
    np.testing.assert_allclose(quantiles(hues(ours)), quantiles(hues(theirs)), atol=15)

    grey = np.full((2, 2, 3), 100, np.uint8)
    run = tf.function(lambda i: tf_pipeline.random_hsv(grey, 36.0, 1.5, 1.5, Random(tf.stack([i, 3]))))
    ours = np.array([run(i).numpy() for i in tf.range(300)])
    assert (ours == ours[..., :1]).all()  # grey stays grey
    (theirs,) = dali_stage(lambda i: color.random_hsv([i], 36.0, 1.5, 1.5), [(grey,)] * 300)
    np.testing.assert_allclose(
        quantiles(ours[:, 0, 0, 0]), quantiles(255 * np.array(theirs)[:, 0, 0, 0]), atol=10
    )


def test_colour_leaves_the_padding(tmp_path):
    white = np.full((90, 60, 3), 255, np.uint8)
    source = write_coco(tmp_path, [(f"{i}.png", white, [(0, (9, 9, 30, 30))]) for i in range(4)])
    config = dataclasses.replace(NANO, letterbox=True, flip_prob=0.5, hue=36.0, saturation=1.5, exposure=1.5)
    (batch,) = batches(make(source, config, batch_size=8), 1)
    levels = np.rint(batch["images"] * 255)
    padding = levels == pipeline.FILL
    assert 0.4 < padding.mean() < 0.6 and (levels[~padding] >= 169).all()
    assert len(np.unique(levels[~padding])) > 3


# --- multi-scale ---


def test_multi_scale_draws_a_size_for_each_batch(rectangles):
    config = dataclasses.replace(NANO, multi_scale=1.5)
    low, high = config.size_range
    assert (low, high) == (3, 8)
    buckets = [config.bucket(units) for units in range(low, high + 1)]
    run = tf.function(lambda i: tf_pipeline.input_size(config, True, Random(tf.stack([i, 3]))))
    sizes = [tuple(run(i).numpy().tolist()) for i in tf.range(300)]
    assert set(sizes) == set(buckets)
    assert min(sizes.count(bucket) for bucket in buckets) > 25

    ranks = [
        [
            batch["images"].shape[1:3]
            for batch in batches(make(rectangles, config, batch_size=3, shard_id=rank, num_shards=2), 6)
        ]
        for rank in (0, 1)
    ]
    assert len(set(ranks[0])) > 1 and set(ranks[0]) <= set(buckets)
    assert ranks[0] == ranks[1]  # nobody waits for a rank with larger images
    loader = make(rectangles, config)
    assert loader.dataset().element_spec[0] == tf.TensorSpec((BATCH, None, None, 3), tf.float32)
    assert make(rectangles, config, training=False).element_spec["images"].shape == (BATCH, *INPUT, 3)


# --- boxes ---


def test_no_boxes_and_500_boxes(tmp_path):
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (200, 300, 3), np.uint8)
    sides = random.uniform(3.0, 90.0, (450, 2))
    corners = random.uniform(0, 1, (450, 2)) * (np.array([300, 200]) - sides)
    many = [(1, tuple(ltwh)) for ltwh in np.concatenate([corners, sides], 1)]
    many += [(2, (10.0 + i, 5.0, 0.4, 30.0)) for i in range(50)]
    pictures = [("0.png", image, []), ("1.png", image, many), ("2.png", image, [(0, (250, 50, 100, 100))])]
    source = write_coco(tmp_path, pictures)
    (batch,) = batches(make(source, batch_size=3, training=False, count_lost=True), 1)
    limit = NANO.max_instances
    assert batch["num_boxes"].tolist() == [0, limit, 1]
    assert batch["lost"].tolist() == [[0, 0], [50, 450 - limit], [0, 0]]
    assert (batch["boxes"][0] == -1).all() and (batch["classes"][0] == -1).all()
    kept = batch["boxes"][1]
    areas = np.sort(np.prod(kept[:, 2:] - kept[:, :2], 1))
    np.testing.assert_allclose(areas, np.sort(np.prod(sides, 1))[-limit:] / (300 * 200), rtol=1e-4)
    np.testing.assert_allclose(batch["boxes"][2, 0], [250 / 300, 0.25, 1, 0.75], atol=1e-6)

    everything = dataclasses.replace(NANO, mosaic_prob=0.4, jitter=0.3)
    for batch in batches(make(source, everything, batch_size=3, count_lost=True), 6):
        assert np.isfinite(batch["boxes"]).all() and (batch["num_boxes"] <= limit).all()
        real = batch["classes"] >= 0
        assert (real.sum(1) == batch["num_boxes"]).all()
        boxes = batch["boxes"][real] * [*INPUT[::-1], *INPUT[::-1]]
        assert (boxes >= 0).all() and (boxes <= [*INPUT[::-1], *INPUT[::-1]]).all()
        assert (boxes[:, 2:] - boxes[:, :2] >= NANO.min_box_size - 1e-3).all()
        assert (batch["lost"] >= 0).all()


# --- the seed, and going on ---

EVERYTHING = {
    "jitter": 0.3,
    "flip_prob": 0.5,
    "hue": 36.0,
    "saturation": 1.5,
    "exposure": 1.5,
    "mosaic_prob": 0.5,
    "multi_scale": 1.5,
}


def test_seed_decides_everything(rectangles):
    config = dataclasses.replace(NANO, **EVERYTHING)

    def run(**options):
        return [batch["images"] for batch in batches(make(rectangles, config, **options), 3)]

    def same(one, other):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    first = run(seed=0, num_threads=1)
    assert same(first, run(seed=0, num_threads=2))
    assert not same(first, run(seed=1))
    assert not same(first, run(seed=0, shard_id=1, num_shards=2))


def test_every_image_is_augmented_anew(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    source = write_coco(tmp_path, [(f"{i}.png", image, [(0, (9, 9, 30, 30))]) for i in range(4)])
    config = dataclasses.replace(NANO, jitter=0.3)
    pictures = []
    for rank in (0, 1):
        for batch in batches(make(source, config, batch_size=4, shard_id=rank, num_shards=2), 2):
            pictures += [picture.tobytes() for picture in batch["images"]]
    assert len(set(pictures)) == 16  # of one and the same image


def test_iterator_resumes_bit_exactly(rectangles, tmp_path):
    config = dataclasses.replace(NANO, **EVERYTHING)
    iterator = iter(make(rectangles, config, seed=3).dataset())
    for _ in range(3):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "loader")
    expected = [next(iterator) for _ in range(5)]  # into the next epoch
    restored = iter(make(rectangles, config, seed=3).dataset())
    tf.train.Checkpoint(iterator=restored).restore(path).assert_consumed()
    for images, targets in expected:
        got_images, got_targets = next(restored)
        np.testing.assert_array_equal(got_images, images)
        for name, tensor in targets.items():
            np.testing.assert_array_equal(got_targets[name], tensor)


@pytest.mark.parametrize(
    "change",
    [{"mixup_prob": 0.1}, {"cutmix_prob": 0.1}, {"mosaic_prob": 0.5, "mosaic_tiles": "fresh"}],
    ids=lambda change: next(iter(change)),
)
def test_what_only_dali_has_is_refused(rectangles, change):
    config = dataclasses.replace(NANO, **change)
    name, value = list(change.items())[-1]
    with pytest.raises(UserError, match=f"--pipeline_type=tensorflow cannot do {name}={value}: use dali_cpu"):
        make(rectangles, config)
    make(rectangles, config, training=False)
