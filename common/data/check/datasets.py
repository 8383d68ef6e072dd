"""Opens the data sets that the flags name, as common/data/datasets.py does, and also checks them.

All errors of the training and evaluation data are reported together, before anything is written.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from common.args import ImagePolicy
from common.data import datasets as plain
from common.data.check.coco import load_coco
from common.data.check.image_headers import ImageFacts
from common.data.check.images import DECODERS, add_fault, in_threads, inspect, inspect_files
from common.data.check.issues import DataError, Issues
from common.data.datasets import CocoSource, ImageListSource, Source
from common.data.labels import LabelMap, is_text
from common.errors import UserError, tell
from common.progress import import_tensorflow, log

if TYPE_CHECKING:
    from common.data.check.tfrecord import TFRecordSource

_PLAIN_TENSORFLOW = ("JPEG", "PNG")


class CheckedOpener(plain.Opener):
    def open_coco(
        self, images: str | os.PathLike, annotations: str | os.PathLike, policy: ImagePolicy = ImagePolicy()
    ) -> CocoSource:
        """Opens and checks a COCO json and its images; raises DataError like `load_coco`."""
        return CocoSource(os.fspath(images), load_coco(annotations, images, policy=policy))

    def open_tfrecords(
        self, pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
    ) -> "TFRecordSource":
        """Opens and checks record files; raises DataError like `tfrecord.open_records`.

        Args:
            pattern: glob of the record files.
            label_map: file with the categories; default: the `<prefix>.label_map.json` of tools/convert.py.
        """
        import_tensorflow()  # takes seconds
        from common.data.check import tfrecord

        files = tfrecord.expand_pattern(pattern)
        labels = LabelMap.load(label_map or tfrecord.find_label_map(files))
        return tfrecord.open_records(files, labels, policy=policy)

    def open_images(self, images: str, policy: ImagePolicy = ImagePolicy()) -> ImageListSource:
        """Opens and checks the images of --images. Raises UserError if no image is usable."""
        files, issues = plain.list_images(images), Issues(f"--images={images}", policy)
        facts = inspect_files(os.curdir, files, policy)
        misnamed = ImageFacts(fault="image-unreadable", detail="DALI needs a file name in UTF-8")
        pairs = [(file, fact if is_text(file) else misnamed) for file, fact in zip(files, facts, strict=True)]
        usable = [file for file, fact in pairs if not add_fault(fact, repr(file), issues)]
        if not usable:
            issues.add("no-images", f"none of the {len(facts)} images can be read")
        issues.raise_if_stopping()
        log_issues(issues)
        return ImageListSource(usable)

    def join(self, errors: Sequence[UserError]) -> UserError:
        """Returns the first error in the flags. If there is none, returns one error with all data issues."""
        of_flags = [error for error in errors if not isinstance(error, DataError)]
        of_data = [issues for error in errors if isinstance(error, DataError) for issues in error.issues]
        return of_flags[0] if of_flags else DataError(*of_data)

    def refuse(self, origin: str, kind: str, offenders: Sequence[str]) -> None:
        """Raises DataError if `offenders` is not empty."""
        issues = Issues(origin)
        issues.add_each(kind, offenders, str)
        issues.raise_if_stopping()

    def check_sizes(self, source: Source, batch_size: int, num_replicas: int, max_instances: int) -> None:
        """Logs images with too many boxes.

        Raises:
            DataError: the data set has fewer images than the ranks need for one batch each.
        """
        super().check_sizes(source, batch_size, num_replicas, max_instances)
        annotations = source.annotations
        issues, counts = Issues(annotations.origin), np.diff(annotations.target_boxes.row_splits)
        issues.add_each(
            "too-many-boxes",
            np.flatnonzero(counts > max_instances),
            lambda i: f"{annotations.image_name(i)} has {counts[i]}, of which {max_instances} are kept",
        )
        log_issues(issues)


# These functions have the names of those in common/data/datasets.py, but also check the data.
_CHECKED = CheckedOpener()
open_coco, open_images = _CHECKED.open_coco, _CHECKED.open_images
open_tfrecords = _CHECKED.open_tfrecords
open_source, open_pair = _CHECKED.open_source, _CHECKED.open_pair
open_datasets, open_evaluation = _CHECKED.open_datasets, _CHECKED.open_evaluation
check_labels, check_sizes = _CHECKED.check_labels, _CHECKED.check_sizes


def log_issues(issues: Issues) -> None:
    """Logs the issues of a data set, with at most three offenders each."""
    for issue in issues:
        log(f"{issues.origin}: {issue.line(shown=3)}")


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """Logs the error of a loader, then decodes all images to find those that caused it.

    Args:
        pipeline_type: the loader's type, for example dali_cpu.

    Returns:
        The error to raise. It names the images that cannot be read; if all images can be decoded, it is the
        loader's own error.
    """
    stopped = plain.explain(error, source, pipeline_type)
    if source is None or source.name == "video":
        return stopped
    tell(f"{stopped}\nDecoding the images to find the damaged ones; press Ctrl-C if that takes too long")
    issues = Issues(source.annotations.origin)
    others = []  # names and formats of images that TensorFlow cannot decode
    found = in_threads(functools.partial(_decode, source), range(source.size), DECODERS)
    for row, facts in enumerate(found):
        name = source.image_name(row)
        if not add_fault(facts, name, issues) and facts.image_format not in _PLAIN_TENSORFLOW:
            others.append(f"{name} is {facts.image_format}")
    if issues.stopping:
        return DataError(issues)
    if pipeline_type == "tensorflow" and others:
        return UserError(f"--pipeline_type=tensorflow reads only JPEG and PNG, but {others[0]}: use dali_cpu")
    return stopped


def _decode(source: Source, row: int) -> ImageFacts:
    try:
        return inspect(source.encoded(row), ImagePolicy(decode=True, max_megapixels=math.inf))
    except FileNotFoundError:
        return ImageFacts(fault="image-missing")
    except Exception as error:  # for example, the file has changed since the start
        return ImageFacts(fault="image-unreadable", detail=str(error))
