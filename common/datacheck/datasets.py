"""Opens and checks the data that flags name: common/datasets.py with the data check in it.

All errors of the training and evaluation data are reported together, before anything is built or written.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from common import datasets as plain
from common.args import ImagePolicy
from common.datacheck.coco import load_coco
from common.datacheck.image_headers import ImageFacts
from common.datacheck.images import DECODERS, add_fault, in_threads, inspect, inspect_files
from common.datacheck.issues import DataError, Issues
from common.datasets import CocoSource, ImageListSource, Source
from common.errors import UserError
from common.labels import LabelMap
from common.progress import import_tensorflow, log

if TYPE_CHECKING:
    from common.datacheck.tfrecord import TFRecordSource

_PLAIN_TENSORFLOW = ("JPEG", "PNG")


class CheckedOpener(plain.Opener):
    """Opens data sets and checks every annotation and image."""

    def open_coco(
        self, images: str | os.PathLike, annotations: str | os.PathLike, policy: ImagePolicy = ImagePolicy()
    ) -> CocoSource:
        """The checked images and annotations of a COCO json; DataError as `load_coco`."""
        return CocoSource(os.fspath(images), load_coco(annotations, images, policy=policy))

    def open_tfrecords(
        self, pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
    ) -> "TFRecordSource":
        """The checked records of a glob; DataError as `tfrecord.open_records`.

        Args:
            pattern: glob of the record files.
            label_map: file of the categories; by default `<prefix>.label_map.json` (tools/convert.py).
            policy: about images that cannot be used.
        """
        import_tensorflow()  # takes seconds, and only records need it
        from common.datacheck import tfrecord

        files = tfrecord.expand_pattern(pattern)
        labels = LabelMap.load(label_map or tfrecord.find_label_map(files))
        return tfrecord.open_records(files, labels, policy=policy)

    def open_images(self, images: str, policy: ImagePolicy = ImagePolicy()) -> ImageListSource:
        """The images that --images means, checked, for inference; UserError where none can be used."""
        files, issues = plain.list_images(images), Issues(f"--images={images}", policy)
        facts = inspect_files(os.curdir, files, policy)
        pairs = zip(files, facts, strict=True)
        usable = [file for file, fact in pairs if not add_fault(fact, repr(file), issues)]
        if not usable:
            issues.add("no-images", f"none of {len(facts)} can be read")
        issues.raise_if_stopping()
        log_issues(issues)
        return ImageListSource(usable)

    def join(self, errors: Sequence[UserError]) -> UserError:
        """One error with the faults of all data sets; one of the flags comes first."""
        of_flags = [error for error in errors if not isinstance(error, DataError)]
        of_data = [issues for error in errors if isinstance(error, DataError) for issues in error.issues]
        return of_flags[0] if of_flags else DataError(*of_data)

    def refuse(self, origin: str, kind: str, offenders: Sequence[str]) -> None:
        """DataError where there are offenders of a kind."""
        issues = Issues(origin)
        issues.add_each(kind, offenders, str)
        issues.raise_if_stopping()

    def check_sizes(self, source: Source, batch_size: int, num_replicas: int, max_instances: int) -> None:
        """Checks that a training set fills one batch of all ranks, and logs images with too many boxes.

        Raises:
            DataError: fewer images than one batch of all ranks, which would repeat images.
        """
        super().check_sizes(source, batch_size, num_replicas, max_instances)
        annotations = source.annotations
        issues, counts = Issues(annotations.origin), np.diff(annotations.target_boxes.row_splits)
        issues.add_each(
            "too-many-boxes",
            np.flatnonzero(counts > max_instances),
            lambda i: f"{annotations.image_name(i)} has {counts[i]}, kept are {max_instances}",
        )
        log_issues(issues)


# The functions and types of common/datasets.py, by the same names.
_CHECKED = CheckedOpener()
open_coco, open_images = _CHECKED.open_coco, _CHECKED.open_images
open_tfrecords = _CHECKED.open_tfrecords
open_source, open_pair = _CHECKED.open_source, _CHECKED.open_pair
open_datasets, open_evaluation = _CHECKED.open_datasets, _CHECKED.open_evaluation
check_labels, check_sizes = _CHECKED.check_labels, _CHECKED.check_sizes


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
    if source is None or source.name == "video":
        return stopped
    log(f"{stopped}\nDecoding the images to find the damaged one; interrupt if that takes too long")
    issues = Issues(source.annotations.origin)
    others = []  # which plain TensorFlow does not decode
    found = in_threads(functools.partial(_decode, source), range(source.size), DECODERS)
    for row, facts in enumerate(found):
        name = source.image_name(row)
        if not add_fault(facts, name, issues) and facts.image_format not in _PLAIN_TENSORFLOW:
            others.append(f"{name} is {facts.image_format}")
    if issues.stopping:
        return DataError(issues)
    if pipeline_type == "tensorflow" and others:
        return UserError(f"--pipeline_type=tensorflow reads JPEG and PNG, and {others[0]}: use dali_cpu")
    return stopped


def _decode(source: Source, row: int) -> ImageFacts:
    try:
        return inspect(source.encoded(row), ImagePolicy(decode=True, max_megapixels=math.inf))
    except FileNotFoundError:
        return ImageFacts(fault="image-missing")
    except Exception as error:  # a file or a record that changed after the start
        return ImageFacts(fault="image-unreadable", detail=str(error))
