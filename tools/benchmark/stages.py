"""Measures what each stage of a DALI loader costs, and how long each stage of inference takes.

For each stage of a loader, a truncated graph is measured. It ends after this stage. The cost of a stage is
the CPU time of its graph minus the CPU time of the previous, shorter graph. Each measurement starts and ends
with full queues and idle threads. Each stage of inference repeats its work on one batch.
"""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali.data_node import DataNode

from common.data.labels import LabelMap
from common.data.loader import BaseLoader
from common.evaluation import coco_metrics
from tools.benchmark.rounds import Record, spread

WARM_UP = 3  # batches before the first measurement: they compile and allocate memory
SHARE = 1 / 3  # share of --seconds for one graph
Advance = Callable[[], object]
_QUIET = 0.05  # seconds without work after which a queue counts as full


class Cost(NamedTuple):
    """Average CPU time and wall time of a batch in one round, and the number of batches."""

    cpu_ms: float
    ms: float
    batches: int


def load(loader: BaseLoader) -> Advance:
    batches = loader.iterator()

    def advance() -> object:
        batch = next(batches)
        if loader.pipeline_type == "dali_gpu":
            tf.test.experimental.sync_devices()  # `next` returns before the GPU has finished
        return batch

    return advance


def cuts(loader: Any, stages: Mapping[str, str]) -> dict[str, Advance]:
    """Returns {stage: function that makes a batch}, from the shortest graph to the complete loader."""
    nodes = stage_nodes(loader.pipeline, stages)
    graphs = {stage: truncate_at(loader.pipeline, outputs).run for stage, outputs in nodes.items()}
    without_targets = dataclasses.replace(loader, with_targets=False)
    return graphs | {"hand-over": load(without_targets), "targets": load(loader)}


def stage_nodes(pipeline: Any, stages: Mapping[str, str]) -> dict[str, list[DataNode]]:
    """Finds the outputs of each stage.

    Args:
        pipeline: a built dali.Pipeline, whose first output is the images.
        stages: name of a stage -> regex for its last operators, such as "ImageSlice" for `__ImageSlice_56`.
            A stage without a match ends where the previous stage ends.

    Returns:
        Name of a stage -> outputs of its last operators.
    """
    images = pipeline._graph_outputs[0]
    # `_ops` begins with the operators that make the images.
    names = [operator.name for operator in pipeline._ops]
    upstream = pipeline._ops[: names.index(images.source.name) + 1]
    kinds = [re.sub(r"^_*|_\d+$", "", operator.name) for operator in upstream]
    consumers: dict[str, list] = {}
    for operator in pipeline._ops:
        for node in operator.inputs:
            consumers.setdefault(node.name, []).append(operator)
    nodes: dict[str, list[DataNode]] = {}
    last_operators: list = []
    for stage, pattern in stages.items():
        matches = [kind for kind in kinds if re.fullmatch(pattern, kind)]
        if matches:
            last_operators = [each for each, kind in zip(upstream, kinds, strict=True) if kind == matches[-1]]
        for number, end in enumerate(last_operators):
            while len(after := consumers.get(end.outputs[0].name, [])) == 1 and "Arithmetic" in after[0].name:
                end = last_operators[number] = after[0]
        nodes[stage] = [node for end in last_operators for node in end.outputs]
    return nodes | {stage: [images]}


def truncate_at(pipeline: dali.Pipeline, nodes: list[DataNode]) -> dali.Pipeline:
    names = ("num_threads", "device_id", "seed", "prefetch_queue_depth")
    options = {name: getattr(pipeline, name) for name in names}
    part = dali.Pipeline(batch_size=pipeline.max_batch_size, exec_dynamic=True, **options)
    part.set_outputs(*nodes)
    part.build()
    return part


def measure(cuts: Mapping[str, Advance], a: Any) -> list[dict[str, Cost]]:
    """Measures all truncated graphs once per round. Returns {stage: cost} for each round.

    Args:
        cuts: name of the last stage -> function that makes one batch, from the shortest graph to the longest.
        a: the flags prefetch, rounds and seconds.
    """
    for advance in cuts.values():
        for _ in range(WARM_UP):
            advance()
    seconds, settle = a.seconds * SHARE, a.prefetch + 1
    return [{stage: cost(each, seconds, settle) for stage, each in cuts.items()} for _ in range(a.rounds)]


