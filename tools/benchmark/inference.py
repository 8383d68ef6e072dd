"""How long inference takes, stage by stage, at any batch size: 1 for latency, 8 for throughput.

Stages run alone, one after another, in interleaved rounds. The whole runs as in infer.py, where the loader
works ahead while the network computes.
"""

import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import PIL.Image
import tensorflow as tf
from nvidia import dali

from common.evaluation import coco_metrics, drawing
from common.labels import LabelMap
from common.loader import BaseLoader, placement
from tools.benchmark.summary import Record

# images -> outputs of the network; those, letterbox -> what Detect returns
Halves = tuple[Callable[[tf.Tensor], Any], Callable[[Any, tf.Tensor], tuple[tf.Tensor, ...]]]
Draw = Callable[[list[int], list[dict[str, Any]]], None]  # image ids, their detections as COCO results


def measure(
    *,
    loader: BaseLoader,
    halves: Halves,
    label_map: LabelMap,
    decode: dali.Pipeline | None = None,
    draw: Draw | None = None,
    prefetch: int = 2,
    num_batches: int = 8,
    num_rounds: int = 5,
) -> Record:
    """Measures every stage and the whole, after one round that compiles and warms up.

    Args:
        loader: an evaluation loader without targets. It never ends, so its data may be less than a round.
        halves: of the app's make_detect (predict.make_halves).
        label_map: of the classes.
        decode: the loader's graph as far as the decoded image; None: loading stays one stage, "load".
        draw: see `drawer`; None: there is no such stage.
        prefetch: of the loader and of `decode`: so many batches are ready before the clock starts.
        num_batches, num_rounds: how much to measure.

    Returns:
        batch_size, num_batches, num_rounds. stages: by name in their order, milliseconds for one batch:
        wall_ms (median of the rounds), lowest_ms, highest_ms, cpu_ms (median). latency_ms: sum of the stages.
        images_per_second: of the whole, median of the rounds.
    """
    stages = _stages(halves, label_map, draw)

    def detect(images: tf.Tensor, extra: dict[str, tf.Tensor]) -> None:
        value = images
        for function in stages.values():
            value = function(value, extra)

    def decode_batch(_: int) -> None:
        decode.run()

    rounds, rates = [], []
    for _ in range(num_rounds + 1):
        batches, loading = _timed(lambda *batch: batch, _batches(loader, prefetch, num_batches))
        windows = {"load": loading}
        if decode:
            for number in range(prefetch + 1):
                decode_batch(number)
            _, decoding = _timed(decode_batch, zip(range(num_batches)))
            windows = {"read and decode": decoding, "letterbox": loading - decoding}
        values, extras = zip(*batches, strict=True)
        for stage, function in stages.items():
            function(values[0], extras[0])  # not timed
            values, windows[stage] = _timed(function, zip(values, extras, strict=True), wait=True)
        _, whole = _timed(detect, _batches(loader, prefetch, num_batches))
        rounds.append(windows)
        rates.append(1000 / whole[0])

    times = {stage: _stage_time([windows[stage] for windows in rounds[1:]]) for stage in rounds[0]}
    batch_size = len(extras[0]["image_ids"])
    return {
        "batch_size": batch_size,
        "num_batches": num_batches,
        "num_rounds": num_rounds,
        "stages": times,
        "latency_ms": sum(each["wall_ms"] for each in times.values()),
        "images_per_second": batch_size * statistics.median(rates[1:]),
    }


def drawer(files: Sequence[pathlib.Path], label_map: LabelMap, score_threshold: float = 0.3) -> Draw:
    """A function that draws detections on their images, as infer.py does, without saving them.

    Args:
        files: images by image id.
        label_map: of the classes.
        score_threshold: least score of a detection that is drawn.
    """

    def draw(image_ids: list[int], results: list[dict[str, Any]]) -> None:
        for image_id in image_ids:
            shown = [r for r in results if r["image_id"] == image_id and r["score"] >= score_threshold]
            pixels = np.asarray(PIL.Image.open(files[image_id]).convert("RGB"))
            drawing.draw_results(pixels, shown, label_map)

    return draw


def _stages(halves: Halves, label_map: LabelMap, draw: Draw | None) -> dict[str, Callable[[Any, dict], Any]]:
    """What follows loading: functions of the result of the stage before and of the batch's other tensors."""

    def results_of(detections: tuple[tf.Tensor, ...], extra: dict[str, tf.Tensor]) -> list[dict[str, Any]]:
        found = (*detections[:3], extra["image_ids"], extra["image_sizes"])
        return coco_metrics.to_results(*map(np.asarray, found), label_map, set())

    network, to_detections = halves
    stages = {
        "network": lambda images, extra: network(images),
        "post-processing": lambda outputs, extra: to_detections(outputs, extra["letterbox"]),
        "results": results_of,
    }
    if draw:
        stages["drawing"] = lambda results, extra: draw(np.asarray(extra["image_ids"]).tolist(), results)
    return stages


def _batches(loader: BaseLoader, prefetch: int, count: int) -> Iterator[tuple[tf.Tensor, dict]]:
    """So many of the loader's batches, after those that were prefetched."""
    with placement(loader):
        batches = iter(loader.dataset())
    for _ in range(prefetch + 1):
        next(batches)
    return itertools.islice(batches, count)


def _timed(
    function: Callable[..., Any], rows: Iterable[tuple], *, wait: bool = False
) -> tuple[list[Any], np.ndarray]:
    """Calls the function with each row.

    Args:
        function: what is timed.
        rows: its arguments.
        wait: lets devices finish their work after each call, and not only at the end.

    Returns:
        Its results; milliseconds for one call: by the clock, of all CPUs of this process.
    """
    start, results = _now(), []
    for row in rows:
        results.append(function(*row))
        if wait:
            tf.test.experimental.sync_devices()
    return results, 1000 * (_now() - start) / len(results)


def _now() -> np.ndarray:
    """Seconds by the clock and of the CPUs, once the devices have finished their work."""
    tf.test.experimental.sync_devices()
    return np.array([time.perf_counter(), time.process_time()])


def _stage_time(windows: list[np.ndarray]) -> dict[str, float]:
    wall, cpu = np.transpose(windows).tolist()
    return {
        "wall_ms": statistics.median(wall),
        "lowest_ms": min(wall),
        "highest_ms": max(wall),
        "cpu_ms": statistics.median(cpu),
    }
