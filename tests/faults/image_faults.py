"""Faults in image files, each with its kind."""

import io
import os
import struct
from collections.abc import Callable

import numpy as np
import PIL.Image

from tests.common.image_variants import chunk, early_end, pillow
from tests.faults.data_set import LFS_POINTER, Fault, registry

FAULTS: list[Fault] = []
fault = registry(FAULTS)
AVIF = b"\0\0\0\x20ftypavif\0\0\0\0avifmif1" + bytes(500)


def file_fault(name: str, kind: str, change: Callable[[bytes], bytes], *texts: str) -> None:
    """Adds a fault that changes the bytes of the image by `change`."""

    @fault(kind, name)
    def damage(data):
        data.file.write_bytes(change(data.file.read_bytes()))
        data.options["decode"] = kind == "image-damaged"
        return [data.damaged_name, *texts]


def to_png(jpeg: bytes) -> bytes:
    return pillow("PNG", np.asarray(PIL.Image.open(io.BytesIO(jpeg))))


file_fault("empty_file", "image-empty", lambda jpeg: b"")
file_fault("text_file", "not-an-image", lambda jpeg: b"404: not found\n" * 20, "begins with b'404: not")
file_fault("avif", "unsupported-format", lambda jpeg: AVIF, "AVIF")
file_fault("lfs_pointer_as_image", "image-lfs-pointer", lambda jpeg: LFS_POINTER)
file_fault("png_named_jpg", "wrong-extension", to_png, "PNG")
file_fault("truncated_jpeg", "image-truncated", lambda jpeg: jpeg[: len(jpeg) * 2 // 3])
file_fault("damaged_scan", "image-damaged", early_end)


@fault("image-missing")
def missing_file(data):
    data.file.unlink()


@fault("image-not-a-file")
def pipe_as_image(data):
    data.file.unlink()
    os.mkfifo(data.file)
    return [data.damaged_name, "a pipe"]


@fault("image-size-differs")
def wrong_width_in_json(data):
    data.image["width"] += 1
    return [data.damaged_name, f"the annotations have {data.image['width']} x {data.image['height']}"]


@fault("exif-turn")
def exif_turn_with_stored_size_in_json(data):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.open(data.file).save(data.file, exif=exif)
    return [data.damaged_name, "has EXIF orientation 6"]


@fault("image-turned")
def exif_turn_with_turned_size_in_json(data):
    data.image = data.document["images"][1]
    exif_turn_with_stored_size_in_json(data)
    data.image |= {"width": 67, "height": 48}


@fault("image-12-bit")
def twelve_bits_in_sixteen(data):
    shape = data.image["height"], data.image["width"]
    data.file.unlink()
    data.image["file_name"] = "scan.png"
    PIL.Image.fromarray(data.random.integers(0, 4096, shape, np.uint16)).save(data.file)


@fault("path-leaves-directory")
def path_above_images_directory(data):
    data.image["file_name"] = "../images/../../secret.jpg"


@fault("image-too-large")
def decompression_bomb(data):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 15_000, 1, 0, 0, 0, 0))
    data.file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    return [data.damaged_name, "20000 x 15000 pixels are 300 megapixels, the limit is 100"]


@fault("no-image-directory")
def missing_image_directory(data):
    data.images_dir.rename(data.directory / "pictures")
    return [str(data.images_dir)]


@fault("no-images")
def only_empty_images_to_skip(data):
    for file in data.images_dir.iterdir():
        file.write_bytes(b"")
    data.options["on_bad_image"] = "skip"
    return ["all 6 images are skipped"]


@fault("repeated-file")
def two_images_with_one_file(data):
    first, second = data.document["images"][:2]
    second |= first | {"id": second["id"]}
    return ["file '000.jpg' is given 2 times: image 11 ('000.jpg'), image 18 ('000.jpg')"]
