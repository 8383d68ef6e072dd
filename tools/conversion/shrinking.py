"""Scales images and their annotations down, for --max_side=N of tools/convert.py.

An image whose longer side exceeds N pixels is scaled to N, and its aspect ratio is kept. All other images
keep their bytes. JPEGs get quality 95 without chroma subsampling. The EXIF orientation is kept. 16 bits are
rounded to 8, and alpha is removed.
"""

import contextlib
import dataclasses
import io
import os
import pathlib

import numpy as np
import PIL.Image

from common.data.annotations import Annotations
from common.data.check.image_headers import PILLOW_ERRORS, png_without_metadata
from common.data.check.images import inspect
from common.errors import UserError
from tools.conversion.coco_writer import write_images

_OPTIONS: dict[str, dict[str, int]] = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {}}
_ORIENTATION = 0x0112


def shrunk_sizes(sizes: np.ndarray, max_side: int) -> np.ndarray:
    """Scales sizes (I, 2) in pixels down so that the longer side is at most `max_side`."""
    longest = sizes.max(axis=1, keepdims=True)
    smaller = np.maximum(np.rint(sizes.astype(np.float64) * max_side / longest), 1)
    return np.where(longest > max_side, smaller, sizes).astype(np.int32)


def shrink_annotations(annotations: Annotations, max_side: int) -> Annotations:
    """Scales boxes and areas like the images."""
    sizes = shrunk_sizes(annotations.image_sizes, max_side)
    old_sizes = annotations.image_sizes[annotations.box_image].astype(np.float64)
    new_sizes = sizes[annotations.box_image].astype(np.float64)
    xyxy = [1, 0, 1, 0]
    return dataclasses.replace(
        annotations,
        image_sizes=sizes,
        boxes_ltwh_px=annotations.boxes_ltwh_px * new_sizes[:, xyxy] / old_sizes[:, xyxy],
        areas=annotations.areas * new_sizes.prod(axis=1) / old_sizes.prod(axis=1),
    )


def shrink_image(encoded: bytes, name: str, max_side: int | None) -> bytes:
    """Returns an encoded image whose longer side is at most `max_side`.

    Raises UserError, with `name`, for a larger image that is damaged, or neither JPEG nor PNG.
    """
    if max_side is None:
        return encoded
    facts = inspect(encoded)
    if max(facts.height, facts.width) <= max_side:
        return encoded
    if facts.image_format not in _OPTIONS:
        raise UserError(f"{name} is {facts.image_format}: convert it, --max_side reads only JPEG and PNG")
    height, width = shrunk_sizes(np.array([[facts.height, facts.width]]), max_side)[0].tolist()
    # PIL.Image.open would refuse large images.
    open_picture, _ = PIL.Image.OPEN[facts.image_format]
    profile = None
    with contextlib.suppress(*PILLOW_ERRORS):
        profile = open_picture(io.BytesIO(encoded), "").info.get("icc_profile")
    try:
        picture: PIL.Image.Image = open_picture(io.BytesIO(png_without_metadata(encoded)), "")
        # libjpeg decodes faster at 1/2, 1/4 or 1/8 of the size. At least twice the new size is decoded.
        drafted = picture.draft(None, (2 * width, 2 * height))
        picture = _as_8_bit(picture)
    except PILLOW_ERRORS as error:
        raise UserError(f"{name} cannot be decoded: {error}") from error
    box = drafted[1] if drafted else None
    picture = picture.resize((width, height), PIL.Image.Resampling.LANCZOS, box)
    exif, stream = PIL.Image.Exif(), io.BytesIO()
    exif[_ORIENTATION] = facts.orientation
    options = _OPTIONS[facts.image_format]
    picture.save(stream, facts.image_format, exif=exif, icc_profile=profile, **options)
    return stream.getvalue()


def _as_8_bit(picture: PIL.Image.Image) -> PIL.Image.Image:
    picture.load()
    if picture.mode.startswith("I"):
        return PIL.Image.fromarray(np.rint(np.asarray(picture) / 257).astype(np.uint8))
    if picture.mode in ("L", "RGB", "CMYK"):
        return picture
    return picture.convert("L" if picture.mode in ("1", "LA") else "RGB")


def write_shrunk(
    annotations: Annotations, images_dir: str, directory: str, max_side: int, *, overwrite: bool = False
) -> None:
    """Writes the images to another directory under the same names, all or none.

    Args:
        images_dir: directory of the original images.
        max_side: longest side in pixels.
        overwrite: whether to replace existing files with these names.

    Raises:
        UserError: the directories are the same, a file exists already, or `shrink_image` raises it.
        OSError: a file cannot be read or written.
    """
    if os.path.realpath(directory) == os.path.realpath(images_dir):
        raise UserError(f"{directory} has the original images: choose --output in another directory")

    def encoded(row: int) -> bytes:
        original = pathlib.Path(images_dir, annotations.file_names[row])
        return shrink_image(original.read_bytes(), str(original), max_side)

    write_images(directory, annotations.file_names, encoded, overwrite=overwrite)
