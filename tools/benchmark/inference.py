"""Measures the time of each stage of inference at one batch size.

Each stage repeats its work on the same batch. The stage "whole" is complete inference as in infer.py: the
loader prepares batches while the network computes.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.labels import LabelMap
from common.data.loader import BaseLoader
from common.evaluation import coco_metrics
from tools.benchmark import stages
from tools.benchmark.summary import Record

# The network: images -> outputs. The post-processing: (outputs, letterbox) -> detections.
Halves = tuple[Callable[[tf.Tensor], Any], Callable[[Any, tf.Tensor], tuple[tf.Tensor, ...]]]


def measure(loader: BaseLoader, halves: Halves, label_map: LabelMap, a: Any) -> Record:
    """Measures each stage and complete inference.

    Args:
        loader: an evaluation loader without targets.
        halves: the network and its post-processing, from the app's predict.make_halves.
        a: the flags prefetch, rounds and seconds.

    Returns:
        A record. `num_batches` is the smallest number of batches timed in one round. `stages` maps the name
        of a stage to its milliseconds per batch. `latency_ms` is the sum of the stages. `images_per_second`
        is the median rate of complete inference.
    """
    functions = _functions(stages.load(loader), halves, label_map)
    cuts, batch = {}, None
    for name, function in functions.items():
        cuts[name] = _chain([function], batch)
        batch = cuts[name]()
    cuts["whole"] = _chain(functions.values(), None)
    rounds = stages.measure(cuts, a)
    found = {name: _stage_time([costs[name] for costs in rounds]) for name in cuts}
    whole = found.pop("whole")
    return {
        "batch_size": loader.batch_size,
        "num_batches": min(cost.batches for costs in rounds for cost in costs.values()),
        "num_rounds": len(rounds),
        "stages": found,
        "latency_ms": sum(each["wall_ms"] for each in found.values()),
        "images_per_second": 1000 * loader.batch_size / whole["wall_ms"],
    }


def _functions(load: stages.Advance, halves: Halves, label_map: LabelMap) -> dict[str, Callable[[Any], Any]]:
    network, to_detections = halves

    def to_results(found: tuple[Any, dict[str, tf.Tensor]]) -> list[dict[str, Any]]:
        (boxes, scores, classes, *_), extra = found
        columns = (boxes, scores, classes, extra["image_ids"], extra["image_sizes"])
        boxes, scores, classes, image_ids, image_sizes = map(np.asarray, columns)
        return coco_metrics.to_results(boxes, scores, classes, image_ids, image_sizes, label_map, set())

    return {
        "load": lambda _: load(),
        "network": lambda batch: (network(batch[0]), batch[1]),
        "post-processing": lambda found: (to_detections(found[0], found[1]["letterbox"]), found[1]),
        "results": to_results,
    }


def _chain(functions: Iterable[Callable[[Any], Any]], value: Any) -> stages.Advance:
    """Returns a function that applies all functions in order, and waits for the devices."""

    def advance() -> Any:
        found = value
        for function in functions:
            found = function(found)
        tf.test.experimental.sync_devices()
        return found

    return advance


def _stage_time(costs: Sequence[stages.Cost]) -> dict[str, float]:
    wall = [cost.ms for cost in costs]
    return {
        "wall_ms": statistics.median(wall),
        "lowest_ms": min(wall),
        "highest_ms": max(wall),
        "cpu_ms": statistics.median(cost.cpu_ms for cost in costs),
    }
