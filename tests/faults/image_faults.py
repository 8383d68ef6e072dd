"""Faults in image files, each with the kind in the report."""

import io
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import PIL.Image

from common.data.check.images import ImagePolicy
from tests.common.image_variants import chunk, early_end, pillow
from tests.faults.data_set import LFS_POINTER, DataSet


class Fault(NamedTuple):
    """`damage` damages an image of a data set. `text` is in the report, after the image's name."""

    name: str
    kind: str
    damage: Callable[[DataSet], None]
    text: str

    @property
    def policy(self) -> ImagePolicy:
        return ImagePolicy(decode=self.kind == "image-damaged")


FAULTS: list[Fault] = []


def fault(kind: str, text: str = ""):
    """A decorator that adds the function to FAULTS."""

    def register(damage: Callable[[DataSet], None]):
        FAULTS.append(Fault(damage.__name__, kind, damage, text))
        return damage

    return register


def file_fault(name: str, kind: str, change: Callable[[bytes], bytes], text: str = "") -> None:
    """Adds a fault that changes the bytes of the image by `change`."""

    def damage(data: DataSet) -> None:
        data.file.write_bytes(change(data.file.read_bytes()))

    FAULTS.append(Fault(name, kind, damage, text))


def to_png(jpeg: bytes) -> bytes:
    return pillow("PNG", np.asarray(PIL.Image.open(io.BytesIO(jpeg))))


AVIF = b"\0\0\0\x20ftypavif\0\0\0\0avifmif1" + bytes(500)
file_fault("empty_file", "image-empty", lambda jpeg: b"")
file_fault("text_file", "not-an-image", lambda jpeg: b"404: not found\n" * 20, "begins with b'404: not")
file_fault("avif", "unsupported-format", lambda jpeg: AVIF, "AVIF")
file_fault("lfs_pointer", "image-lfs-pointer", lambda jpeg: LFS_POINTER)
file_fault("png_named_jpg", "wrong-extension", to_png, "PNG")
file_fault("truncated_jpeg", "image-truncated", lambda jpeg: jpeg[: len(jpeg) * 2 // 3])
file_fault("damaged_scan", "image-damaged", early_end)


@fault("image-missing")
def missing_file(data):
    data.file.unlink()


@fault("image-not-a-file", "a pipe")
def pipe(data):
    data.file.unlink()
    os.mkfifo(data.file)


@fault("image-size-differs", "the annotations have 1234 x ")
def wrong_width_in_json(data):
    data.image["width"] = 1234


@fault("exif-turn", "has EXIF orientation 6")
def exif_turn_with_stored_size_in_json(data):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.open(data.file).save(data.file, exif=exif)


@fault("image-turned")
def exif_turn_with_turned_size_in_json(data):
    exif_turn_with_stored_size_in_json(data)
    width, height = data.image["width"], data.image["height"]
    data.image |= {"width": height, "height": width}


@fault("image-12-bit")
def twelve_bits_in_sixteen(data):
    shape = data.image["height"], data.image["width"]
    data.file.unlink()
    data.image["file_name"] = "scan.png"
    PIL.Image.fromarray(data.random.integers(0, 4096, shape, np.uint16)).save(data.file)


@fault("path-leaves-directory")
def path_above_images_directory(data):
    data.image["file_name"] = "../images/../../secret.jpg"


@fault("image-too-large", "20000 x 15000 pixels are 300 megapixels, the limit is 100")
def decompression_bomb(data):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 15_000, 1, 0, 0, 0, 0))
    data.file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
