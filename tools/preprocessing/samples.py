"""Defines preprocessed images, and makes the names of their files."""

import os
import re
from typing import NamedTuple

import numpy as np

from common.errors import UserError

# Matches suffixes such as .jpeg, .jp2 and .npy, but not the ends of names such as img.0001 or v1.25.
_SUFFIX = re.compile(r"(?<=.)\.[A-Za-z][A-Za-z0-9]{0,4}$")
_MAX_BYTES = 230  # of a name without suffix and number; file systems accept 255


class Sample(NamedTuple):
    """One preprocessed image.

    Attributes:
        position: position of the source image in the source, from 0.
        name: name of the source image: "cats/a.jpg", a record's key, ...
        image: (H, W, C), (H, W), or (C, H, W); any dtype.
        layout: layout of the image: "HWC" or "CHW".
    """

    position: int
    name: str
    label: int
    image: np.ndarray
    layout: str = "HWC"

    def describe(self) -> str:
        shape = " x ".join(map(str, self.image.shape))
        return f"image {self.position} ({self.name!r}) is {self.image.dtype} {shape} ({self.layout})"

    def picture(self, *, is_bgr: bool = False) -> np.ndarray:
        """Returns the image in the format of image files: uint8, (H, W, 3) RGB or (H, W).

        Raises UserError for any other dtype, layout or number of channels.
        """
        image, channels = self.image, self.image.shape[2:]
        is_picture = image.dtype == np.uint8 and self.layout == "HWC" and image.size
        if not is_picture or channels not in ((), (1,), (3,)):
            raise UserError(
                f"{self.describe()}, but image files need uint8, HWC and 1 or 3 channels: remove"
                " crop_mirror_normalize, cast and layout from --ops, or write an .npz file"
            )
        if channels == (1,):
            image = image[..., 0]
        return np.ascontiguousarray(image[..., ::-1] if is_bgr and channels == (3,) else image)


class FileNames:
    """Makes file names from the names of source images: the same path with another suffix, if possible.

    A file name stays inside the output directory and is unique: the second a.jpg becomes a-2.png.
    """

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._last: dict[str, int] = {}  # path without suffix -> the number of the last file that has it

    def of(self, name: str) -> str:
        parts = [part for part in name.split("/") if part.strip(". ")] or ["image"]
        parts[-1] = _SUFFIX.sub("", parts[-1])
        stem = free = "/".join(map(_safe, parts))
        while free in self._last:
            self._last[stem] += 1
            free = f"{stem}-{self._last[stem]}"
        self._last[free] = 1
        return f"{free}{self._suffix}"


def _safe(part: str) -> str:
    printable = "".join(c if c.isprintable() and c != "\\" else "_" for c in part).lstrip(".")
    return os.fsencode(printable)[:_MAX_BYTES].decode(errors="ignore") or "_"
