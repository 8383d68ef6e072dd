"""Tests efficientdet_pipeline.py: batches equal those of the app, bit for bit."""

import dataclasses

import numpy as np
import PIL.Image
import pytest

from efficientdet.config import get_config
from efficientdet.pipeline import EfficientDetPipeline
from examples import efficientdet_pipeline as example
from tests.conftest import ROOT
from tests.examples.standalone import arrays, assert_same_batch, run_alone

NAME = "efficientdet_pipeline.py"
BATCH = 10
STEPS = 4  # a shard is a third of the images; its next epoch begins in step 4
ALL_ON = {"grid_mask_prob": 0.7, "brightness": 0.3, "contrast": 0.2, "saturation": 0.5, "hue": 20.0}
# (fields of the app's config, (shard_id, num_shards), file format)
VARIANTS = (
    (ALL_ON | {"image_size": (128, 192), "max_instances": 15}, (0, 1), "coco"),
    (
        ALL_ON | {"image_size": (200, 136), "brightness": 0.0, "flip_prob": 0.0, "min_box_size": 3.0},
        *((1, 3), "tfrecord"),
    ),
    (
        {"image_size": (128, 128), "grid_mask_prob": 1.0, "jitter_min": 1.2, "jitter_max": 1.2},
        *((2, 3), "tfrecord"),
    ),
    (
        {"image_size": (130, 257), "max_level": 8, "anchor_scale": 5.0, "hue": 5.0, "min_box_size": 0.0},
        *((0, 2), "coco"),
    ),
)


def loader_and_config(data, crop: str, seed: int) -> tuple:
    """Returns the app's loader, and the example's config and shard that give equal batches."""
    fields, shard, reader = VARIANTS[seed]
    source, files = data[reader]
    fields = {"augmentation": crop, "resize_min": 60, "resize_max": 150} | fields
    config = dataclasses.replace(get_config("efficientdet-d0"), **fields)
    options = {"batch_size": BATCH, "seed": seed}
    order = {"shard_id": shard[0], "num_shards": shard[1], "shuffle": "buffer"}
    loader = EfficientDetPipeline(source=source, config=config, training=True, **order, **options)
    same = {field.name for field in dataclasses.fields(example.Config)} & set(vars(config))
    values = {name: getattr(config, name) for name in same} | {
        "crop": crop,
        "jitter": (config.jitter_min, config.jitter_max),
        "resize": (config.resize_min, config.resize_max),
        "color": (config.brightness, config.contrast, config.saturation),
        "levels": tuple(config.anchors.levels),
    }
    return loader, example.Config(**files, **values, **options), shard


@pytest.mark.parametrize("seed", range(len(VARIANTS)))
@pytest.mark.parametrize("crop", ["scale_jitter", "min_iou_crop", "resize_range", "none"])
def test_example_pipeline_with_each_crop_gives_the_batches_of_the_efficientdet_app(data, crop, seed):
    loader, config, shard = loader_and_config(data, crop, seed)
    pipeline = example.make_pipeline(config, *shard)
    for step in range(STEPS):
        assert_same_batch(pipeline, loader, f"step {step}")


def test_efficientdet_example_dataset_gives_each_output_of_its_dali_pipeline_under_its_name(data):
    loader, config, shard = loader_and_config(data, "scale_jitter", 0)
    batches, pipeline = iter(example.make_dataset(config, *shard)), example.make_pipeline(config, *shard)
    for images, targets in [next(batches) for _ in range(2)]:
        expected = dict(zip(loader.element_spec, arrays(pipeline), strict=True))
        assert list(targets) == [name for name in expected if name != "images"]
        for name, tensor in {"images": images, **targets}.items():
            assert tensor.shape == loader.element_spec[name].shape
            np.testing.assert_array_equal(tensor, expected[name].reshape(tensor.shape))


def test_copied_efficientdet_pipeline_example_without_data_writes_a_picture_of_synthetic_images(tmp_path):
    run_alone(NAME, tmp_path)
    picture = np.asarray(PIL.Image.open(tmp_path / "alone" / "batch.png"))
    assert picture.shape == (2 * 512, 4 * 512, 3)
    for color in ((255, 0, 0), (0, 128, 128)):
        assert (picture == color).all(-1).sum() > 1000
    assert len((ROOT / "examples" / NAME).read_text().splitlines()) <= 300


@pytest.mark.parametrize("reader", ["coco", "tfrecord"])
def test_copied_efficientdet_pipeline_example_writes_a_picture_of_coco_or_tfrecord_data(
    data, reader, tmp_path
):
    flags = [f"--{name}={value}" for name, value in data[reader][1].items()]
    run_alone(NAME, tmp_path, "--output=a.png", "--crop=none", *flags)
    assert PIL.Image.open(tmp_path / "alone" / "a.png").size == (4 * 512, 2 * 512)
