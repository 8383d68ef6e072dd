"""One candidate of preprocess_bench.py, in a separate process.

    python tools/benchmark/preprocess_worker.py NAME TASK.json

Writes the first images that it makes to a file, then keeps to the protocol of rounds.py. The candidates are
preprocess.py's three ways, and the usual preprocessing of a classifier by other libraries: decode a JPEG,
resize its shorter side, crop the middle, normalise: float32 (N, height, width, 3), RGB. Each is written as
an experienced user of the library would, and uses --num_threads threads or processes. Halves are rounded
up, as DALI does, so that the crop begins at the same pixel. Every library is imported where it is used:
memory is measured, and no process holds another's library.
"""

import collections
import functools
import itertools
import json
import multiprocessing
import multiprocessing.pool
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from tools.benchmark.protocol import tell_steps


class Standard(NamedTuple):
    """What is done to an image.

    Attributes:
        short: pixels of the shorter side after resizing.
        crop: (height, width).
        mean, std: of each channel, in levels.
        antialias: whether shrinking averages over all pixels that an output pixel covers.
    """

    short: int
    crop: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    antialias: bool


class Task(NamedTuple):
    """What all candidates of preprocess_bench.py do: read images, for ever and in order, and preprocess them.

    Attributes:
        input: --input of tools/preprocess.py with --source=files.
        files: the paths that it means.
        policy: on_bad_image and max_megapixels, as there.
        ops: the chain.
        standard: the same chain; None where the other libraries cannot do it.
        batch_size: images of a batch.
        num_threads: threads or processes that work.
        prefetch: batches that are made ahead.
        compared: number of images whose pixels are compared.
        pixels: directory for them.
    """

    input: str
    files: list[str]
    policy: tuple[str, float]
    ops: str
    standard: Standard | None
    batch_size: int
    num_threads: int
    prefetch: int
    compared: int
    pixels: str


Batches = Iterator[Any]  # of NumPy arrays, or of what np.asarray takes
Load = Callable[[str], np.ndarray]  # file -> resized image, uint8 (height, width, 3), RGB


# --- preprocess.py --------------------------------------------------------------------------------------


def _preprocessor(task: Task) -> Any:
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


# --- other libraries -------------------------------------------------------------------------------------


def tfdata(task: Task, antialias: bool = True) -> Batches:
    """tf.data; EXIF turns no pixels, for tf.io knows none. `antialias`: False leaves it out."""
    import tensorflow as tf

    standard = task.standard
    height, width = standard.crop

    def load(path: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        size = tf.cast(tf.shape(image)[:2], tf.float32)
        size = tf.cast(size * (standard.short / tf.reduce_min(size)) + 0.5, tf.int32)
        image = tf.image.resize(image, size, antialias=antialias and standard.antialias)
        top, left = tf.unstack((size - (height, width) + 1) // 2)
        image = tf.image.crop_to_bounding_box(image, top, left, height, width)
        return (image - standard.mean) / standard.std

    dataset = tf.data.Dataset.from_tensor_slices(task.files).repeat()
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(task.batch_size, drop_remainder=True).prefetch(task.prefetch)
    options = tf.data.Options()
    options.threading.private_threadpool_size = task.num_threads
    return iter(dataset.with_options(options))


def pillow(task: Task, draft: bool = False) -> Batches:
    """Pillow in processes; its resize always averages.

    Args:
        task: what to do.
        draft: decode at the smallest eighth that is not below the size wanted: less to decode, other pixels.
    """
    from PIL import Image, ImageOps

    short = task.standard.short

    def load(path: str) -> np.ndarray:
        with Image.open(path) as image:
            if draft:
                image.draft("RGB", (short, short))
            image = ImageOps.exif_transpose(image.convert("RGB"))
        return np.asarray(image.resize(_resized(image.size, short), Image.Resampling.BILINEAR))

    return _pooled(load, task, multiprocessing.get_context("fork").Pool)


def opencv(task: Task, antialias: bool = True) -> Batches:
    """OpenCV in threads: its functions release Python's lock. INTER_AREA averages, INTER_LINEAR does not."""
    import cv2

    antialias = antialias and task.standard.antialias
    cv2.setNumThreads(1)  # one image a thread, and not all threads an image

    def load(path: str) -> np.ndarray:
        image = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
        size = _resized(image.shape[1::-1], task.standard.short)
        shrinks = antialias and size[0] < image.shape[1]
        return cv2.resize(image, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)

    return _pooled(load, task, multiprocessing.pool.ThreadPool)


def _resized(size: tuple[int, int], short: int) -> tuple[int, int]:
    scale = short / min(size)
    return int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)


def _pooled(load: Load, task: Task, make_pool: Callable[..., Any]) -> Batches:
    """Batches by workers that each fill a whole one, in memory that all share: nothing is sent."""
    height, width = task.standard.crop
    ahead = task.num_threads + task.prefetch
    shape = (ahead + 1, task.batch_size, height, width, 3)  # one more is in use by the caller
    ring = np.frombuffer(multiprocessing.RawArray("f", int(np.prod(shape))), np.float32).reshape(shape)
    # By rows: NumPy would run over three channels at a time.
    scale = np.tile(1 / np.array(task.standard.std, np.float32), width)
    shift = np.tile(-np.array(task.standard.mean, np.float32), width) * scale

    def fill(number: int) -> int:
        slot = number % len(ring)
        for place, target in enumerate(ring[slot].reshape(task.batch_size, height, -1)):
            image = load(task.files[(number * task.batch_size + place) % len(task.files)])
            top, left = (image.shape[0] - height + 1) // 2, (image.shape[1] - width + 1) // 2
            part = image[top : top + height, left : left + width].reshape(height, -1)
            np.multiply(part, scale, out=target, dtype=np.float32)
            target += shift
        return slot

    with make_pool(task.num_threads, _FILLERS.__setitem__, [id(ring), fill]) as pool:
        waiting: collections.deque[multiprocessing.pool.AsyncResult] = collections.deque()
        for number in itertools.count():
            waiting.append(pool.apply_async(_fill, [id(ring), number]))
            if len(waiting) == ahead:
                yield ring[waiting.popleft().get()]


_FILLERS: dict[int, Callable[[int], int]] = {}  # closures cannot be sent to a process, but survive a fork


def _fill(key: int, number: int) -> int:
    return _FILLERS[key](number)


# --- the process -----------------------------------------------------------------------------------------

OURS = {"pipeline": _pipeline, "dynamic": _dynamic, "dataset": _dataset}
OTHERS = {"tfdata": tfdata, "pillow": pillow, "opencv": opencv}
SHORTCUTS = {  # less work and other pixels, which is common practice
    "tfdata-no-antialias": functools.partial(tfdata, antialias=False),
    "opencv-no-antialias": functools.partial(opencv, antialias=False),
    "pillow-draft": functools.partial(pillow, draft=True),
}
CANDIDATES: dict[str, Callable[[Task], Batches]] = OURS | OTHERS | SHORTCUTS


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
