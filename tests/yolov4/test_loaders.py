import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common.datacheck.datasets import open_source
from common.errors import UserError
from common.loader import SYNTHETIC_BOXES, gpu_visible, placement
from tools import synthetic
from yolov4 import loaders
from yolov4.config import get_config

CONFIG = dataclasses.replace(get_config("yolov4-nano"), image_size=(128, 192))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drawn")
    annotations = synthetic.draw_dataset(directory, 9, seed=1)
    return open_source(images=str(directory / "images"), annotations=str(annotations))


@pytest.mark.parametrize("training", [True, False])
def test_loaders_cannot_be_told_apart(source, training):
    specs = []
    for pipeline_type in ("dali_cpu", "tensorflow", "synthetic"):
        loader = loaders.make_loader(
            pipeline_type, source=source, config=CONFIG, batch_size=2, training=training, count_lost=True
        )
        assert loader.pipeline_type == pipeline_type
        assert loader.saveable
        data = loader.dataset()
        specs.append(data.element_spec)
        images, targets = next(iter(data))
        assert images.shape == (2, 128, 192, 3)
        assert list(loader.element_spec) == ["images", *sorted(targets, key=list(loader.element_spec).index)]
        for name, tensor in targets.items():
            assert loader.element_spec[name].is_compatible_with(tensor)
        assert images.numpy().min() >= 0 and 0.3 < images.numpy().max() <= 1
        np.testing.assert_array_equal((targets["classes"].numpy() >= 0).sum(1), targets["num_boxes"])
        if pipeline_type != "synthetic":
            assert loader.size == 9
            assert loader.steps_per_epoch == (4 if training else 5)
    assert specs[0] == specs[1] == specs[2]


@pytest.mark.parametrize(
    ("pipeline_type", "tiles"), [("dali_cpu", "batch"), ("dali_cpu", "fresh"), ("tensorflow", "batch")]
)
def test_multi_scale_and_the_end_of_mosaic(source, pipeline_type, tiles):
    changes = {"multi_scale": 1.5, "mosaic_prob": 1.0, "jitter": 0.0, "max_instances": 60}
    config = dataclasses.replace(CONFIG, **changes, mosaic_tiles=tiles)
    options = {"source": source, "config": config, "batch_size": 4, "training": True, "count_lost": True}
    boxes = {}
    for mosaic in (True, False):
        loader = loaders.make_loader(pipeline_type, **options, mosaic=mosaic)
        assert loader.dataset().element_spec[0].shape == (4, None, None, 3)
        elements = list(loader.dataset().take(6))
        sizes = {tuple(images.shape[1:3]) for images, _ in elements}
        assert len(sizes) > 1 and sizes <= {config.bucket(units) for units in range(2, 7)}
        boxes[mosaic] = np.concatenate([targets["num_boxes"] for _, targets in elements])
    truth = source.annotations.target_boxes
    most = np.diff(truth.row_splits).max()
    assert boxes[False].max() <= most < boxes[True].max()


def test_synthetic_needs_no_source_and_repeats():
    config = dataclasses.replace(CONFIG, multi_scale=1.4)
    loader = loaders.make_loader(
        "synthetic", source=None, config=config, batch_size=3, training=True, num_classes=4, seed=1
    )
    assert loader.element_spec["images"] == tf.TensorSpec((3, 128, 192, 3), tf.float32)
    assert loader.dataset().element_spec[0] == loader.element_spec["images"]
    (images, targets), (again, _) = loader.dataset().take(2)
    np.testing.assert_array_equal(images, again)
    classes, boxes = targets["classes"].numpy(), targets["boxes"].numpy()
    assert classes.min() == -1 and 0 <= classes.max() < 4
    assert (targets["num_boxes"].numpy() == SYNTHETIC_BOXES).all()
    real = classes >= 0
    assert (real.sum(1) == SYNTHETIC_BOXES).all() and (boxes[~real] == -1).all()
    assert (boxes[real] >= 0).all() and (boxes[real] <= 1).all()
    assert (boxes[real][:, 2:] > boxes[real][:, :2]).all()
    assert len(np.unique(images[:, 0, 0, 0])) == 3  # three images, not one


def test_synthetic_boxes_fit_max_instances():
    config = dataclasses.replace(CONFIG, max_instances=3)
    loader = loaders.make_loader("synthetic", source=None, config=config, batch_size=2, training=True)
    _, targets = next(iter(loader.dataset()))
    assert targets["num_boxes"].numpy().tolist() == [3, 3] and targets["boxes"].shape == (2, 3, 4)


@pytest.mark.skipif(gpu_visible(), reason="there is a GPU")
def test_without_a_gpu(source):
    options = {"source": source, "config": CONFIG, "batch_size": 2, "training": True}
    assert loaders.make_loader("auto", **options).pipeline_type == "dali_cpu"
    with pytest.raises(
        UserError, match=r"--pipeline_type=dali_gpu needs a GPU .*use --pipeline_type=dali_cpu"
    ):
        loaders.make_loader("dali_gpu", **options)


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_visible(), reason="no GPU")
def test_with_a_gpu(source):
    options = {"source": source, "config": CONFIG, "batch_size": 2, "training": True}
    loader = loaders.make_loader("auto", **options)
    assert loader.pipeline_type == "dali_gpu" and not loader.saveable
    with placement(loader):
        images, targets = next(iter(loader.dataset()))
    assert images.shape == (2, 128, 192, 3)
    np.testing.assert_array_equal((targets["classes"].numpy() >= 0).sum(1), targets["num_boxes"])


def test_more_ranks_than_images(source):
    for pipeline_type in ("dali_cpu", "tensorflow"):
        with pytest.raises(UserError, match="9 images cannot be shared by 10 ranks"):
            loaders.make_loader(
                pipeline_type,
                source=source,
                config=CONFIG,
                batch_size=1,
                training=True,
                shard_id=9,
                num_shards=10,
            ).dataset()
