"""How long inference takes, stage by stage, at any batch size: 1 for latency, 8 for throughput.

Stages run alone, one after another, in interleaved rounds. The whole runs as in infer.py, where the loader
works ahead while the network computes.
"""

import pathlib
import statistics
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
from common.loader import BaseLoader, placement

Network = Callable[[tf.Tensor], Any]  # images -> outputs of the network
ToDetections = Callable[[Any, tf.Tensor], tuple[tf.Tensor, ...]]  # those, letterbox -> what Detect returns
Draw = Callable[[list[int], list[dict[str, Any]]], None]  # image ids, their detections as COCO results
Stage = Callable[[Any, dict], Any]  # (result of the stage before, the batch's other tensors) -> result
Window = tuple[float, float]  # milliseconds a batch: by the clock, of all CPUs of this process


def measure(
    *,
    loader: BaseLoader,
    network: Network,
    to_detections: ToDetections,
    label_map: LabelMap,
    decode: dali.Pipeline | None = None,
    draw: Draw | None = None,
    prefetch: int = 2,
    num_batches: int = 8,
    num_rounds: int = 5,
) -> dict[str, Any]:
    """Measures every stage and the whole, after one round that compiles and warms up.

    Args:
        loader: an evaluation loader without targets. It never ends, so its data may be less than a round.
        network, to_detections: the two halves of the app's make_detect (predict.make_halves).
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

    def results_of(detections: tuple[tf.Tensor, ...], extra: dict[str, tf.Tensor]) -> list[dict[str, Any]]:
        found = (*detections[:3], extra["image_ids"], extra["image_sizes"])
        return coco_metrics.to_results(*map(np.asarray, found), label_map, set())

    stages = {
        "network": lambda images, extra: network(images),
        "post-processing": lambda outputs, extra: to_detections(outputs, extra["letterbox"]),
        "results": results_of,
    }
    if draw:
        stages["drawing"] = lambda results, extra: draw(np.asarray(extra["image_ids"]).tolist(), results)

    windows: dict[str, list[Window]] = {}
    rates = []
    for number in range(num_rounds + 1):
        batches, found = _round(loader, decode, stages, prefetch, num_batches)
        rate = _rate(loader, prefetch, num_batches, stages)
        if number:  # the first round compiled
            rates.append(rate)
            for stage, window in found.items():
                windows.setdefault(stage, []).append(window)
    times = {stage: _stage_time(windows) for stage, windows in windows.items()}
    return {
        "batch_size": int(batches[0][0].shape[0]),
        "num_batches": num_batches,
        "num_rounds": num_rounds,
        "stages": times,
        "latency_ms": sum(each["wall_ms"] for each in times.values()),
        "images_per_second": statistics.median(rates),
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
            drawing.draw_boxes(
                np.asarray(PIL.Image.open(files[image_id]).convert("RGB")),
                box_ops.ltwh_to_ltrb(np.array([r["bbox"] for r in shown], np.float32).reshape(-1, 4)),
                [label_map.class_of(r["category_id"]) for r in shown],
                label_map.names,
                [r["score"] for r in shown],
            )

    return draw


def _round(
    loader: BaseLoader,
    decode: dali.Pipeline | None,
    stages: dict[str, Stage],
    prefetch: int,
    num_batches: int,
) -> tuple[list[tuple[tf.Tensor, dict]], dict[str, Window]]:
    """One round of all stages: its batches, and the time of each stage."""
    batches, loading = _load(loader, prefetch, num_batches)
    if decode:
        decoding = _decode(decode, prefetch, num_batches)
        letterbox = (loading[0] - decoding[0], loading[1] - decoding[1])
        windows = {"read and decode": decoding, "letterbox": letterbox}
    else:
        windows = {"load": loading}
    values, extras = zip(*batches, strict=True)
    for stage, function in stages.items():
        values, windows[stage] = _run(function, values, extras)
    return batches, windows


def _load(loader: BaseLoader, prefetch: int, count: int) -> tuple[list[tuple[tf.Tensor, dict]], Window]:
    """So many batches, one right after another, and their time."""
    batches = _batches(loader, prefetch)
    start = _now()
    loaded = [next(batches) for _ in range(count)]
    return loaded, _window(start, count)


def _decode(pipeline: dali.Pipeline, prefetch: int, count: int) -> Window:
    for _ in range(prefetch + 1):
        pipeline.run()
    start = _now()
    for _ in range(count):
        pipeline.run()
    return _window(start, count)


def _run(function: Stage, values: Sequence[Any], extras: Sequence[dict]) -> tuple[list[Any], Window]:
    """One stage for every batch, after one call with the first batch that is not timed."""
    function(values[0], extras[0])
    start = _now()
    results = []
    for value, extra in zip(values, extras, strict=True):
        results.append(function(value, extra))
        tf.test.experimental.sync_devices()
    return results, _window(start, len(values))


def _rate(loader: BaseLoader, prefetch: int, count: int, stages: dict[str, Stage]) -> float:
    """Images a second of everything together, with the loader ahead."""
    batches = _batches(loader, prefetch)
    start = time.perf_counter()
    num_images = 0
    for _ in range(count):
        value, extra = next(batches)
        num_images += int(value.shape[0])
        for function in stages.values():
            value = function(value, extra)
    tf.test.experimental.sync_devices()
    return num_images / (time.perf_counter() - start)


def _batches(loader: BaseLoader, prefetch: int) -> Iterator[tuple[tf.Tensor, dict]]:
    """The loader's batches without those that were prefetched."""
    with placement(loader):
        batches = iter(loader.dataset())
    for _ in range(prefetch + 1):
        next(batches)
    return batches


def _now() -> Window:
    """Seconds by the clock and of the CPUs, once the devices have finished their work."""
    tf.test.experimental.sync_devices()
    return time.perf_counter(), time.process_time()


def _window(start: Window, count: int) -> Window:
    """Milliseconds since `start` for one of `count` batches."""
    wall, cpu = _now()
    return 1e3 * (wall - start[0]) / count, 1e3 * (cpu - start[1]) / count


def _stage_time(windows: list[Window]) -> dict[str, float]:
    wall, cpu = zip(*windows, strict=True)
    return {
        "wall_ms": statistics.median(wall),
        "lowest_ms": min(wall),
        "highest_ms": max(wall),
        "cpu_ms": statistics.median(cpu),
    }
