import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common.datacheck.datasets import open_source
from common.errors import UserError
from common.loader import SYNTHETIC_BOXES, gpu_visible
from efficientdet import loaders
from efficientdet.config import get_config
from tools import synthetic

CONFIG = dataclasses.replace(get_config("efficientdet-nano"), image_size=(128, 192))


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
        assert np.isfinite(images).all() and (targets["num_positives"].numpy() >= 0).all()
        if pipeline_type != "synthetic":
            assert loader.size == 9
            assert loader.steps_per_epoch == (4 if training else 5)
    assert specs[0] == specs[1] == specs[2]


def test_synthetic_needs_no_source_and_repeats(tmp_path):
    loader = loaders.make_loader(
        "synthetic", source=None, config=CONFIG, batch_size=3, training=True, num_classes=4, seed=1
    )
    (images, targets), (again, _) = loader.dataset().take(2)
    np.testing.assert_array_equal(images, again)
    assert (targets["num_positives"].numpy() > 0).all()
    classes = targets["classes"].numpy()
    assert classes.min() == -1 and 0 <= classes.max() < 4
    assert ((classes >= 0).sum(1) == SYNTHETIC_BOXES).all()
    assert len(np.unique(images[:, 0, 0, 0])) == 3  # three images, not one


@pytest.mark.skipif(gpu_visible(), reason="there is a GPU")
def test_without_a_gpu(source):
    options = {"source": source, "config": CONFIG, "batch_size": 2, "training": True}
    assert loaders.make_loader("auto", **options).pipeline_type == "dali_cpu"
    with pytest.raises(
        UserError, match=r"--pipeline_type=dali_gpu needs a GPU .*use --pipeline_type=dali_cpu"
    ):
        loaders.make_loader("dali_gpu", **options)


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


def test_fit_accepts_the_dataset(source):
    """Keras' own loop, with a loss that reads the targets dict."""

    class Counter(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, images, training=False):
            return tf.reduce_mean(images, [1, 2, 3]) * self.scale

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(tf.square(y_pred - y["num_positives"])) + 0.0 * tf.cast(
                y["classes"][0, 0], tf.float32
            )

    loader = loaders.make_loader("dali_cpu", source=source, config=CONFIG, batch_size=2, training=True)
    model = Counter()
    model.compile(optimizer="sgd")
    history = model.fit(loader.dataset(), steps_per_epoch=loader.steps_per_epoch, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2 and min(history.history["loss"]) > 0
