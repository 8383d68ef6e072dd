"""Writes a data set into numbered files, such as `train-00000-of-00004.tar`, with a label map next to them.

Images are shuffled. No file appears before all files are complete. In a bucket, each file appears when it is
complete, without an index, and the label map is uploaded last.
"""

import concurrent.futures
import glob
import math
import os
import pathlib
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator

import numpy as np

from common import progress
from common.args import ImagePolicy
from common.data import storage
from common.data.annotations import Annotations
from common.data.check import images
from common.errors import UserError
from common.files import write_into
from tools.conversion.shrinking import shrink_image


def write_numbered_files(
    annotations: Annotations,
    prefix: str | os.PathLike,
    suffix: str,
    write_file: Callable[[pathlib.Path, Iterator[int]], None],
    *,
    num_shards: int,
    seed: int = 0,
    num_workers: int = 4,
) -> list[str]:
    """Writes `<prefix>-00000-of-<num_shards><suffix>` ... and `<prefix>.label_map.json`.

    The bytes do not depend on `num_workers`.

    Args:
        prefix: path of a directory, which is created if missing, and the first part of the file names; or
            s3://BUCKET/PREFIX.
        suffix: ".tfrecord" or ".tar".
        write_file: writes one file; its arguments are the path, and the rows of the images in their order.
        num_shards: number of files, at most one per image.
        seed: seed of the order of the images.
        num_workers: number of files that are written at once.

    Returns:
        The paths of the files.

    Raises:
        UserError: files of an earlier conversion with the same prefix exist, or `write_file` raises it.
        OSError: a file cannot be read or written.
        StoreError: an object cannot be written.
    """
    directory, name = os.path.split(prefix)
    if not name:
        raise UserError(f"--output={prefix} is a directory: add a file name, for example {prefix}train")
    if not 1 <= num_shards <= annotations.num_images:
        raise UserError(
            f"--num_shards={num_shards} is not in 1..{annotations.num_images}, the number of images"
        )
    names = [f"{name}-{shard:05d}-of-{num_shards:05d}{suffix}" for shard in range(num_shards)]
    label_map, is_remote = f"{os.fspath(prefix)}.label_map.json", storage.is_remote(prefix)
    order = np.random.default_rng(seed).permutation(annotations.num_images).tolist()
    bar = progress.Bar(f"Writing {name}", len(order), unit="image")
    lock, ended = threading.Lock(), threading.Event()

    def rows_of(shard: int) -> Iterator[int]:
        for row in order[shard::num_shards]:
            if ended.is_set():
                return
            yield row
            with lock:
                bar.step()

    def write(staged: pathlib.Path) -> None:
        def write_shard(shard: int) -> None:
            file = staged / names[shard]
            write_file(file, rows_of(shard))
            if is_remote and not ended.is_set():
                storage.upload(file, os.path.join(directory, file.name))
                file.unlink()

        with concurrent.futures.ThreadPoolExecutor(num_workers) as writers:
            try:
                list(writers.map(write_shard, range(num_shards)))
            finally:
                ended.set()
        annotations.label_map.save(staged / os.path.basename(label_map))
        if is_remote:
            storage.upload(staged / os.path.basename(label_map), label_map)
        else:
            storage.remove(label_map)

    refuse_other_set(directory, name, suffix, names)
    if is_remote:
        storage.remove(label_map)
        with tempfile.TemporaryDirectory() as staged:
            write(pathlib.Path(staged))
    else:
        os.makedirs(directory or os.curdir, exist_ok=True)
        write_into(directory or os.curdir, write)
    return [os.path.join(directory, name) for name in names]


def read_image(
    annotations: Annotations, row: int, folder: str | os.PathLike, max_side: int | None
) -> tuple[bytes, str]:
    """Returns an encoded image, scaled down to `max_side`, and Pillow's name of its format.

    Raises:
        UserError: the image is damaged, or has another size than in the annotations.
        OSError: the file cannot be read.
    """
    path = pathlib.Path(folder, annotations.file_names[row])
    encoded = shrink_image(path.read_bytes(), str(path), max_side)
    facts = images.inspect(encoded, ImagePolicy(max_megapixels=math.inf))
    height, width = annotations.image_sizes[row].tolist()
    if facts.fault or (facts.height, facts.width) != (height, width):
        raise UserError(
            f"{path} is damaged, or its size is not {width} x {height} as in its annotations: replace the"
            " image, or correct its annotations"
        )
    return encoded, facts.image_format


def refuse_other_set(directory: str, name: str, suffix: str, shards: Collection[str]) -> None:
    """Raises UserError if `directory` has shards `<name>-...` other than `shards`.

    Otherwise, a glob would also match the files of an earlier conversion, and images would be read twice.
    """
    pattern = re.compile(re.escape(name) + r"-[^-]*-of-[^-]*" + re.escape(suffix))
    for path in storage.match(os.path.join(glob.escape(directory), f"{glob.escape(name)}-*-of-*{suffix}")):
        if pattern.fullmatch(os.path.basename(path)) and os.path.basename(path) not in shards:
            raise UserError(
                f"{path} is a file of an earlier conversion with the same prefix: delete the files of that"
                " conversion, or change --output"
            )
