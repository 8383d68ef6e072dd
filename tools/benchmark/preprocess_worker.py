"""One candidate of preprocess_bench.py, in its own process.

    python tools/benchmark/preprocess_worker.py NAME TASK.json

Writes the first images that it makes to a file, then keeps to the protocol of rounds.py.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from tools.benchmark import baselines
from tools.benchmark.baselines import Batches, Reading, Standard
from tools.benchmark.protocol import tell_steps


class Task(NamedTuple):
    """What all candidates do.

    Attributes:
        input: what tools/preprocess.py takes for --source=files.
        on_bad_image, max_megapixels: as there.
        ops: the chain.
        standard: the chain, where it is the one that the rivals know.
        reading: batches.
        compared: images whose pixels are compared.
        pixels: directory for them.
    """

    input: str
    on_bad_image: str
    max_megapixels: float
    ops: str
    standard: Standard | None
    reading: Reading
    compared: int
    pixels: str

    def save(self, path: pathlib.Path) -> None:
        path.write_text(json.dumps(self))

    @classmethod
    def load(cls, path: str) -> "Task":
        task = cls(*json.loads(pathlib.Path(path).read_text()))
        standard = task.standard and Standard(*task.standard)
        return task._replace(standard=standard, reading=Reading(*task.reading))


def _preprocessor(task: Task) -> Any:
    # Here and not above: the rivals' processes do without DALI.
    from common.datacheck.images import ImagePolicy
    from tools.preprocessing.image_source import open_image_source
    from tools.preprocessing.preprocessor import Preprocessor

    policy = ImagePolicy(task.on_bad_image, task.max_megapixels)
    return Preprocessor(
        source=open_image_source("files", task.input, policy=policy),
        ops=task.ops,
        batch_size=task.reading.batch_size,
        num_threads=task.reading.num_threads,
        prefetch=task.reading.prefetch,
    )


def _pipeline(task: Task) -> Batches:
    pipeline = _preprocessor(task).pipeline
    while True:
        images, _ = pipeline.run()
        if images.is_dense_tensor():
            yield np.asarray(images.as_tensor())
        else:
            yield [np.asarray(image) for image in images]


def _dynamic(task: Task) -> Batches:
    for images, _ in _preprocessor(task).dynamic(epochs=sys.maxsize):
        yield [np.asarray(image) for image in images.tensors]


def _dataset(task: Task) -> Batches:
    return (images for images, _ in _preprocessor(task).dataset())


def _plain(rival: Callable[..., Batches]) -> Callable[[Task], Batches]:
    def without_antialias(task: Task) -> Batches:
        return rival(task.standard._replace(antialias=False), task.reading)

    return without_antialias


OURS: dict[str, Callable[[Task], Batches]] = {
    "pipeline": _pipeline,
    "dynamic": _dynamic,
    "dataset": _dataset,
}
RIVALS: dict[str, Callable[[Task], Batches]] = {
    "tfdata": lambda task: baselines.tfdata(task.standard, task.reading),
    "pillow": lambda task: baselines.pillow(task.standard, task.reading),
    "opencv": lambda task: baselines.opencv(task.standard, task.reading),
}
SHORTCUTS: dict[str, Callable[[Task], Batches]] = {  # less work and other pixels, as many do it
    "tfdata-no-antialias": _plain(baselines.tfdata),
    "opencv-no-antialias": _plain(baselines.opencv),
    "pillow-draft": lambda task: baselines.pillow(task.standard, task.reading, draft=True),
}


def first_images(batches: Batches, count: int) -> tuple[list[np.ndarray], Iterator[Any]]:
    """The first images, and an iterator over the batches that follow."""
    images: list[np.ndarray] = []
    while len(images) < count:
        images += [np.array(image) for image in next(batches)]
    return images[:count], batches


def work(name: str, task: Task) -> None:
    """Runs until it is killed."""
    batches = iter((OURS | RIVALS | SHORTCUTS)[name](task))
    images, batches = first_images(batches, task.compared)
    np.savez(pathlib.Path(task.pixels, f"{name}.npz"), *images)
    del images
    tell_steps(lambda: next(batches))


def main(arguments: list[str]) -> None:
    work(arguments[0], Task.load(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