def cost(advance: Advance, seconds: float, settle: int) -> Cost:
    """Measures the average cost of a batch for at least `seconds`, after `settle` batches."""
    _wait_until_quiet()
    cpu = time.process_time()
    for _ in range(settle):
        advance()
    batches, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        advance()
        batches += 1
    elapsed = time.monotonic() - start
    _wait_until_quiet()
    cpu = time.process_time() - cpu
    return Cost(1000 * cpu / (settle + batches), 1000 * elapsed / batches, batches)


def summarize(rounds: Sequence[Mapping[str, Cost]], batch_size: int) -> list[Record]:
    """Returns the cost per image that each stage adds, and the cost of the loader up to that stage."""
    stages, before = [], np.zeros(len(rounds))
    for stage in rounds[0]:
        cpu_ms, ms, _ = np.array([costs[stage] for costs in rounds]).T / batch_size
        stages.append(
            {
                "stage": stage,
                "cpu_ms_per_image": spread((cpu_ms - before).tolist()),
                "cpu_ms_so_far": float(np.median(cpu_ms)),
                "images_per_second": float(np.median(1000 / ms)),
            }
        )
        before = cpu_ms
    return stages


def measure_inference(
    loader: BaseLoader, network: Callable, to_detections: Callable, label_map: LabelMap, a: Any
) -> Record:
    """Measures each stage of inference at the loader's batch size, and complete inference as in infer.py.

    In complete inference, the loader prepares batches while the network computes.

    Args:
        loader: an evaluation loader without targets.
        network, to_detections: the app's predict.make_halves.
        a: the flags prefetch, rounds and seconds.

    Returns:
        A record. `num_batches` is the smallest number of batches timed in one round. `stages` maps the name
        of a stage to its milliseconds per batch. `latency_ms` is the sum of the stages. `images_per_second`
        is the median rate of complete inference.
    """
    batches = loader.iterator()
    images, extra = next(batches)
    outputs = network(images)
    detections = to_detections(outputs, extra["letterbox"])

    def infer() -> list[Record]:
        images, extra = next(batches)
        return _to_results(to_detections(network(images), extra["letterbox"]), extra, label_map)

    steps: dict[str, Advance] = {
        "load": lambda: _synced(next(batches)),
        "network": lambda: _synced(network(images)),
        "post-processing": lambda: _synced(to_detections(outputs, extra["letterbox"])),
        "results": lambda: _to_results(detections, extra, label_map),
        "whole": infer,
    }
    rounds = measure(steps, a)
    times = {name: _stage_time([costs[name] for costs in rounds]) for name in steps}
    total = times.pop("whole")
    return {
        "batch_size": loader.batch_size,
        "num_batches": min(cost.batches for costs in rounds for cost in costs.values()),
        "num_rounds": len(rounds),
        "stages": times,
        "latency_ms": sum(each["wall_ms"] for each in times.values()),
        "images_per_second": 1000 * loader.batch_size / total["wall_ms"],
    }


def _synced(result: object) -> object:
    """Waits for the devices, because TensorFlow returns before a GPU has finished."""
    tf.test.experimental.sync_devices()
    return result


def _to_results(detections: Sequence[tf.Tensor], extra: Mapping, label_map: LabelMap) -> list[Record]:
    columns = (*detections[:3], extra["image_ids"], extra["image_sizes"])
    boxes, scores, classes, image_ids, image_sizes = map(np.asarray, columns)
    return coco_metrics.to_results(boxes, scores, classes, image_ids, image_sizes, label_map, set())


def _stage_time(costs: Sequence[Cost]) -> dict[str, float]:
    wall = [cost.ms for cost in costs]
    return {
        "wall_ms": statistics.median(wall),
        "lowest_ms": min(wall),
        "highest_ms": max(wall),
        "cpu_ms": statistics.median(cost.cpu_ms for cost in costs),
    }


def _wait_until_quiet() -> None:
    while True:
        cpu = time.process_time()
        time.sleep(_QUIET)
        if time.process_time() - cpu < 0.1 * _QUIET:
            return
