"""One preprocessed image, as a picture, and file names made of the names of sources."""

import io
import os
import re
from typing import NamedTuple

import numpy as np
from PIL import Image

from common.errors import UserError

# jpeg, jp2, tiff, npy, ...; in img.0001 or a key like v1.25 the dot belongs to the name
_SUFFIX = re.compile(r"(?<=.)\.[A-Za-z][A-Za-z0-9]{0,4}$")
_MAX_BYTES = 230  # of a name without suffix: file systems take 255 with it, and a number may follow


class Sample(NamedTuple):
    """One preprocessed image.

    Attributes:
        position: of its source image in the source, from 0.
        name: of the source image: "cats/a.jpg", a record's key, ...
        label: -1 for none.
        image: (H, W, C), (H, W), or (C, H, W); any dtype.
        layout: of the image: "HWC" or "CHW".
    """

    position: int
    name: str
    label: int
    image: np.ndarray
    layout: str = "HWC"

    def describe(self) -> str:
        """Which sample it is, its dtype and shape, for messages."""
        shape = " x ".join(map(str, self.image.shape))
        return f"image {self.position} ({self.name!r}) is {self.image.dtype} {shape} ({self.layout})"


def to_picture(sample: Sample, *, is_bgr: bool = False) -> np.ndarray:
    """The image as a file format takes it: uint8 (H, W, 3) RGB or (H, W), contiguous.

    Raises:
        UserError: it has another dtype, or another layout or number of channels.
    """
    image = sample.image
    if image.dtype != np.uint8:
        wanted = "uint8: leave crop_mirror_normalize and cast out of --ops"
    elif sample.layout == "CHW":
        wanted = "height x width x channels: leave layout:CHW out of --ops"
    elif image.shape[2:] not in ((), (1,), (3,)) or not image.size:
        wanted = "height x width x 3 or 1, not empty: change --ops"
    else:
        if image.shape[2:] == (1,):
            image = image[..., 0]
        return np.ascontiguousarray(image[..., ::-1] if is_bgr and image.ndim == 3 else image)
    raise UserError(f"{sample.describe()}, and pictures are {wanted}, or write an .npz")


def encode(picture: np.ndarray, image_format: str, jpeg_quality: int) -> bytes:
    """uint8 (H, W, 3) RGB or (H, W) -> the content of a "png" or "jpeg" file."""
    stream = io.BytesIO()
    options = {"quality": jpeg_quality} if image_format == "jpeg" else {}
    Image.fromarray(picture).save(stream, image_format, **options)
    return stream.getvalue()


class FileNames:
    """Gives every source's name a file name: its own path with another suffix, where that can be.

    It stays below the directory, is no hidden file, has no characters that do not print, and no two are the
    same: the second a.jpg is a-2.png.

    Args:
        suffix: of all files, ".png".
    """

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._files: set[str] = set()
        self._numbers: dict[str, int] = {}

    def of(self, name: str) -> str:
        """The relative path for the next source; no later one gets the same."""
        parts = [part for part in name.split("/") if part.strip(". ")]
        if parts:
            parts[-1] = _SUFFIX.sub("", parts[-1])
        parts = [_safe(part) for part in parts] or ["image"]
        stem = "/".join(parts)
        candidate, number = f"{stem}{self._suffix}", self._numbers.get(stem, 1)
        while candidate in self._files:
            number += 1
            candidate = f"{stem}-{number}{self._suffix}"
        self._numbers[stem] = number
        self._files.add(candidate)
        return candidate


def _safe(part: str) -> str:
    printable = "".join(c if c.isprintable() and c != "\\" else "_" for c in part).lstrip(".")
    short = os.fsencode(printable)[:_MAX_BYTES].decode(errors="ignore")
    return short or "_"
