"""The stages are those of the product, in its order; what is said of their times adds up."""

import dataclasses

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
from common.labels import LabelMap
from common.sources import ImageListSource
from tools.benchmark import inference, stages

APPS = {
    "efficientdet": (efficientdet, {"fpn_cells": 1, "head_repeats": 1, "max_level": 5}),
    "yolov4": (yolov4, {"width": 0.25}),
}
LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))


@pytest.fixture(scope="module", params=APPS)
def parts(request, drawn):
    """Everything that `measure` takes, for one app with random weights that find a lot."""
    app, tiny = APPS[request.param]
    config = dataclasses.replace(
        app.config.get_config(f"{request.param}-nano"), image_size=(64, 96), score_threshold=0.0, **tiny
    )
    model = app.model.build_model(config.model_name, num_classes=3, config=config)
    files = sorted((drawn / "images").iterdir())
    source = ImageListSource(files)

    def loader(batch_size):
        return app.loaders.make_loader(
            "dali_cpu",
            source=source,
            config=config,
            batch_size=batch_size,
            training=False,
            with_targets=False,
        )

    return app, model, config, files, loader


def measure(parts, batch_size=2, **options):
    app, model, config, _, loader = parts
    return inference.measure(
        loader=loader(batch_size),
        halves=app.predict.make_halves(model, config),
        label_map=LABELS,
        num_batches=3,
        num_rounds=2,
        **options,
    )


def test_the_halves_are_what_detects(parts):
    app, model, config, _, loader = parts
    images, extra = next(iter(loader(4).dataset()))
    network, to_detections = app.predict.make_halves(model, config)
    together = app.predict.make_detect(model, config)(images, extra["letterbox"])
    for ours, theirs in zip(to_detections(network(images), extra["letterbox"]), together, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_all_stages_of_a_batch(parts):
    files = parts[3]
    drawn = []
    real = inference.drawer(files, LABELS, score_threshold=0.0)

    def draw(image_ids, results):
        drawn.append((image_ids, {result["image_id"] for result in results}))
        real(image_ids, results)

    times = measure(parts, draw=draw)
    assert list(times["stages"]) == ["load", "network", "post-processing", "results", "drawing"]
    assert (times["batch_size"], times["num_batches"], times["num_rounds"]) == (2, 3, 2)
    assert times["latency_ms"] == pytest.approx(sum(stage["wall_ms"] for stage in times["stages"].values()))
    assert times["images_per_second"] > 0
    for stage in times["stages"].values():
        assert 0 < stage["lowest_ms"] <= stage["wall_ms"] <= stage["highest_ms"]
    # one round more than two, each with an untimed call, three batches and three of the whole
    assert len(drawn) == 3 * (1 + 3 + 3)
    assert all(len(image_ids) == 2 and found == set(image_ids) for image_ids, found in drawn)


def test_a_cut_splits_loading_and_nothing_to_draw_with_draws_nothing(parts):
    class Counted:
        def __init__(self, pipeline):
            self.pipeline, self.runs = pipeline, 0

        def run(self):
            self.runs += 1
            return self.pipeline.run()

    loader = parts[-1]
    whole = loader(2).pipeline
    nodes = stages.stage_nodes(whole, {"decode": "ImageSlice", "end": "Resize"})
    cut = Counted(stages.truncate_at(whole, nodes["decode"]))
    times = measure(parts, decode=cut)
    assert list(times["stages"]) == [
        "read and decode",
        "letterbox",
        "network",
        "post-processing",
        "results",
    ]
    assert cut.runs == 3 * (2 + 1 + 3)  # rounds x (ready, one that may be under way, timed)
    assert times["stages"]["read and decode"]["lowest_ms"] > 0


def test_windows_are_milliseconds_a_batch(parts, monkeypatch):
    """A clock that moves by a second at every look: a window of three batches took 333 ms each."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(inference.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(inference.time, "process_time", lambda: 0.0)
    times = measure(parts, batch_size=4)
    for stage in times["stages"].values():
        assert stage["wall_ms"] == stage["lowest_ms"] == stage["highest_ms"] == pytest.approx(1000 / 3)
        assert stage["cpu_ms"] == 0
    assert times["images_per_second"] == pytest.approx(12.0)
    assert times["latency_ms"] == pytest.approx(len(times["stages"]) * 1000 / 3)


def test_every_stage_sees_what_the_one_before_gave():
    """A loader, a network and a post-processing of plain tensors."""

    class Loader:
        pipeline_type = "dali_cpu"

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

    seen = []
    inference.measure(
        loader=Loader(),
        halves=(lambda images: 10 * images, to_detections),
        label_map=LABELS,
        draw=lambda image_ids, results: seen.append((image_ids, results)),
        num_batches=2,
        num_rounds=1,
    )
    expected = [
        ([i], [{"image_id": i, "category_id": 90, "bbox": [0.0, 0.0, 20.0, 10.0], "score": i / 100}])
        for i in (3, 3, 4, 3, 4)  # prefetch + 1 lay ready; the first once more, to warm up; then the whole
    ]
    assert seen == expected * 2
