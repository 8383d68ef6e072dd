"""Finds image files of the same content in one data set, or in the training and the evaluation data.

The check of the headers stores a checksum of each file's size and ends. Only files with equal checksums are
read completely.
"""

import collections
import functools
import hashlib
import os
from collections.abc import Sequence

import numpy as np

from common.data.annotations import Annotations
from common.data.check.issues import Issues
from common.data.sources import CocoSource


def report_repeated_images(images_dir: str | os.PathLike, annotations: Annotations, issues: Issues) -> None:
    """Reports images of one data set with the same content. "repeated-file" reports those of one name."""
    row_of: dict[str, int] = {}
    for row, name in enumerate(annotations.file_names):
        row_of.setdefault(name, row)
    rows, paths = list(row_of.values()), [os.path.join(images_dir, name) for name in row_of]
    for group in equal_files(paths, _checksums(annotations)[rows]):
        issues.add("repeated-image", " = ".join(annotations.image_name(rows[number]) for number in group))


def report_shared_images(train: CocoSource, evaluation: CocoSource, issues: Issues) -> None:
    """Reports images of the evaluation data that are also in the training data, by their content."""
    checksums = np.concatenate([_checksums(source.annotations) for source in (train, evaluation)])
    for group in equal_files([*train.files, *evaluation.files], checksums):
        if (first := min(group)) < train.size:
            names = [evaluation.image_name(row - train.size) for row in group if row >= train.size]
            issues.add_each("shared-image", names, lambda name: f"{name} = {train.image_name(first)}")


def _checksums(annotations: Annotations) -> np.ndarray:
    return (
        np.zeros(annotations.num_images, np.int64) if annotations.checksums is None else annotations.checksums
    )


def equal_files(paths: Sequence[str], checksums: np.ndarray) -> list[list[int]]:
    """Returns the groups of files, as indices, that have the same content.

    Args:
        paths: N files.
        checksums: int64 (N,), `ImageFacts.checksum` of each; 0 if it is unknown.
    """
    if not paths:
        return []
    order = np.argsort(checksums, kind="stable")
    ordered = checksums[order]
    is_same = (ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)
    rows = order[np.append(False, is_same) | np.append(is_same, False)]
    by_checksum, by_content = collections.defaultdict(list), collections.defaultdict(list)
    for row in sorted(rows.tolist()):
        by_checksum[checksums[row]].append(row)

    @functools.cache
    def content_of(path: str) -> bytes:
        try:
            with open(path, "rb") as stream:
                return hashlib.file_digest(stream, "blake2b").digest()
        except OSError:
            return path.encode(errors="surrogateescape")  # equal to no other file

    for group in by_checksum.values():
        is_one_file = len({paths[row] for row in group}) == 1  # it need not be read
        for row in group:
            by_content[paths[row] if is_one_file else content_of(os.path.realpath(paths[row]))].append(row)
    return [group for group in by_content.values() if len(group) > 1]
