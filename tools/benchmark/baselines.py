"""The usual preprocessing of a classifier by other libraries, to measure DALI beside them.

Decode a JPEG, resize its shorter side, crop the middle, normalise: float32 (N, height, width, 3), RGB. Each
is written as somebody would who knows the library, and uses as many threads or processes as it is told.
Halves are rounded up, as DALI does, so that the crop begins at the same pixel. Every library is imported
where it is used: memory is measured, and nobody's shall hold another's library.
"""

import collections
import itertools
import multiprocessing
import multiprocessing.pool
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np


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
    """OpenCV in threads: its functions let go of Python. INTER_AREA averages, INTER_LINEAR does not."""
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
    shape = (ahead + 1, task.batch_size, height, width, 3)  # one more is with whoever asked for it
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
