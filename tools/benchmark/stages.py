"""What each stage of a DALI loader costs: the loader's own graph, truncated after each stage.

A truncated graph gives what its stage gives; DALI leaves out whatever that does not need. The stage costs the
CPU time of its graph minus that of the graph before it. All graphs live in one process and are measured in
turn. Each measurement starts and ends with full queues and no work going on, so the CPU time is that of as
many batches as were taken.
"""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from nvidia import dali
from nvidia.dali.data_node import DataNode

from common.loader import BaseLoader, placement
from tools.benchmark.protocol import WARM_UP
from tools.benchmark.summary import Record, spread

SHARE = 1 / 3  # of --seconds for each cut in each round: CPU time needs less than a rate
_QUIET = 0.05  # seconds without work after which a queue counts as full


class Cut(NamedTuple):
    """One truncated graph.

    Attributes:
        stage: what comes last in it.
        advance: makes one batch.
        instead: the cut that it follows, where it replaces the rest of the loader and is not part of its sum.
    """

    stage: str
    advance: Callable[[], object]
    instead: str = ""


class Cost(NamedTuple):
    """What one cut cost in one round, for an image: CPU time, and time by the clock."""

    cpu_ms: float
    ms: float


def load(loader: BaseLoader) -> Callable[[], object]:
    """A function that takes a batch from the loader's dataset."""
    with placement(loader):
        batches = iter(loader.dataset())

    def advance() -> object:
        batch = next(batches)
        if loader.pipeline_type == "dali_gpu":
            tf.test.experimental.sync_devices()  # the batch is handed over before it is there
        return batch

    return advance


def cuts(loader: BaseLoader, stages: Mapping[str, str], open_loader: Callable[..., BaseLoader]) -> list[Cut]:
    """All cuts of a DALI loader, in their order.

    Args:
        loader: EfficientDetPipeline or YOLOv4Pipeline.
        stages: see `stage_nodes`.
        open_loader: makes the same loader with other options of make_loader.
    """
    whole = loader.pipeline
    found = [Cut(stage, truncate_at(whole, nodes).run) for stage, nodes in stage_nodes(whole, stages).items()]
    if "num_positives" not in loader.element_spec:
        return [*found, Cut("boxes", whole.run), Cut("hand-over", load(loader))]
    if loader.pipeline_type == "dali_gpu":
        return [*found, Cut("encode", whole.run), Cut("hand-over", load(loader))]
    return [  # on a CPU `.dataset()` encodes boxes after the graph, and `.pipeline` in the graph
        *found,
        Cut("hand-over", load(open_loader(with_targets=False))),
        Cut("encode", load(loader)),
        Cut("fn.box_encoder", whole.run, instead=found[-1].stage),
    ]


def stage_nodes(pipeline: dali.Pipeline, stages: Mapping[str, str]) -> dict[str, list[DataNode]]:
    """What each stage makes.

    Args:
        pipeline: built; its first output are the images.
        stages: stage -> regex of the operators that end it, by their names without numbers, as in
            `__ImageSlice_56`. A stage without operators in this graph ends where the one before it ends. The
            last stage ends with the images.

    Returns:
        Stage -> outputs of the operators that match last, and of the arithmetic that only they feed.
    """
    images = pipeline._graph_outputs[0]
    # In the order in which the outputs need them: what the images need comes first.
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
    """The part of a pipeline's graph that these nodes need, built with the same settings."""
    part = dali.Pipeline(
        batch_size=pipeline.max_batch_size,
        num_threads=pipeline.num_threads,
        device_id=pipeline.device_id,
        seed=pipeline.seed,
        prefetch_queue_depth=pipeline.prefetch_queue_depth,
        exec_dynamic=True,
    )
    part.set_outputs(*nodes)
    part.build()
    return part


def measure(cuts: Sequence[Cut], a: Any) -> list[Record]:
    """Measures all cuts in turn, in rounds, and sums up; see `summarize`.

    Args:
        cuts: of one loader, in their order.
        a: the flags: batch_size, prefetch, rounds, seconds.
    """
    for cut in cuts:
        for _ in range(WARM_UP):
            cut.advance()
    options = {"batch_size": a.batch_size, "seconds": a.seconds * SHARE, "settle": a.prefetch + 1}
    costs = [{cut.stage: cost(cut, **options) for cut in cuts} for _ in range(a.rounds)]
    return summarize(cuts, costs)


def cost(cut: Cut, *, batch_size: int, seconds: float, settle: int) -> Cost:
    """Takes batches for at least so many seconds.

    Args:
        cut: it must not be running.
        batch_size: images of a batch.
        seconds: of the time that is measured.
        settle: batches that were ready before it began; the rate is that of those after them.
    """
    _wait_until_quiet()
    cpu = time.process_time()
    for _ in range(settle):
        cut.advance()
    batches, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        cut.advance()
        batches += 1
    elapsed = time.monotonic() - start
    _wait_until_quiet()
    cpu = time.process_time() - cpu
    return Cost(1000 * cpu / (batch_size * (settle + batches)), 1000 * elapsed / (batch_size * batches))


def summarize(cuts: Sequence[Cut], rounds: Sequence[Mapping[str, Cost]]) -> list[Record]:
    """What each stage costs more than the cut before it, and what the loader costs so far.

    Args:
        cuts: in their order.
        rounds: for each round the cost of each cut, by its stage.
    """
    found, before = [], ""
    for stage, _, instead in cuts:
        base = instead or before
        own = [costs[stage].cpu_ms - (costs[base].cpu_ms if base else 0.0) for costs in rounds]
        found.append(
            {
                "stage": stage,
                "cpu_ms_per_image": spread(own),
                "cpu_ms_so_far": statistics.median(costs[stage].cpu_ms for costs in rounds),
                "images_per_second": statistics.median(1000 / costs[stage].ms for costs in rounds),
                "instead": bool(instead),
            }
        )
        before = before if instead else stage
    return found


def _wait_until_quiet() -> None:
    while True:
        cpu = time.process_time()
        time.sleep(_QUIET)
        if time.process_time() - cpu < 0.1 * _QUIET:
            return
