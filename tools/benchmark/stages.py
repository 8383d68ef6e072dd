"""Measures what each stage of a DALI loader costs.

For each stage, a truncated graph is measured. It ends after this stage. The cost of a stage is the CPU time
of its graph minus the CPU time of the previous, shorter graph. Each measurement starts and ends with full
queues and idle threads.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali.data_node import DataNode

from common.data.loader import BaseLoader
from tools.benchmark.protocol import WARM_UP
from tools.benchmark.summary import Record, spread

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
    graphs = {stage: truncate_at(loader.pipeline, ends).run for stage, ends in nodes.items()}
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
    ends: list = []
    for stage, pattern in stages.items():
        found = [kind for kind in kinds if re.fullmatch(pattern, kind)]
        if found:
            ends = [each for each, kind in zip(upstream, kinds, strict=True) if kind == found[-1]]
        for number, end in enumerate(ends):
            while len(after := consumers.get(end.outputs[0].name, [])) == 1 and "Arithmetic" in after[0].name:
                end = ends[number] = after[0]
        nodes[stage] = [node for end in ends for node in end.outputs]
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
    found, before = [], np.zeros(len(rounds))
    for stage in rounds[0]:
        cpu_ms, ms, _ = np.array([costs[stage] for costs in rounds]).T / batch_size
        found.append(
            {
                "stage": stage,
                "cpu_ms_per_image": spread((cpu_ms - before).tolist()),
                "cpu_ms_so_far": float(np.median(cpu_ms)),
                "images_per_second": float(np.median(1000 / ms)),
                "instead": False,  # the file format requires it
            }
        )
        before = cpu_ms
    return found


def _wait_until_quiet() -> None:
    while True:
        cpu = time.process_time()
        time.sleep(_QUIET)
        if time.process_time() - cpu < 0.1 * _QUIET:
            return
