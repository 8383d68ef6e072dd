r"""Measures a chain of preprocess.py in both of DALI's APIs, beside OpenCV and tf.data doing the same.

    python tools/preprocess_bench.py --input=my/photos --num_threads=2
    python tools/preprocess_bench.py --ops="resize:128x128 | flip:p=0.5"

OpenCV and tf.data do the default chain only, the usual one of a classifier. All candidates take turns in one
process, every second round in reverse order; numbers are medians of the rounds. CPU time is that of the
process. `levels off` is the mean difference from the pipeline's pixels, in levels of the image. Without
--input, images are drawn.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import pathlib
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
import tensorflow as tf
from absl import flags

from common import args as shared_flags
from common import errors
from common.args import ImagePolicy, default_threads, flag
from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.errors import UserError
from common.progress import log
from tools import synthetic
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.preprocessor import Preprocessor

SHORT, CROP = 256, 224  # pixels
OPS = f"resize:short={SHORT} | crop:{CROP}x{CROP} | crop_mirror_normalize:mean=imagenet"
DRAWN = 64  # images where none are given
Batches = Iterator[Sequence[np.ndarray] | np.ndarray]  # images (height, width, 3), without end


@dataclasses.dataclass(frozen=True)
class BenchArgs:
    """The flags, besides those of reading images (args.BATCH_FLAGS)."""

    input: str | None = flag(None, "Directory, file or glob of images. Default: they are drawn.")
    ops: str = flag(OPS, "Chain of operators, as in preprocess.py.")
    rounds: int = flag(5, "How often each is measured.", low=1)
    seconds: float = flag(5.0, "Least seconds of a measurement.", low=0.01)


def define_flags(fv: flags.FlagValues) -> None:
    """All flags of this command."""
    shared_flags.define(fv, BenchArgs)
    shared_flags.define(fv, shared_flags.Args, shared_flags.BATCH_FLAGS)
    fv.set_default("batch_size", 32)


def pipeline(a: Any, work: Preprocessor) -> Batches:
    """DALI's Pipeline API."""
    while True:
        images, _ = work.pipeline.run()
        yield [np.asarray(images[i]) for i in range(len(images))]


def dynamic(a: Any, work: Preprocessor) -> Batches:
    """DALI's Dynamic API."""
    for images, _ in work.dynamic(epochs=sys.maxsize):
        yield [np.asarray(image) for image in images.tensors]


def opencv(a: Any, work: Preprocessor) -> Batches:
    """OpenCV in threads: its functions release Python's lock. INTER_AREA averages where an image shrinks."""
    try:
        import cv2
    except ImportError as error:
        raise UserError("the candidate opencv needs OpenCV: pip install opencv-python-headless") from error

    cv2.setNumThreads(1)  # one batch a thread, and not all threads an image
    files = work.source.files

    def load(path: str) -> np.ndarray:
        image = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
        if image is None:
            raise UserError(f"{path}: OpenCV cannot decode it: give other images by --input")
        scale = SHORT / min(image.shape[:2])
        width, height = (int(side * scale + 0.5) for side in image.shape[1::-1])
        image = cv2.resize(
            image, (width, height), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
        )
        top, left = (height - CROP + 1) // 2, (width - CROP + 1) // 2
        part = image[top : top + CROP, left : left + CROP].astype(np.float32)
        return (part - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_STD, np.float32)

    def batch(number: int) -> np.ndarray:
        places = range(number * a.batch_size, (number + 1) * a.batch_size)
        return np.stack([load(files[place % len(files)]) for place in places])

    with concurrent.futures.ThreadPoolExecutor(a.num_threads) as pool:
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        for number in itertools.count():
            waiting.append(pool.submit(batch, number))
            if len(waiting) == a.num_threads + a.prefetch:
                yield waiting.popleft().result()


def tfdata(a: Any, work: Preprocessor) -> Batches:
    """tf.data with antialiasing; EXIF turns no pixels, for tf.io knows none."""

    def load(path: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        size = tf.cast(tf.shape(image)[:2], tf.float32)
        size = tf.cast(size * (SHORT / tf.reduce_min(size)) + 0.5, tf.int32)
        image = tf.image.resize(image, size, antialias=True)
        top, left = tf.unstack((size - CROP + 1) // 2)
        return (tf.image.crop_to_bounding_box(image, top, left, CROP, CROP) - IMAGENET_MEAN) / IMAGENET_STD

    dataset = tf.data.Dataset.from_tensor_slices(list(work.source.files)).repeat()
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.threading.private_threadpool_size = a.num_threads
    return iter(dataset.batch(a.batch_size).prefetch(a.prefetch).with_options(options).as_numpy_iterator())


def measure(batches: Batches, settle: int, seconds: float) -> tuple[float, float]:
    """(images a second, CPU milliseconds an image); the first `settle` batches may have been ready."""
    for _ in range(settle):
        next(batches)
    images, begin, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds:
        images += len(next(batches))
    return images / (time.perf_counter() - begin), 1000 * (time.process_time() - cpu) / images


def bench(a: Any) -> str:
    """The table that the command prints.

    Args:
        a: the values of the flags, by their names.

    Raises:
        UserError: flags that cannot be used.
        DataError: images that cannot be used.
    """
    a.num_threads = a.num_threads or default_threads()
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        if not a.input:
            log(f"no images are given: drawing {DRAWN}")
            synthetic.draw_dataset(directory, DRAWN, seed=0, style="photo")
        policy = ImagePolicy(a.on_bad_image, a.max_megapixels)
        source = open_image_source("files", a.input or f"{directory}/images", policy=policy)
        options = {"num_threads": a.num_threads, "prefetch": a.prefetch}
        work = Preprocessor(source=source, ops=a.ops, batch_size=a.batch_size, **options)
        makers = (pipeline, dynamic, opencv, tfdata) if a.ops == OPS else (pipeline, dynamic)
        running = {make.__name__: make(a, work) for make in makers}
        first = {name: next(batches) for name, batches in running.items()}
        found = collections.defaultdict(list)
        for number in range(a.rounds):
            for name in list(running)[:: -1 if number % 2 else 1]:
                found[name].append(measure(running[name], a.prefetch + a.num_threads + 1, a.seconds))
                log(f"round {number + 1} of {a.rounds}: {name}: {found[name][-1][0]:.4g} images/s")
    lines = [f"{a.ops}; batch {a.batch_size}, {a.num_threads} threads; {source.size} images"]
    for name, windows in found.items():
        rates, cpu = zip(*windows, strict=True)
        lines.append(
            f"{name:8}  {statistics.median(rates):7.1f} images/s ({min(rates):.4g} to {max(rates):.4g}),"
            f" {statistics.median(cpu):6.2f} CPU ms/image"
        )
        if a.ops == OPS:
            pairs = zip(first[name], first["pipeline"], strict=False)
            off = np.mean([np.abs((one - other) * IMAGENET_STD).mean() for one, other in pairs])
            lines[-1] += f", {off:.2f} levels off"
    return "\n".join(lines)


def main() -> None:
    print(bench(types.SimpleNamespace(**shared_flags.values(flags.FLAGS, define_flags))))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
