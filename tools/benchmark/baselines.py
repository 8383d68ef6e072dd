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
Load = Callable[[str], np.ndarray]  # file -> uint8 (height, width, 3), RGB


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

    standard = task.standard

    def load(path: str) -> np.ndarray:
        with Image.open(path) as image:
            if draft:
                image.draft("RGB", (standard.short, standard.short))
            image = ImageOps.exif_transpose(image.convert("RGB"))
        image = image.resize(_resized(image.size, standard.short), Image.Resampling.BILINEAR)
        left, top = _middle(image.size, standard.crop[::-1])
        return np.asarray(image.crop((left, top, left + standard.crop[1], top + standard.crop[0])))

    return _pooled(load, task, multiprocessing.get_context("fork").Pool)


def opencv(task: Task, antialias: bool = True) -> Batches:
    """OpenCV in threads: its functions let go of Python. INTER_AREA averages, INTER_LINEAR does not."""
    import cv2

    standard = task.standard
    cv2.setNumThreads(1)  # one image a thread, and not all threads an image

    def load(path: str) -> np.ndarray:
        image = cv2.imread(path, cv2.IMREAD_COLOR)
        size = _resized(image.shape[1::-1], standard.short)
        shrinks = antialias and standard.antialias and size[0] < image.shape[1]
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        top, left = _middle(image.shape[:2], standard.crop)
        part = image[top : top + standard.crop[0], left : left + standard.crop[1]]
        return cv2.cvtColor(part, cv2.COLOR_BGR2RGB)

    return _pooled(load, task, multiprocessing.pool.ThreadPool)


def _resized(size: tuple[int, int], short: int) -> tuple[int, int]:
    scale = short / min(size)
    return int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)


def _middle(size: tuple[int, int], part: tuple[int, int]) -> tuple[int, int]:
    return (size[0] - part[0] + 1) // 2, (size[1] - part[1] + 1) // 2


def _pooled(load: Load, task: Task, make_pool: Callable[..., Any]) -> Batches:
    """Batches by workers that each fill a whole one, in memory that all share: nothing is sent."""
    standard = task.standard
    ahead = task.num_threads + task.prefetch
    shape = (ahead + 1, task.batch_size, *standard.crop, 3)  # one more is with whoever asked for it
    ring = np.frombuffer(multiprocessing.RawArray("f", int(np.prod(shape))), np.float32).reshape(shape)
    # By rows: NumPy would run over three channels at a time.
    scale = np.tile(1 / np.array(standard.std, np.float32), standard.crop[1])
    shift = np.tile(-np.array(standard.mean, np.float32), standard.crop[1]) * scale

    def fill(number: int) -> int:
        slot = number % len(ring)
        for place, target in enumerate(ring[slot].reshape(task.batch_size, standard.crop[0], -1)):
            position = (number * task.batch_size + place) % len(task.files)
            image = load(task.files[position]).reshape(standard.crop[0], -1)
            np.multiply(image, scale, out=target, dtype=np.float32)
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
