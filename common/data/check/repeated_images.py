"""Finds images of the same content in one data set, or in the training and the evaluation data.

The check of the headers stores a checksum of each file's size and ends. Only files with equal checksums are
read completely. For an image in a record or a tar file, the checksum is of all its bytes.
"""

import collections
import functools
import hashlib
import os
from collections.abc import Callable

import numpy as np

from common.data.annotations import Annotations
from common.data.check.issues import Issues
from common.data.sources import Source
from common.progress import log


def report_repeated_images(images_dir: str | os.PathLike, annotations: Annotations, issues: Issues) -> None:
    """Reports images of one data set with the same content. "repeated-file" reports those of one name."""
    row_of: dict[str, int] = {}
    for row, name in enumerate(annotations.file_names):
        row_of.setdefault(name, row)
    rows = list(row_of.values())

    def path(number: int) -> str:
        return os.path.join(images_dir, annotations.file_names[rows[number]])

    for group in equal_files(path, checksums_of(annotations)[rows]):
        issues.add("repeated-image", " = ".join(annotations.image_name(rows[number]) for number in group))


def report_shared_images(train: Source, evaluation: Source, issues: Issues) -> None:
    """Reports images of the evaluation data that are also in the training data, by their content.

    If only one of them is COCO, logs that no such images are looked for.
    """
    if (train.name == "coco") != (evaluation.name == "coco"):
        log("images that are in both the training and the evaluation data: not looked for between formats")
        return
    checksums = np.concatenate([checksums_of(source.annotations) for source in (train, evaluation)])

    def path(row: int) -> str:
        return train.files[row] if row < train.size else evaluation.files[row - train.size]

    for group in equal_files(path, checksums) if train.name == "coco" else equal_rows(checksums):
        if (first := min(group)) < train.size:
            names = [evaluation.image_name(row - train.size) for row in group if row >= train.size]
            issues.add_each("shared-image", names, lambda name: f"{name} = {train.image_name(first)}")


def checksum_of(encoded: bytes) -> int:
    """Returns the checksum of an image in a record or a tar file."""
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") >> 1


def checksums_of(annotations: Annotations) -> np.ndarray:
    """Returns int64 (I,), the checksum of each image, 0 if it is unknown."""
    return (
        np.zeros(annotations.num_images, np.int64) if annotations.checksums is None else annotations.checksums
    )


def equal_rows(checksums: np.ndarray) -> list[list[int]]:
    """Returns the groups of rows with equal checksums, int64 (N,), except rows with 0."""
    ordered = np.sort(checksums)
    repeated = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)]
    rows_of = collections.defaultdict(list)
    for row in np.flatnonzero(np.isin(checksums, repeated)).tolist():
        rows_of[checksums[row]].append(row)
    return list(rows_of.values())


def equal_files(path: Callable[[int], str], checksums: np.ndarray) -> list[list[int]]:
    """Returns the groups of files, as indices, that have the same content.

    Args:
        path: index -> path of the file.
        checksums: int64 (N,), `ImageFacts.checksum` of each; 0 if it is unknown.
    """
    by_content = collections.defaultdict(list)

    @functools.cache
    def content_of(path: str) -> bytes:
        try:
            with open(path, "rb") as stream:
                return hashlib.file_digest(stream, "blake2b").digest()
        except OSError:
            return path.encode(errors="surrogateescape")  # equal to no other file

    for group in equal_rows(checksums):
        paths = [path(row) for row in group]
        for row, file in zip(group, paths, strict=True):
            # A single file need not be read.
            content = file if len(set(paths)) == 1 else content_of(os.path.realpath(file))
            by_content[content].append(row)
    return [group for group in by_content.values() if len(group) > 1]
