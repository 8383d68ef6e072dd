"""Annotations as a COCO json, and TFRecords as the image files that such a json needs.

Format: https://cocodataset.org/#format-data
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

import msgspec
import numpy as np
import tensorflow as tf

from common import progress
from common.annotations import Annotations
from common.datacheck import images
from common.errors import UserError
from common.files import TEMPORARY, write_bytes

_MAX_NAME = 255  # bytes of a file name, on all usual file systems
_DECIMALS = range(7)  # of pixels, that float32 fractions of an image can carry


def write_coco(annotations: Annotations, path: str | os.PathLike) -> None:
    """Writes a COCO json: what `load_coco` reads from it is equal. It appears when it is complete.

    Annotations get ids from 1 in their order; file names stay relative to the directory of images.

    Raises:
        OSError: the disk.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, msgspec.json.encode(annotations.ground_truth()) + b"\n")


def extract_images(
    files: Sequence[str | os.PathLike],
    annotations: Annotations,
    directory: str | os.PathLike,
    *,
    overwrite: bool = False,
) -> Annotations:
    """Writes the images in TFRecords as files, byte for byte, all or none.

    A file has the name that its record gives it, sub-directories included. Where that is missing, would leave
    the directory, or is another image's, it is `<image id>.<format>`.

    Args:
        files: record files that `open_records` has accepted.
        annotations: what it found in them.
        directory: where the images go; made if need be.
        overwrite: replace files that have these names.

    Returns:
        The annotations with the names of the files.

    Raises:
        UserError: a file is in the way.
        OSError: the disk.
    """
    directory = pathlib.Path(directory)
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    staged = pathlib.Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=directory))
    try:
        names = _stage(files, annotations, staged)
        if not overwrite:
            _refuse_existing(directory, names)
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / name, directory / name)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                directory.rmdir()  # which only removes what is empty
    return dataclasses.replace(annotations, file_names=names)


def file_names(annotations: Annotations) -> list[str]:
    """The name of each image's file, unique and inside the directory; "" where a record gives none such."""
    taken: set[str] = set()
    folders: set[str] = set()
    names = []
    for name in annotations.file_names:
        safe = _safe_name(name)
        parents = {str(parent) for parent in pathlib.PurePosixPath(safe).parents if parent.name}
        if safe in taken | folders or parents & taken:
            safe = ""
        if safe:
            taken.add(safe)
            folders |= parents
        names.append(safe)
    return names


def shorten_boxes(annotations: Annotations) -> Annotations:
    """Boxes that were read as float32 fractions, with as few decimals of a pixel as give the same fractions.

    So 68.0000019 becomes 68 again; areas of float32 likewise lose the digits that it cannot carry.
    """
    limits = annotations.image_sizes[annotations.box_image][:, [1, 0, 1, 0]]
    boxes = annotations.boxes_ltwh_px
    edges = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    fractions = (edges / limits).astype(np.float32)
    short, found = edges.copy(), np.zeros(edges.shape, bool)
    for decimals in _DECIMALS:
        rounded = np.round(edges, decimals)
        fits = ~found & ((rounded / limits).astype(np.float32) == fractions)
        short[fits] = rounded[fits]
        found |= fits
    exact = short[:, 2:] - short[:, :2]
    sides = np.round(exact, _DECIMALS[-1])
    same = ((short[:, :2] + sides) / limits[:, 2:]).astype(np.float32) == fractions[:, 2:]
    sides = np.where(same, sides, exact)
    of_box = annotations.areas == boxes[:, 2] * boxes[:, 3]
    areas = annotations.areas.astype(np.float32).astype(str).astype(np.float64)
    return dataclasses.replace(
        annotations,
        boxes_ltwh_px=np.concatenate([short[:, :2], sides], axis=1),
        areas=np.where(of_box, sides[:, 0] * sides[:, 1], areas),
    )


def _stage(files: Sequence[str | os.PathLike], annotations: Annotations, staged: pathlib.Path) -> list[str]:
    names = file_names(annotations)
    taken = {str(path) for name in names for path in (name, *pathlib.PurePosixPath(name).parents)}
    rows = {image_id: row for row, image_id in enumerate(annotations.image_ids.tolist())}
    bar = progress.Bar("Extracting images", len(rows))
    for record in tf.data.TFRecordDataset([os.fspath(file) for file in files]).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        row = rows.get(int(features["image/source_id"].bytes_list.value[0]))
        if row is None:  # left out by --on_bad_image=skip
            continue
        encoded = features["image/encoded"].bytes_list.value[0]
        if not names[row]:
            names[row] = _name_by_id(annotations.image_ids[row], encoded, taken)
        (staged / names[row]).parent.mkdir(parents=True, exist_ok=True)
        (staged / names[row]).write_bytes(encoded)
        bar.step()
    return names


def _name_by_id(image_id: int, encoded: bytes, taken: set[str]) -> str:
    image_format = images.inspect(encoded).image_format.lower()
    suffix = {"jpeg": "jpg", "mpo": "jpg"}.get(image_format, image_format)
    name, number = f"{image_id}.{suffix}", 1
    while name in taken:
        name, number = f"{image_id}-{number}.{suffix}", number + 1
    return name


def _safe_name(name: str) -> str:
    path = pathlib.PurePosixPath(name)
    usual = name.isprintable() and "\\" not in name and not images.path_fault(name)
    hidden = any(part.startswith(".") or len(part.encode()) > _MAX_NAME for part in path.parts)
    return str(path) if path.name and usual and not hidden else ""


def _refuse_existing(directory: pathlib.Path, names: Sequence[str]) -> None:
    existing = [name for name in names if os.path.lexists(directory / name)]
    if existing:
        raise UserError(
            f"{directory / existing[0]} is there already ({len(existing)} of {len(names)} images are):"
            " choose another directory by --images=DIR, or --overwrite"
        )
