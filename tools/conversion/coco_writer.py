"""Annotations as a COCO json, and TFRecords as the image files that such a json needs.

Format: https://cocodataset.org/#format-data
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from common import progress
from common.annotations import Annotations
from common.datacheck import images
from common.errors import UserError
from common.files import write_bytes, write_into

_DECIMALS = 3  # of pixels: float32 fractions of an image of 10,000 pixels carry no more


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
    change: Callable[[bytes, str], bytes] = lambda encoded, name: encoded,
    overwrite: bool = False,
) -> Annotations:
    """Writes the images in TFRecords as files, all or none; byte for byte, unless `change` changes them.

    A file has the name that its record gives it, sub-directories included. Where the name of any image is
    missing, would leave the directory, or is another image's, all are named `<image id>.<format>`.

    Args:
        files: record files that `open_records` has accepted.
        annotations: what it found in them.
        directory: where the images go; made if need be.
        change: of an encoded image and its name, what to write in its place.
        overwrite: replace files that have these names.

    Returns:
        The annotations with the names of the files.

    Raises:
        UserError: a file is in the way.
        OSError: the disk.
    """
    import tensorflow as tf

    given, names = file_names(annotations), [""] * annotations.num_images
    rows = {image_id: row for row, image_id in enumerate(annotations.image_ids.tolist())}

    def write(staged: pathlib.Path) -> None:
        bar = progress.Bar("Extracting images", len(rows))
        for record in tf.data.TFRecordDataset([os.fspath(file) for file in files]).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            image_id = int(features["image/source_id"].bytes_list.value[0])
            if image_id not in rows:  # left out by --on_bad_image=skip
                continue
            row, encoded = rows[image_id], features["image/encoded"].bytes_list.value[0]
            suffix = images.inspect(encoded).image_format.lower()
            suffix = "jpg" if suffix == "jpeg" else suffix
            names[row] = given[row] if given else f"{image_id}.{suffix}"
            if os.path.lexists(os.path.join(directory, names[row])) and not overwrite:
                raise UserError(
                    f"{os.path.join(directory, names[row])} is there already: choose another directory by"
                    " --images=DIR, or --overwrite"
                )
            file = staged / names[row]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(change(encoded, annotations.image_name(row)))
            bar.step()

    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    write_into(directory, write)
    return dataclasses.replace(annotations, file_names=names)


def file_names(annotations: Annotations) -> list[str] | None:
    """The names of the files of the images; None unless all are different and inside the directory."""
    names = [str(pathlib.PurePosixPath(name)) for name in annotations.file_names]  # "" becomes "."
    usable = "." not in names and not any(map(images.path_fault, names))
    return names if usable and len(set(names)) == len(names) else None


def round_boxes(annotations: Annotations) -> Annotations:
    """Boxes that were read as float32 fractions, rounded to thousandths of a pixel.

    So 68.0000019 becomes 68 again. Areas of float32 likewise lose the digits that it cannot carry.
    """
    boxes = annotations.boxes_ltwh_px
    edges = np.round(np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1), _DECIMALS)
    sides = np.round(edges[:, 2:] - edges[:, :2], _DECIMALS)
    of_box = annotations.areas == boxes[:, 2] * boxes[:, 3]
    areas = annotations.areas.astype(np.float32).astype(str).astype(np.float64)
    return dataclasses.replace(
        annotations,
        boxes_ltwh_px=np.concatenate([edges[:, :2], sides], axis=1),
        areas=np.where(of_box, sides[:, 0] * sides[:, 1], areas),
    )
