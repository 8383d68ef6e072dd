"""Opens and checks the data that flags name: common/open_data.py with the data check in it.

All errors of the training and evaluation data are reported together, before anything is built or written.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence

import numpy as np

from common import open_data as plain
from common.args import ImagePolicy
from common.datacheck import tfrecord
from common.datacheck.coco import load_coco
from common.datacheck.images import add_fault, inspect_list
from common.datacheck.issues import DataError, Issues
from common.errors import UserError
from common.labels import LabelMap
from common.progress import log
from common.sources import CocoSource, ImageListSource, Source, TFRecordSource

_PLAIN_TENSORFLOW = ("JPEG", "PNG")


def open_coco(
    images_dir: str | os.PathLike, json_path: str | os.PathLike, policy: ImagePolicy = ImagePolicy()
) -> CocoSource:
    """The checked images and annotations of a COCO json; DataError as `load_coco`."""
    return CocoSource(os.fspath(images_dir), load_coco(json_path, images_dir, policy=policy))


def open_tfrecords(
    pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
) -> TFRecordSource:
    """The checked records of a glob; DataError as `tfrecord.open_records`.

    Args:
        pattern: glob of the record files.
        label_map: file of the categories; by default `<prefix>.label_map.json` (tools/convert.py).
        policy: about images that cannot be used.
    """
    files = tfrecord.expand_pattern(pattern)
    labels = LabelMap.load(label_map or tfrecord.find_label_map(files))
    return tfrecord.open_records(files, labels, policy=policy)


def _open_each(openers: Sequence[Callable[[], Source]]) -> list[Source]:
    """Calls all, and raises the faults of all data sets together."""
    sources, faulty = [], []
    for opener in openers:
        try:
            sources.append(opener())
        except DataError as error:
            faulty += error.issues
    if faulty:
        raise DataError(*faulty)
    return sources


def check_labels(label_map: LabelMap, source: Source) -> None:
    """DataError unless a trained network knows all categories of the data, under the same id and name."""
    issues = Issues(source.annotations.origin)
    issues.add_each("eval-categories", label_map.differences(source.label_map), str)
    issues.raise_if_stopping()


def check_sizes(source: Source, *, batch_size: int, num_replicas: int, max_instances: int) -> None:
    """Compares a training set with the run that wants it, and logs which images have too many boxes.

    Raises:
        DataError: fewer images than ranks, or than one batch of all ranks, which would repeat images.
    """
    annotations = source.annotations
    issues = Issues(annotations.origin)
    if annotations.num_images < num_replicas:
        issues.add("fewer-than-ranks", f"{annotations.num_images} images, {num_replicas} ranks")
    elif annotations.num_images < batch_size * num_replicas:
        ranks = f" x {num_replicas} ranks" if num_replicas > 1 else ""
        issues.add("fewer-than-batch", f"{annotations.num_images} images, --batch_size={batch_size}{ranks}")
    issues.raise_if_stopping()
    counts = np.diff(annotations.target_boxes.row_splits)
    issues.add_each(
        "too-many-boxes",
        np.flatnonzero(counts > max_instances),
        lambda i: f"{annotations.image_name(i)} has {counts[i]}, kept are {max_instances}",
    )
    log_issues(issues)


# The same with and without a check.
DataFlags, list_images = plain.DataFlags, plain.list_images
log_source, read_coco = plain.log_source, plain.read_coco

_READERS = plain.Readers(open_coco, open_tfrecords, _open_each, check_labels, check_sizes)
open_source = functools.partial(plain.open_source, readers=_READERS)
open_splits = functools.partial(plain.open_splits, readers=_READERS)
open_checked = functools.partial(plain.open_checked, readers=_READERS)
open_evaluation = functools.partial(plain.open_evaluation, readers=_READERS)


def open_images(images: str, policy: ImagePolicy = ImagePolicy()) -> ImageListSource:
    """The images that --images means, checked, for inference.

    Raises:
        UserError: there are none.
        DataError: images that cannot be used.
    """
    files = plain.open_images(images).files
    issues = Issues(f"--images={images}")
    facts = inspect_list(files, decode=policy.decode, max_megapixels=policy.max_megapixels)
    usable = [
        file for file, fact in zip(files, facts, strict=True) if not add_fault(fact, repr(file), issues)
    ]
    if policy.on_bad_image == "skip":
        issues.skip_images()
    if not usable:
        issues.add("no-images", f"none of {len(facts)} can be read")
    issues.raise_if_stopping()
    log_issues(issues)
    return ImageListSource(tuple(usable))


def log_issues(issues: Issues) -> None:
    """Logs what was found in a data set, with a few of the offenders."""
    for issue in issues:
        log(f"{issues.origin}: {issue.line(shown=3)}")


# --- why did the loader stop? DALI and tf.data report a damaged image, but seldom which one ---


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """Finds the images that cannot be read, by decoding all of them again, after the error was logged.

    Args:
        error: what the loader raised.
        source: what it was reading.
        pipeline_type: which loader it was.

    Returns:
        The error to raise: it names the images with their files, records and ids; or, where all can be
        decoded, the loader's own error.
    """
    stopped = plain.explain(error, source, pipeline_type)
    if source is None:
        return stopped
    log(f"{stopped}\nDecoding the images to find the damaged one; interrupt if that takes too long")
    find = _damaged_records if isinstance(source, TFRecordSource) else _damaged_files
    issues, other = find(source)
    if issues.stopping:
        return DataError(issues)
    if pipeline_type == "tensorflow" and other:
        return UserError(f"--pipeline_type=tensorflow reads JPEG and PNG, and {other}: use dali_cpu")
    return stopped


def _damaged_files(source: CocoSource | ImageListSource) -> tuple[Issues, str | None]:
    """What is at fault, and an image that plain TensorFlow does not decode: `a.webp is WEBP`."""
    if isinstance(source, CocoSource):
        issues, names = Issues(source.annotations.origin), source.annotations.file_names
        files = [os.path.join(source.images_dir, name) for name in names]
        names = [source.annotations.image_name(row) for row in range(source.size)]
    else:
        issues, files, names = Issues("images"), source.files, [repr(file) for file in source.files]
    other = None
    for name, fact in zip(names, inspect_list(files, decode=True, max_megapixels=math.inf), strict=True):
        if not add_fault(fact, name, issues) and fact.image_format not in _PLAIN_TENSORFLOW:
            other = other or f"{name} is {fact.image_format}"
    return issues, other


def _damaged_records(source: TFRecordSource) -> tuple[Issues, str | None]:
    """`_damaged_files` of records; what was left out when the source was opened is not reported."""
    largest = float(source.annotations.image_sizes.prod(axis=1, dtype=float).max())
    policy = ImagePolicy(max_megapixels=largest / 1e6, decode=True)
    try:
        found = tfrecord.open_records(source.files, source.label_map, policy=policy).annotations.issues
    except DataError as error:
        (found,) = error.issues
    fresh = Issues(found.origin)
    for issue in found.stopping:
        known = set(source.annotations.issues[issue.kind].offenders)
        if issue.kind != "image-too-large":
            fresh.add_each(issue.kind, [text for text in issue.offenders if text not in known], str)
    others = [image_format for image_format in source.formats if image_format not in _PLAIN_TENSORFLOW]
    return fresh, f"one of the records is {others[0]}" if others else None
