"""How long inference takes, stage by stage, at any batch size: 1 for latency, 8 for throughput.

    times = measure(loader=loader, decode=loader.cut("decode"), network=network, to_detections=..., ...)

Stages run alone, one after the other, in interleaved rounds; the whole runs as infer.py does, where the
loader works ahead while the network computes. Nothing is printed here.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import PIL.Image
import tensorflow as tf
from nvidia import dali

from common import boxes as box_ops
from common.evaluation import coco_metrics, drawing
from common.labels import LabelMap
from common.loading import Loader, placement

# What infer.py does to a batch, in this order. Loaders without a cut have "load" in place of the first two.
STAGES = ("read and decode", "letterbox", "network", "post-processing", "results", "drawing")
LOAD = "load"

Network = Callable[[tf.Tensor], Any]  # images -> outputs of the network
ToDetections = Callable[[Any, tf.Tensor], tuple[tf.Tensor, ...]]  # those, letterbox -> what Detect returns
Draw = Callable[[list[int], list[dict[str, Any]]], None]  # image ids, their detections as COCO results
Window = tuple[float, float]  # milliseconds a batch: by the clock, of all CPUs


@dataclasses.dataclass(frozen=True)
class StageTime:
    """Milliseconds for one batch; a round's value is the mean over its batches.

    Attributes:
        wall_ms: median over the rounds, by the clock.
        lowest_ms, highest_ms: of the rounds.
        cpu_ms: median over the rounds, of all CPUs of this process together.
    """

    wall_ms: float
    lowest_ms: float
    highest_ms: float
    cpu_ms: float


@dataclasses.dataclass(frozen=True)
class InferenceTimes:
    """What `measure` found.

    Attributes:
        batch_size: images of a batch.
        num_batches: of a round.
        num_rounds: how many.
        stages: by name, in order.
        latency_ms: of one batch from file to picture, one stage after the other: the stages' sum.
        images_per_second: of the whole, overlapped: median over the rounds.
    """

    batch_size: int
    num_batches: int
    num_rounds: int
    stages: dict[str, StageTime]
    latency_ms: float
    images_per_second: float

    def share(self, stage: str, of: str = "network") -> float:
        """A stage's time in terms of another one's."""
        return self.stages[stage].wall_ms / self.stages[of].wall_ms


def measure(
    *,
    loader: Loader,
    network: Network,
    to_detections: ToDetections,
    label_map: LabelMap,
    decode: dali.Pipeline | None = None,
    draw: Draw | None = None,
    prefetch: int = 2,
    num_batches: int = 8,
    num_rounds: int = 5,
) -> InferenceTimes:
    """Measures every stage and the whole, after one round that compiles and warms up.

    Args:
        loader: an evaluation loader without targets; its data may be smaller than a round: it never ends.
        network, to_detections: the two halves of the app's make_detect (predict.make_halves).
        label_map: of the classes.
        decode: the loader's graph as far as the decoded image; None: loading stays one stage.
        draw: see `drawer`; None: there is no such stage.
        prefetch: of the loader and of `decode`: so many batches lie ready, and are not timed.
        num_batches, num_rounds: how much to measure.
    """

    def detections_of(outputs: Any, extra: dict[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        return to_detections(outputs, extra["letterbox"])

    def results_of(detections: tuple[tf.Tensor, ...], extra: dict[str, tf.Tensor]) -> list[dict[str, Any]]:
        arrays = [
            np.asarray(tensor) for tensor in (*detections[:3], extra["image_ids"], extra["image_sizes"])
        ]
        return coco_metrics.to_results(*arrays, label_map, set())

    def drawn(results: list[dict[str, Any]], extra: dict[str, tf.Tensor]) -> None:
        if draw:
            draw(extra["image_ids"].numpy().tolist(), results)

    work = {  # stage -> what it does to what the stage before it gave
        "network": lambda images, extra: network(images),
        "post-processing": detections_of,
        "results": results_of,
        "drawing": drawn,
    }
    windows: dict[str, list[Window]] = {}
    rates = []
    for number in range(num_rounds + 1):
        found = {}
        batches, found[LOAD] = _load(loader, prefetch, num_batches)
        if decode:
            found["read and decode"] = _decode(decode, prefetch, num_batches)
        extras = [extra for _, extra in batches]
        values = [images for images, _ in batches]
        for stage, function in work.items():
            values, found[stage] = _run(function, values, extras)
        rate = _rate(loader, prefetch, num_batches, work)
        if number:  # the first round compiled
            rates.append(rate)
            for stage, window in found.items():
                windows.setdefault(stage, []).append(window)
    loads = windows.pop(LOAD)
    if decode:
        windows["letterbox"] = [
            (all_[0] - part[0], all_[1] - part[1])
            for all_, part in zip(loads, windows["read and decode"], strict=True)
        ]
    else:
        windows[LOAD] = loads
    if not draw:
        del windows["drawing"]
    stages = {stage: _summary(windows[stage]) for stage in (LOAD, *STAGES) if stage in windows}
    return InferenceTimes(
        batch_size=int(batches[0][0].shape[0]),
        num_batches=num_batches,
        num_rounds=num_rounds,
        stages=stages,
        latency_ms=sum(stage.wall_ms for stage in stages.values()),
        images_per_second=float(np.median(rates)),
    )


def drawer(files: Sequence[pathlib.Path], label_map: LabelMap, score_threshold: float = 0.3) -> Draw:
    """Draws as infer.py does: each image is read again, at its full size. The pictures are not written.

    Args:
        files: the images; an image's id is its position.
        label_map: of the classes.
        score_threshold: least score of a detection that is drawn.
    """

    def draw(image_ids: list[int], results: list[dict[str, Any]]) -> None:
        shown = [result for result in results if result["score"] >= score_threshold]
        for image_id in image_ids:
            mine = [result for result in shown if result["image_id"] == image_id]
            drawing.draw_boxes(
                np.asarray(PIL.Image.open(files[image_id]).convert("RGB")),
                box_ops.ltwh_to_ltrb(np.array([r["bbox"] for r in mine], np.float32).reshape(-1, 4)),
                [label_map.class_of(result["category_id"]) for result in mine],
                label_map.names,
                [result["score"] for result in mine],
            )

    return draw


def _load(loader: Loader, prefetch: int, count: int) -> tuple[list[tuple[tf.Tensor, dict]], Window]:
    """So many batches, one right after the other, and their time."""
    batches = _started(loader, prefetch)
    clock = _Clock()
    loaded = [next(batches) for _ in range(count)]
    _wait()
    return loaded, clock.window(count)


def _decode(pipeline: dali.Pipeline, prefetch: int, count: int) -> Window:
    for _ in range(prefetch + 1):
        pipeline.run()
    clock = _Clock()
    for _ in range(count):
        pipeline.run()
    return clock.window(count)


def _run(
    function: Callable[[Any, dict], Any], values: list[Any], extras: list[dict]
) -> tuple[list[Any], Window]:
    """One stage for every batch; the first batch goes twice, untimed once."""
    function(values[0], extras[0])
    _wait()
    clock = _Clock()
    results = []
    for value, extra in zip(values, extras, strict=True):
        results.append(function(value, extra))
        _wait()
    return results, clock.window(len(values))


def _rate(loader: Loader, prefetch: int, count: int, work: dict[str, Callable[[Any, dict], Any]]) -> float:
    """Images a second of everything together, the loader ahead."""
    batches = _started(loader, prefetch)
    start = time.perf_counter()
    num_images = 0
    for _ in range(count):
        value, extra = next(batches)
        num_images += int(value.shape[0])
        for function in work.values():
            value = function(value, extra)
    _wait()
    return num_images / (time.perf_counter() - start)


def _started(loader: Loader, prefetch: int) -> Iterator[tuple[tf.Tensor, dict]]:
    """The loader's batches without those that lay ready."""
    with placement(loader):
        batches = iter(loader.dataset())
    for _ in range(prefetch + 1):
        next(batches)
    return batches


class _Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def window(self, count: int) -> Window:
        """Milliseconds for one of `count`."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return 1e3 * wall / count, 1e3 * cpu / count


def _wait() -> None:
    """Until the devices have done what they were asked."""
    tf.test.experimental.sync_devices()


def _summary(windows: list[Window]) -> StageTime:
    wall, cpu = np.array(windows).T
    return StageTime(float(np.median(wall)), float(wall.min()), float(wall.max()), float(np.median(cpu)))
