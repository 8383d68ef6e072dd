"""One candidate of preprocess_bench.py, in a separate process.

    python tools/benchmark/preprocess_worker.py NAME TASK.json

Writes the first images that it makes to a file, then keeps to the protocol of rounds.py.
"""

import functools
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from tools.benchmark import baselines
from tools.benchmark.baselines import Batches, Standard, Task
from tools.benchmark.protocol import tell_steps


def _preprocessor(task: Task) -> Any:
    # Here and not above: the processes of other libraries do without DALI.
    from common.datacheck.images import ImagePolicy
    from tools.preprocessing.image_source import open_image_source
    from tools.preprocessing.preprocessor import Preprocessor

    source = open_image_source("files", task.input, policy=ImagePolicy(*task.policy))
    options = {"num_threads": task.num_threads, "prefetch": task.prefetch}
    return Preprocessor(source=source, ops=task.ops, batch_size=task.batch_size, **options)


def _pipeline(task: Task) -> Batches:
    pipeline = _preprocessor(task).pipeline
    while True:
        images, _ = pipeline.run()
        is_dense = images.is_dense_tensor()
        yield np.asarray(images.as_tensor()) if is_dense else [np.asarray(image) for image in images]


def _dynamic(task: Task) -> Batches:
    for images, _ in _preprocessor(task).dynamic(epochs=sys.maxsize):
        yield [np.asarray(image) for image in images.tensors]


def _dataset(task: Task) -> Batches:
    return (images for images, _ in _preprocessor(task).dataset())


OURS: dict[str, Callable[[Task], Batches]] = {
    "pipeline": _pipeline,
    "dynamic": _dynamic,
    "dataset": _dataset,
}
OTHERS: dict[str, Callable[[Task], Batches]] = {
    "tfdata": baselines.tfdata,
    "pillow": baselines.pillow,
    "opencv": baselines.opencv,
}
SHORTCUTS: dict[str, Callable[[Task], Batches]] = {  # less work and other pixels, which is common practice
    "tfdata-no-antialias": functools.partial(baselines.tfdata, antialias=False),
    "opencv-no-antialias": functools.partial(baselines.opencv, antialias=False),
    "pillow-draft": functools.partial(baselines.pillow, draft=True),
}
CANDIDATES = OURS | OTHERS | SHORTCUTS


def first_images(batches: Iterator[Any], count: int) -> list[np.ndarray]:
    """The first images; the batches that hold them are used up."""
    images = itertools.chain.from_iterable(batches)
    return [np.array(image) for image in itertools.islice(images, count)]


def main(name: str, path: str) -> None:
    """Runs until it is killed."""
    task = Task(*json.loads(pathlib.Path(path).read_text()))
    task = task._replace(standard=task.standard and Standard(*task.standard))
    batches = iter(CANDIDATES[name](task))
    np.savez(pathlib.Path(task.pixels, f"{name}.npz"), *first_images(batches, task.compared))
    tell_steps(lambda: next(batches))


if __name__ == "__main__":
    main(*sys.argv[1:])
