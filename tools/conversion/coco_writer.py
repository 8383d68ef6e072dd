"""Writes annotations as a COCO json, and extracts the images of TFRecords as files for such a json.

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

_DECIMALS = 3  # of coordinates in pixels: float32 fractions of a 10,000-pixel side are not more precise


def write_coco(annotations: Annotations, path: str | os.PathLike) -> None:
    """Writes a COCO json from which `load_coco` reads equal annotations. The file appears once complete.

    Annotations get ids from 1 in their order; file names stay relative to the directory of images.

    Raises:
        OSError: the file cannot be written.
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
    """Writes the images in TFRecords as files, all or none. Their bytes stay the same without `change`.

    Each file has the name in its record, with sub-directories. If any name is missing, leads out of the
    directory or occurs twice, all files are named `<image id>.<format>`.

    Args:
        files: record files that `open_records` has accepted.
        annotations: the annotations that `open_records` found in them.
        directory: the directory for the images; created if missing.
        change: function (encoded image, its name) -> the bytes to write.
        overwrite: whether to replace existing files with these names.

    Returns:
        The annotations with the names of the written files.

    Raises:
        UserError: a file exists already.
        OSError: a file cannot be read or written.
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
                    f"{os.path.join(directory, names[row])} exists already: choose another directory with"
                    " --images=DIR, or give --overwrite"
                )
            file = staged / names[row]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(change(encoded, annotations.image_name(row)))
            bar.step()

    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    write_into(directory, write)
    return dataclasses.replace(annotations, file_names=names)


def file_names(annotations: Annotations) -> list[str] | None:
    """Returns the file names of the images; None unless all are different and inside the directory."""
    names = [str(pathlib.PurePosixPath(name)) for name in annotations.file_names]  # "" becomes "."
    usable = "." not in names and not any(map(images.path_fault, names))
    return names if usable and len(set(names)) == len(names) else None


def round_boxes(annotations: Annotations) -> Annotations:
    """Rounds boxes to thousandths of a pixel, because TFRecords store them as float32 fractions.

    For example, 68.0000019 becomes 68 again. Areas are rounded to the precision of float32.
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
