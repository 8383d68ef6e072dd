"""Writes annotations or a part of a COCO json as a COCO json, and the images of such a json as files.

Format: https://cocodataset.org/#format-data
"""

import codecs
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.json import decode

from common.data.annotations import Annotations
from common.data.check import images
from common.errors import UserError
from common.files import write_bytes, write_into

_SHAPES = ("segmentation", "keypoints")
_DIGITS = 4000  # Python raises an error above 4300 digits
_HELD_KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "ignore"),
    "categories": ("id", "name"),
}
_NO_VALUE = (b"null", b'""', b"[]", b"{}")
_DECIMALS = 3  # of coordinates in pixels: float32 is not more precise


def write_coco(annotations: Annotations, path: str | os.PathLike) -> None:
    """Writes a COCO json from which `load_coco` reads equal annotations. Annotation ids start at 1.

    The file appears only when it is complete. Raises OSError.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, msgspec.json.encode(annotations.ground_truth()) + b"\n")


def copy_records(source: str | os.PathLike, annotations: Annotations, path: str | os.PathLike) -> int:
    """Writes the part of a COCO json that belongs to the images of `annotations`, with all keys.

    Records of an image whose size in `annotations` is the same are copied unchanged. Otherwise, sizes, boxes,
    areas, polygons and key points are scaled. Masks in run-length encoding cannot be scaled and are left out.

    Args:
        source: the json, from which `load_coco` has read `annotations`.

    Returns:
        The number of masks that were left out, and of polygons and key points that are not lists of numbers.
    """
    content = pathlib.Path(source).read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return _copy(content, annotations, path)
    except ValueError:
        return _copy(_plain(content), annotations, path)


def lost_keys(source: str | os.PathLike) -> list[str]:
    """Returns the keys of a COCO json that `Annotations` does not hold, such as `annotations.segmentation`.

    Keys without a value ("", [], {} and null) and the ids of annotations do not count.
    """
    content = pathlib.Path(source).read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return _lost_keys(content)
    except ValueError:
        return _lost_keys(_plain(content))


def _lost_keys(content: bytes) -> list[str]:
    document = decode(content, type=dict[str, msgspec.Raw])
    lost = {key: value for key, value in document.items() if key not in _HELD_KEYS}
    for name, held in _HELD_KEYS.items():
        for raw in decode(document[name], type=list[msgspec.Raw]):
            record = decode(raw, type=dict[str, msgspec.Raw]).items()
            lost |= {f"{name}.{key}": v for key, v in record if key not in held and bytes(v) not in _NO_VALUE}
    return [key for key, value in lost.items() if bytes(value) not in _NO_VALUE]


def _plain(content: bytes) -> bytes:
    """Replaces what msgspec refuses in keys that `load_coco` does not read.

    These are NaN, a very long number, and text that is not UTF-8.
    """

    def integer(digits: str) -> int | None:
        return int(digits) if len(digits) < _DIGITS else None

    text = content.decode("utf-8", "replace")
    plain = json.loads(text, parse_constant=lambda _: None, parse_int=integer)
    return json.dumps(plain, ensure_ascii=False).encode(errors="replace")


def _copy(content: bytes, annotations: Annotations, path: str | os.PathLike) -> int:
    document = decode(content, type=dict[str, msgspec.Raw])
    new_sizes = dict(zip(annotations.image_ids.tolist(), annotations.image_sizes.tolist(), strict=True))
    images: list[Any] = []
    objects: list[Any] = []
    scales: dict[float, tuple[Scale, Scale]] = {}
    num_left_out = 0
    for raw in decode(document["images"], type=list[msgspec.Raw]):
        image = decode(raw, type=_ImageKeys)
        if image.id not in new_sizes:
            continue
        height, width = new_sizes[image.id]
        if (height, width) == (image.height, image.width):
            images.append(raw)
        else:
            scales[image.id] = (width, image.width), (height, image.height)
            images.append(decode(raw) | {"height": height, "width": width})
    for raw in decode(document["annotations"], type=list[msgspec.Raw]):
        image_id = decode(raw, type=_ObjectKeys).image_id
        if image_id in scales:
            record = decode(raw)
            objects.append(_scaled(record, *scales[image_id]))
            num_left_out += sum(bool(record.get(key)) and key not in objects[-1] for key in _SHAPES)
        elif image_id in new_sizes:
            objects.append(raw)
    write_bytes(path, msgspec.json.encode(document | {"images": images, "annotations": objects}) + b"\n")
    return num_left_out


class _ImageKeys(msgspec.Struct):
    id: int | float
    width: int | float
    height: int | float


class _ObjectKeys(msgspec.Struct):
    image_id: int | float


Scale = tuple[float, float]  # new side, old side


def _scaled(record: dict[str, Any], x: Scale, y: Scale) -> dict[str, Any]:
    """Returns an annotation for a scaled image, without what cannot be scaled."""

    def scaled(numbers: list[float], *scales: Scale) -> list[float]:
        return [
            number * new / old for number, (new, old) in zip(numbers, itertools.cycle(scales), strict=False)
        ]

    record = record | {"bbox": scaled(record["bbox"], x, y)}
    if record.get("area") is not None:
        record["area"] = record["area"] * (x[0] * y[0]) / (x[1] * y[1])
    if polygons := record.pop("segmentation", None):
        with contextlib.suppress(ValueError):  # a mask
            polygons = msgspec.convert(polygons, list[list[float]])
            record["segmentation"] = [scaled(polygon, x, y) for polygon in polygons]
    if points := record.pop("keypoints", None):  # x, y, visibility
        with contextlib.suppress(ValueError):
            record["keypoints"] = scaled(msgspec.convert(points, list[float]), x, y, (1, 1))
    return record


def write_images(
    directory: str, names: Sequence[str], encoded: Callable[[int], bytes], *, overwrite: bool = False
) -> None:
    """Writes images as files, all or none.

    Args:
        names: the paths of the files in `directory`.
        encoded: function that returns the content of file number i.
        overwrite: whether to replace existing files with these names.

    Raises:
        UserError: a file exists already.
        OSError: a file cannot be written, or `encoded` raises it.
    """
    for path in (os.path.join(directory, name) for name in names):
        if os.path.lexists(path) and not overwrite:
            hint = "choose another directory with --images or --output, or give --overwrite"
            raise UserError(f"{path} exists already: {hint}")

    def write(staged: pathlib.Path) -> None:
        def write_one(number: int) -> None:
            file = staged / names[number]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(number))

        list(images.in_threads(write_one, range(len(names)), images.DECODERS, "Writing images"))

    os.makedirs(directory, exist_ok=True)
    write_into(directory, write)


def file_names(annotations: Annotations, encoded: Callable[[int], bytes]) -> list[str]:
    """Returns the file names of images from TFRecords: the names in the records.

    If a name cannot be used or occurs twice, all images are named `<image id>.<format>`.
    `encoded` returns the bytes of image number i.
    """
    names = [str(pathlib.PurePosixPath(name)) for name in annotations.file_names]  # "" becomes "."
    if "." not in names and not any(map(images.path_fault, names)) and len(set(names)) == len(names):
        return names
    formats = [images.inspect(encoded(row)).image_format for row in range(len(names))]
    suffixes = ["jpg" if image_format == "JPEG" else image_format.lower() for image_format in formats]
    return [f"{i}.{suffix}" for i, suffix in zip(annotations.image_ids, suffixes, strict=True)]


def round_boxes(annotations: Annotations) -> Annotations:
    """Rounds boxes to thousandths of a pixel, because TFRecords store float32 fractions.

    For example, 68.0000019 becomes 68 again.
    """
    boxes = annotations.boxes_ltwh_px
    edges = np.round(np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1), _DECIMALS)
    sides = np.round(edges[:, 2:] - edges[:, :2], _DECIMALS)
    is_box_area = annotations.areas == boxes[:, 2] * boxes[:, 3]
    areas = annotations.areas.astype(np.float32).astype(str).astype(np.float64)
    return dataclasses.replace(
        annotations,
        boxes_ltwh_px=np.concatenate([edges[:, :2], sides], axis=1),
        areas=np.where(is_box_area, sides[:, 0] * sides[:, 1], areas),
    )
