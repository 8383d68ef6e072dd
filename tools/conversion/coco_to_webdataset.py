"""Writes annotations and images as WebDataset shards: a tar file has an image and a json per sample.

common/data/webdataset.py describes the format. Samples are named by their image ids.
"""

import io
import os
import pathlib
import tarfile
from collections.abc import Iterator
from typing import Any

import msgspec

from common.data.annotations import Annotations, records
from tools.conversion.numbered_files import read_image, write_numbered_files

_SUFFIXES = {"JPEG": "jpg", "JPEG2000": "jp2"}  # Pillow's format -> suffix; other formats are their suffixes


def write_webdataset(
    annotations: Annotations,
    images_dir: str | os.PathLike,
    prefix: str | os.PathLike,
    *,
    max_side: int | None = None,
    **options: Any,
) -> list[str]:
    """Writes `<prefix>-00000-of-<num_shards>.tar` ... and `<prefix>.label_map.json`.

    The arguments and errors are those of `write_tfrecords`. The images may have all formats that DALI reads.

    Returns:
        The paths of the tar files.
    """

    def write_file(file: pathlib.Path, rows: Iterator[int]) -> None:
        with tarfile.open(file, "w") as archive:
            for row in rows:
                encoded, image_format = read_image(annotations, row, images_dir, max_side)
                key = f"{annotations.image_ids[row]:012d}"
                suffix = _SUFFIXES.get(image_format, image_format.lower())
                _add(archive, f"{key}.{suffix}", encoded)
                _add(archive, f"{key}.json", msgspec.json.encode(_content(annotations, row)))

    return write_numbered_files(annotations, prefix, ".tar", write_file, **options)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _content(annotations: Annotations, row: int) -> dict[str, Any]:
    """Returns the json of a sample, with the original boxes."""
    rows = slice(*annotations.row_splits[row : row + 2])
    objects = (annotations.category_ids, annotations.boxes_ltwh_px, annotations.areas)
    is_crowd = annotations.is_crowd[rows].astype(int)
    height, width = annotations.image_sizes[row].tolist()
    return {
        "image_id": int(annotations.image_ids[row]),
        "file_name": annotations.file_names[row],
        "width": width,
        "height": height,
        "annotations": records(
            "category_id bbox area iscrowd", *(column[rows] for column in objects), is_crowd
        ),
    }
