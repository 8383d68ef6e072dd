"""The stages are those of the product, in its order; what is said of their times adds up."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf

import efficientdet.config
import efficientdet.loaders
import efficientdet.model
import efficientdet.predict
import yolov4.config
import yolov4.loaders
import yolov4.model
import yolov4.predict
from common.datasets import ImageListSource
from common.labels import LabelMap
from tools.benchmark import inference

APPS = {
    "efficientdet": (efficientdet, {"fpn_cells": 1, "head_repeats": 1, "max_level": 5}),
    "yolov4": (yolov4, {"width": 0.25}),
}
LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))
FLAGS = types.SimpleNamespace(prefetch=1, rounds=3, seconds=0.06)


@pytest.fixture(scope="module", params=APPS)
def parts(request, drawn):
    """The loader and the network of one app with random weights that find a lot."""
    app, tiny = APPS[request.param]
    config = dataclasses.replace(
        app.config.get_config(f"{request.param}-nano"), image_size=(64, 96), score_threshold=0.0, **tiny
    )
    model = app.model.build_model(config.model_name, num_classes=3, config=config)
    loader = app.loaders.make_loader(
        "dali_cpu",
        source=ImageListSource(tuple(map(str, sorted((drawn / "images").iterdir())))),
        config=config,
        batch_size=4,
        training=False,
        with_targets=False,
    )
    return app, model, config, loader


def test_the_halves_are_what_detects(parts):
    app, model, config, loader = parts
    images, extra = next(iter(loader.dataset()))
    network, to_detections = app.predict.make_halves(model, config)
    together = app.predict.make_detect(model, config)(images, extra["letterbox"])
    for ours, theirs in zip(to_detections(network(images), extra["letterbox"]), together, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_all_stages_of_a_batch(parts):
    app, model, config, loader = parts
    times = inference.measure(loader, app.predict.make_halves(model, config), LABELS, FLAGS)
    assert list(times["stages"]) == ["load", "network", "post-processing", "results"]
    assert (times["batch_size"], times["num_rounds"]) == (4, 3)
    assert times["num_batches"] >= 1
    assert times["latency_ms"] == pytest.approx(sum(stage["wall_ms"] for stage in times["stages"].values()))
    assert times["images_per_second"] > 0
    for stage in times["stages"].values():
        assert 0 < stage["lowest_ms"] <= stage["wall_ms"] <= stage["highest_ms"]


def test_every_stage_sees_what_the_one_before_gave(monkeypatch):
    """A loader, a network and a post-processing of plain tensors; the whole takes a new batch each time."""

    class Loader:
        pipeline_type, batch_size = "dali_cpu", 1

        def dataset(self):
            number = 0
            while True:
                extra = {"image_ids": [number], "image_sizes": [[10, 20]], "letterbox": [[0.0, 0, 10, 20]]}
                yield tf.fill([1, 1], number), {name: tf.constant(value) for name, value in extra.items()}
                number += 1

    def to_detections(outputs, letterbox):
        assert letterbox.shape == (1, 4)
        scores = tf.cast(outputs, tf.float32) / 1000
        return tf.constant([[[0.0, 0, 1, 1]]]), scores, tf.constant([[2]]), tf.constant([True])

    cuts = {}

    def measure(given, a):
        cuts.update(given)
        cost = inference.stages.Cost
        return [{name: cost(1.0, ms, 7) for name in given} for ms in (2.0, 4.0, 9.0)]

    monkeypatch.setattr(inference.stages, "measure", measure)
    halves = (lambda images: 10 * images, to_detections)
    times = inference.measure(Loader(), halves, LABELS, FLAGS)
    assert (times["num_batches"], times["num_rounds"]) == (7, 3)
    assert times["latency_ms"] == 16.0 and times["images_per_second"] == 250.0
    assert times["stages"]["load"] == {"wall_ms": 4.0, "lowest_ms": 2.0, "highest_ms": 9.0, "cpu_ms": 1.0}

    def result(i):
        return [{"image_id": i, "category_id": 90, "bbox": [0.0, 0.0, 20.0, 10.0], "score": i / 100}]

    assert [cuts["results"]() for _ in range(2)] == [result(0), result(0)]
    assert [cuts["whole"]() for _ in range(2)] == [result(1), result(2)]
