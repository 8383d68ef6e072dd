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


def rewritten(name: str, kind: str, change: Callable[[bytes], bytes], *words: str) -> None:
    """`change` replaces the bytes of the image."""

    def spoil(data):
        data.file.write_bytes(change(data.file.read_bytes()))
        data.options["decode"] = kind == "image-damaged"
        return [*data.words, *words]

    fault(kind, name)(spoil)


def as_png(jpeg: bytes) -> bytes:
    return pillow("PNG", np.asarray(PIL.Image.open(io.BytesIO(jpeg))))


rewritten("empty_file", "image-empty", lambda jpeg: b"")
rewritten("text_file", "not-an-image", lambda jpeg: b"404: not found\n" * 20, "begins with b'404: not")
rewritten("avif", "unsupported-format", lambda jpeg: AVIF, "AVIF")
rewritten("lfs_pointer_in_place_of_an_image", "image-lfs-pointer", lambda jpeg: LFS_POINTER)
rewritten("png_named_jpg", "wrong-extension", as_png, "PNG")
rewritten("truncated_jpeg", "image-truncated", lambda jpeg: jpeg[: len(jpeg) * 2 // 3])
rewritten("jpeg_with_a_damaged_scan", "image-damaged", early_end)


@fault("image-missing")
def missing_file(data):
    data.file.unlink()


@fault("image-not-a-file")
def pipe_in_place_of_an_image(data):
    data.file.unlink()
    os.mkfifo(data.file)
    return [*data.words, "a pipe"]


@fault("image-size-differs")
def width_in_the_json_is_not_the_files(data):
    data.image["width"] += 1
    return [*data.words, f"the annotations have {data.image['width']} x {data.image['height']}"]


@fault("exif-turn")
def exif_turn_with_the_stored_size(data):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.open(data.file).save(data.file, exif=exif)
    return [*data.words, "has EXIF orientation 6"]


@fault("image-turned")
def size_after_the_exif_turn(data):
    data.image = data.document["images"][1]
    exif_turn_with_the_stored_size(data)
    data.image |= {"width": 67, "height": 48}


@fault("image-12-bit")
def twelve_bits_in_sixteen(data):
    shape = data.image["height"], data.image["width"]
    data.file.unlink()
    data.image["file_name"] = "scan.png"
    PIL.Image.fromarray(data.random.integers(0, 4096, shape, np.uint16)).save(data.file)


@fault("path-leaves-directory")
def path_above_the_images(data):
    data.image["file_name"] = "../images/../../secret.jpg"


@fault("image-too-large")
def decompression_bomb(data):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 15_000, 1, 0, 0, 0, 0))
    data.file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    return [*data.words, "20000 x 15000 pixels are 300 megapixels, the limit is 100"]


@fault("no-image-directory")
def no_image_directory(data):
    data.images_dir.rename(data.directory / "pictures")
    return [str(data.images_dir)]


@fault("no-images")
def no_image_can_be_read(data):
    for file in data.images_dir.iterdir():
        file.write_bytes(b"")
    data.options["on_bad_image"] = "skip"
    return ["all 6 images are skipped"]


@fault("repeated-file")
def two_images_of_one_file(data):
    first, second = data.document["images"][:2]
    second |= first | {"id": second["id"]}
    return ["file '000.jpg' is given 2 times: image 11 ('000.jpg'), image 18 ('000.jpg')"]
