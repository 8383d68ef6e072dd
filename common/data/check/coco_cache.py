"""Keeps the result of checking a large COCO json in the cache directory, as arrays that processes share.

The file is found by the content of the json, the image directory and the flags. It is used if the state and
the facts of every image file are those of the check, so a changed file is noticed as without this cache.
"""

import functools
import hashlib
import itertools
import os
import pathlib
import stat
from collections.abc import Sequence

import msgspec
import numpy as np

from common.args import ImagePolicy
from common.data.annotations import ARRAYS, Annotations, TargetBoxes
from common.data.check.images import state_of_files
from common.data.check.issues import Issue, Issues
from common.data.labels import LabelMap
from common.files import load_arrays, save_arrays

LARGE = 2**20  # bytes; a smaller json is checked in a few milliseconds


class _Details(msgspec.Struct, array_like=True):
    """What a cache file holds besides arrays."""

    files: str  # of state_of_files
    label_map: str
    issues: list[Issue]
    counts: tuple[int, int, int]  # the last fields of TargetBoxes
    has_all: bool  # whether no image is left out


class CocoCache:
    """The cached annotations of a json.

    Args:
        json_path, images_dir, policy: arguments of `load_coco`.
    """

    def __init__(self, json_path: str, images_dir: str | os.PathLike, policy: ImagePolicy) -> None:
        self._json_path, self._images_dir, self._policy = json_path, images_dir, policy
        self._status = self._stat()
        self._key = self._make_key()

    def _stat(self) -> tuple[int, ...] | None:
        """Returns the state of the json; None if it is not a large regular file."""
        try:
            status = os.stat(self._json_path)
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size < LARGE:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino

    def _make_key(self) -> str | None:
        if not self._status:
            return None
        try:
            with open(self._json_path, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256")
        except OSError:
            return None
        digest.update(repr((_code(), os.path.realpath(self._images_dir), self._policy)).encode())
        return f"coco-{digest.hexdigest()[:32]}"

    def load(self, files: str = "") -> Annotations | None:
        """Returns the annotations; None if they are not cached, or if an image file has changed.

        Args:
            files: the result of `check_files`, if the files need not be checked again.
        """
        if not self._key or not (stored := load_arrays(self._key)):
            return None
        details, arrays = msgspec.convert(stored[0], _Details), stored[1]
        names = os.fsdecode(arrays["names"].tobytes()).split("\0")
        if details.files != (files or state_of_files(self._images_dir, names, self._policy)):
            return None
        if not details.has_all:
            names = list(itertools.compress(names, arrays["is_used"]))
        issues = Issues(self._json_path, self._policy)
        issues.extend(details.issues)
        annotations = Annotations(
            LabelMap.from_json(details.label_map),
            file_names=names,
            origin=self._json_path,
            issues=issues,
            checksums=arrays["checksums"],
            **{name: arrays[name] for name in ARRAYS},
        )
        # functools.cached_property stores its value there, too.
        targets = (arrays["target_boxes"], arrays["target_classes"], arrays["target_row_splits"])
        vars(annotations)["target_boxes"] = TargetBoxes(*targets, *details.counts)
        return annotations

    def save(self, annotations: Annotations, names: Sequence[str], is_used: np.ndarray, files: str) -> None:
        """Stores the result of a check.

        Args:
            names: the file names of all images in the json.
            is_used: bool (I,), whether `annotations` have the image.
            files: the result of `check_files`.
        """
        if not self._key or self._stat() != self._status:  # the json has changed during the check
            return
        targets = annotations.target_boxes
        counts = (targets.num_clipped, targets.num_dropped, targets.num_crowds)
        label_map, issues = annotations.label_map.to_json(), list(annotations.issues)
        details = _Details(files, label_map, issues, counts, bool(is_used.all()))
        arrays = {name: getattr(annotations, name) for name in (*ARRAYS, "checksums")}
        for name in ("boxes", "classes", "row_splits"):
            arrays[f"target_{name}"] = getattr(targets, name)
        arrays |= {"names": np.frombuffer(os.fsencode("\0".join(names)), np.uint8), "is_used": is_used}
        save_arrays(self._key, msgspec.to_builtins(details), arrays)


@functools.cache
def _code() -> str:
    """Returns a digest of the source files of common/data, on which the result of a check depends."""
    files = sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
