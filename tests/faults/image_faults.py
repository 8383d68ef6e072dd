"""Faults of image files."""

import io
import os
import struct
from collections.abc import Callable

import numpy as np
import PIL.Image

from tests.common.image_variants import chunk
from tests.faults.data_set import LFS_POINTER, Fault, registry

FAULTS: list[Fault] = []
fault = registry(FAULTS)


def replaced(name: str, kind: str, content: bytes, *words: str) -> None:
    """A fault: other bytes in place of the image's."""

    def spoil(data):
        data.file.write_bytes(content)
        return [*data.words, *words]

    fault(kind, name)(spoil)


replaced("empty_file", "image-empty", b"")
replaced("text_file", "not-an-image", b"404: not found\n" * 20, "begins with b'404: not")
replaced("zeros", "not-an-image", bytes(5000))
replaced("avif", "unsupported-format", b"\0\0\0\x20ftypavif\0\0\0\0avifmif1" + bytes(500), "AVIF")
replaced("heic", "unsupported-format", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(500), "HEIF")
replaced("lfs_pointer_in_place_of_an_image", "image-lfs-pointer", LFS_POINTER)


def saved(name: str, kind: str, image_format: str, change: Callable = bytes, **options) -> None:
    """A fault: the image in another format under its old name, and its bytes changed. Damage is decoded."""

    def spoil(data):
        stream = io.BytesIO()
        PIL.Image.open(data.file).save(stream, image_format, **options)
        data.file.write_bytes(change(stream.getvalue()))
        data.options["decode"] = kind == "image-damaged"
        return [*data.words, "" if change in (cut, early_end) else image_format]

    fault(kind, name)(spoil)


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def early_end(jpeg: bytes) -> bytes:
    middle = len(jpeg) * 2 // 3
    return jpeg[:middle] + b"\xff\xd9" + bytes(58) + jpeg[middle + 60 :]


def flipped_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


saved("gif", "unsupported-format", "GIF")
saved("png_named_jpg", "wrong-extension", "PNG")
saved("truncated_jpeg", "image-truncated", "JPEG", cut)
saved("truncated_progressive_jpeg", "image-truncated", "JPEG", cut, progressive=True)
saved("truncated_png", "image-truncated", "PNG", cut)
saved("truncated_webp", "image-truncated", "WEBP", cut)
saved("truncated_bmp", "image-truncated", "BMP", cut)
saved("jpeg_without_its_last_byte", "image-truncated", "JPEG", lambda jpeg: jpeg[:-1])
saved("jpeg_header_only", "image-truncated", "JPEG", lambda jpeg: jpeg[: jpeg.index(b"\xff\xda") + 14])
saved("jpeg_with_a_damaged_scan", "image-damaged", "JPEG", early_end, quality=95)
saved("png_with_a_flipped_bit", "image-damaged", "PNG", flipped_bit)


@fault("image-missing")
def missing_file(data):
    data.file.unlink()


@fault("image-missing")
def dangling_link(data):
    data.file.unlink()
    data.file.symlink_to("nowhere.jpg")
    return [*data.words, "a symbolic link to nothing"]


@fault("image-not-a-file")
def pipe_in_place_of_an_image(data):
    data.file.unlink()
    os.mkfifo(data.file)
    return [*data.words, "a pipe"]


@fault("image-not-a-file")
def directory_in_place_of_an_image(data):
    data.file.unlink()
    data.file.mkdir()
    return [*data.words, "a directory"]


@fault("image-size-differs")
def width_in_the_json_is_not_the_files(data):
    data.image["width"] += 1
    return [*data.words, f"the annotations say {data.image['width']} x {data.image['height']}"]


def swap_sides(image: dict) -> None:
    image["width"], image["height"] = image["height"], image["width"]


@fault("image-size-differs")
def width_and_height_swapped(data):
    data.image = data.document["images"][1]
    swap_sides(data.image)
    return [*data.words, "is 48 x 67 pixels, the annotations say 67 x 48"]


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
    swap_sides(data.image)


@fault("image-12-bit")
def twelve_bits_in_sixteen(data):
    shape = data.image["height"], data.image["width"]
    data.file.unlink()
    data.image["file_name"] = "scan.png"
    PIL.Image.fromarray(data.random.integers(0, 4096, shape, np.uint16)).save(data.file)


for _name, _path in (("path_above_the_images", "../images/../../secret.jpg"), ("absolute_path", "/a.jpg")):

    @fault("path-leaves-directory", _name)
    def named(data, path=_path):
        data.image["file_name"] = path


@fault("image-too-large")
def decompression_bomb(data):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 15_000, 1, 0, 0, 0, 0))
    data.file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    return [*data.words, "20000 x 15000 pixels are 300 megapixels, the limit is 100"]


@fault("image-too-large")
def over_a_lower_limit(data):
    data.image = data.document["images"][1]  # 48 x 67; the others have fewer pixels than 0.0033 megapixels
    data.options["max_megapixels"] = 0.003
    return [*data.words, "48 x 67 pixels"]


@fault("no-image-directory")
def no_image_directory(data):
    data.images_dir.rename(data.directory / "pictures")
    return [str(data.images_dir)]


@fault("no-images")
def no_image_can_be_read(data):
    for file in data.images_dir.iterdir():
        file.write_bytes(b"")
    data.options["on_bad_image"] = "skip"
    return ["all 6 are left out"]


@fault("repeated-file")
def two_images_of_one_file(data):
    first, second = data.document["images"][:2]
    second |= first | {"id": second["id"]}
    return ["file '000.jpg' is given 2 times: image 11 ('000.jpg'), image 18 ('000.jpg')"]
