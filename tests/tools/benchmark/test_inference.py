import types

import tensorflow as tf

from tests.common.record_writing import LABELS
from tools.benchmark import stages


class Loader:
    """Batch number i has one image of value i, with image id i."""

    pipeline_type, batch_size = "dali_cpu", 1

    def iterator(self):
        number = 0
        while True:
            extra = {"image_ids": [number], "image_sizes": [[10, 20]], "letterbox": [[0.0, 0, 10, 20]]}
            yield tf.fill([1, 1], number), {name: tf.constant(value) for name, value in extra.items()}
            number += 1


def to_detections(outputs, letterbox):
    assert letterbox.shape == (1, 4)
    scores = tf.cast(outputs, tf.float32) / 1000
    return tf.constant([[[0.0, 0, 1, 1]]]), scores, tf.constant([[2]]), tf.constant([True])


def test_benchmark_of_inference_stages_repeats_one_batch_but_whole_inference_reads_new_batches(monkeypatch):
    steps = {}

    def measure(cuts, a):
        steps.update(cuts)
        return [{name: stages.Cost(1.0, ms, 7) for name in cuts} for ms in (2.0, 4.0, 9.0)]

    monkeypatch.setattr(stages, "measure", measure)
    times = stages.measure_inference(
        Loader(), lambda images: 10 * images, to_detections, LABELS, types.SimpleNamespace()
    )
    assert list(times["stages"]) == ["load", "network", "post-processing", "results"]
    assert (times["batch_size"], times["num_batches"], times["num_rounds"]) == (1, 7, 3)
    assert times["latency_ms"] == 16.0 and times["images_per_second"] == 250.0
    assert times["stages"]["load"] == {"wall_ms": 4.0, "lowest_ms": 2.0, "highest_ms": 9.0, "cpu_ms": 1.0}

    def results_of(i):
        return [{"image_id": i, "category_id": 90, "bbox": [0.0, 0.0, 20.0, 10.0], "score": i / 100}]

    assert [steps["results"]() for _ in range(2)] == [results_of(0), results_of(0)]
    assert [steps["whole"]() for _ in range(2)] == [results_of(1), results_of(2)]
    images, _ = steps["load"]()
    assert images.numpy() == 3 and steps["network"]().numpy() == 0
    _, scores, *_ = steps["post-processing"]()
    assert scores.numpy() == 0
