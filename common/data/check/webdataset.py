"""Opens WebDataset shards for DALI: reads each tar file once, and checks every annotation and image in it.

The cache stores the samples of each tar file, so the next start reads only files that have changed.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from common.args import ImagePolicy
from common.dali_ops import Nodes
from common.data import storage, webdataset
from common.data.annotations import NONE, OBJECT, Annotations, CocoImage, sizes_of, to_annotations
from common.data.check.boxes import check_unit, report_annotations
from common.data.check.images import check_images, in_threads
from common.data.check.issues import Issues
from common.data.check.repeated_images import checksums_of, equal_rows
from common.data.check.tfrecord import missing_shards
from common.data.check.tfrecord_scan import name_files
from common.data.check.webdataset_scan import Sample, scan
from common.data.labels import LabelMap
from common.data.sources import Source
from common.data.webdataset import Shards
from common.files import load_cached, save_cached

_VERSION = 3  # increase this when any check changes, also one of images.py
_THREADS = min(16, os.cpu_count() or 1)  # files that are read at once
_SLOW_BYTES = 2**29  # a progress bar is shown if all files together are larger


class WebDatasetSource(Source):
    """WebDataset shards with boxes.

    Attributes:
        shards: the files, indexes and spans that DALI reads; the images have the order of `annotations`.
        names: the name of each image's sample for messages: `a.tar sample '0001' (image 12)`.
        formats: Pillow's name of a format -> the number of images, the most frequent first.
        objects: see `Source`.
    """

    name = "webdataset"

    def __init__(
        self,
        shards: Shards,
        annotations: Annotations,
        names: Sequence[str],
        formats: dict[str, int],
        objects: Sequence[storage.Stat] = (),
    ) -> None:
        self.shards, self.annotations, self.names, self.formats = shards, annotations, names, formats
        self.objects = objects

    @functools.cached_property
    def fingerprint(self) -> str:
        # Paths are not included, because the user may move the files.
        digest = hashlib.sha256(self.annotations.fingerprint().encode())
        digest.update(self.shards.spans.tobytes())
        return digest.hexdigest()

    def image_name(self, row: int) -> str:
        return self.names[row]

    def encoded(self, row: int) -> bytes:
        return self.shards.image(row)

    def read(self, *, training: bool, **options: Any) -> Nodes:
        return webdataset.webdataset_reader(self.shards, training=training, **options)


def open_shards(
    files: Sequence[str], label_map: LabelMap, *, policy: ImagePolicy = ImagePolicy()
) -> WebDatasetSource:
    """Checks tar files, and every annotation and image in them.

    The files are read once, and the result is cached until they change. Those in a bucket are downloaded
    for this, but not kept.

    Args:
        label_map: the categories of the ids in the shards.

    Raises:
        DataError: the files have errors that would make training wrong. The message lists all of them.
    """
    storage.all_remote(files)  # refuses a mixture
    issues, stats = Issues(name_files(files), policy), storage.stat(files)
    title = "Checking shards" if sum(stat.size for stat in stats.values()) > _SLOW_BYTES else None
    samples: list[Sample] = []
    spans: list[tuple[int, int, int]] = []
    read = functools.partial(_read, stats=stats, label_map=label_map, policy=policy)
    for number, (of_file, file_issues) in enumerate(in_threads(read, files, _THREADS, title)):
        issues.extend(file_issues)
        samples += of_file
        spans += [(number, sample.offset, sample.size) for sample in of_file]
    annotations, is_usable = _check(samples, label_map, issues)
    issues.raise_if_stopping()
    names = [sample.name for sample in samples]
    is_repeated = annotations.is_repeated
    name_box = functools.partial(_box_name, names, annotations)
    issues.add_each("box-repeated", np.flatnonzero(is_repeated), name_box)
    annotations = annotations.select_boxes(~is_repeated).select(is_usable)
    usable = list(itertools.compress(samples, is_usable))
    names = [sample.name for sample in usable]
    for rows in equal_rows(checksums_of(annotations)):
        issues.add("repeated-image", " = ".join(names[row] for row in rows))
    issues.add_each("shard-missing", missing_shards(files), str)
    name_box = functools.partial(_box_name, names, annotations)
    annotations = report_annotations(annotations, names.__getitem__, name_box, issues)
    table = np.array(spans, np.int64).reshape(-1, 3)[is_usable]
    numbers, table[:, 0] = np.unique(table[:, 0], return_inverse=True)  # files without a usable image
    indexes = webdataset.write_indexes(annotations, table, len(numbers))
    formats = collections.Counter(sample.facts.image_format for sample in usable)
    shards = Shards(tuple(files[number] for number in numbers), indexes, table)
    objects = [stats[path] for path in shards.files if storage.is_remote(path)]
    return WebDatasetSource(shards, annotations, names, dict(formats.most_common()), objects)


def _box_name(names: Sequence[str], annotations: Annotations, row: int) -> str:
    return f"{names[annotations.box_image[row]]} has bbox {annotations.boxes_ltwh_px[row].tolist()}"


_Result = tuple[list[Sample], list[str]]  # of `scan`


def _read(
    path: str, stats: Mapping[str, storage.Stat], label_map: LabelMap, policy: ImagePolicy
) -> tuple[list[Sample], Issues]:
    """Returns the samples of a tar file, from the cache or else from `scan`, and the errors in them."""
    issues, result = Issues(path, policy), None
    if path not in stats:
        issues.add("file-unreadable", f"{path}: no such file")
        return [], issues
    key = (_VERSION, label_map.category_ids, policy.decode, policy.max_megapixels, *stats[path][1:])
    identity = hashlib.sha256(msgspec.msgpack.encode(key) + os.fsencode(path)).hexdigest()
    name = f"{identity[:32]}.samples"
    with contextlib.suppress(msgspec.MsgspecError):  # no cached result, or a damaged one
        result = msgspec.msgpack.decode(load_cached(name) or b"", type=_Result)
    try:
        if not result:
            with storage.local_copy(path) as file:
                result = scan(file, path, label_map, issues)
            if not issues.stopping:
                save_cached(name, msgspec.msgpack.encode(result))
    except OSError as error:
        issues.add("file-unreadable", f"{path}: {error.strerror}")
        return [], issues
    issues.add_each("file-hidden", result[1], lambda name: f"{path} file {name!r}")
    return result[0], issues


def _check(samples: Sequence[Sample], label_map: LabelMap, issues: Issues) -> tuple[Annotations, np.ndarray]:
    """Checks the ids, boxes and images of the samples, and makes annotations from them.

    Images without an id get the lowest free numbers from 1 on, in the order of the samples.

    Args:
        issues: receives errors in ids, boxes and images.

    Returns:
        The annotations of all samples; and bool (I,), whether each image can be used. If there are errors,
        the annotations of invalid samples are meaningless.
    """
    ids = {sample.image_id for sample in samples}
    numbers = itertools.filterfalse(ids.__contains__, itertools.count(1))
    for sample in samples if not issues.stopping else ():
        if sample.image_id == NONE:
            sample.image_id = next(numbers)
            sample.name = f"{sample.name} (image {sample.image_id})"
            issues.add("sample-numbered", sample.name)
    names = [sample.name for sample in samples]
    issues.add_repeats("repeated-image-id", "image", [s.image_id for s in samples], names.__getitem__)
    of_samples = [CocoImage(s.image_id, s.file_name, s.image_size[1], s.image_size[0]) for s in samples]
    is_usable = check_images([s.facts for s in samples], of_samples, names.__getitem__, issues)
    for image, sample in zip(of_samples, samples, strict=True):
        if not image.width:
            image.width, image.height = sample.facts.width, sample.facts.height
    table = np.frombuffer(b"".join(sample.objects for sample in samples), OBJECT)
    counts = [len(sample.objects) // OBJECT.itemsize for sample in samples]
    boxes, box_image = table["bbox"], np.repeat(np.arange(len(samples)), counts)
    box_sizes = sizes_of(of_samples)[box_image][:, ::-1].astype(np.int64)  # (N, 2) width, height

    def name_box(row: int) -> str:
        width, height = box_sizes[row].tolist()
        return f"{names[box_image[row]]} has bbox {boxes[row].tolist()} in {width} x {height} pixels"

    is_negative = np.any(boxes[:, 2:] < 0, axis=1)
    issues.add_each("box-negative", np.flatnonzero(is_negative), name_box)
    rows = np.flatnonzero(~is_negative & np.all(box_sizes > 1, axis=1))
    check_unit(boxes[rows], box_sizes[rows], lambda i: name_box(rows[i]), issues)
    annotations = to_annotations(of_samples, table, box_image, label_map, issues.origin)
    checksums = np.array([sample.facts.checksum for sample in samples], np.int64)
    return dataclasses.replace(annotations, checksums=checksums), is_usable
