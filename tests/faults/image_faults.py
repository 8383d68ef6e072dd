"""Faults of image files."""

import os

import numpy as np
import PIL.Image

from tests.faults.data_set import LFS_POINTER, Fault, registry

FAULTS: list[Fault] = []
fault = registry(FAULTS)


@fault("image-missing")
def missing_file(data):
    data.file.unlink()
    return data.image_words


@fault("image-missing")
def dangling_link(data):
    data.file.unlink()
    data.file.symlink_to("nowhere.jpg")
    return data.image_words


@fault("image-empty")
def empty_file(data):
    data.file.write_bytes(b"")
    return data.image_words


@fault("not-an-image")
def text_file(data):
    data.file.write_text("404: not found\n" * 20)
    return data.image_words


@fault("not-an-image")
def random_bytes(data):
    data.file.write_bytes(b"\x00" + data.random.bytes(5000))
    return data.image_words


@fault("unsupported-format")
def gif(data):
    data.save_as("GIF")
    return [*data.image_words, "GIF"]


@fault("unsupported-format")
def avif(data):
    data.file.write_bytes(
        b"\x00\x00\x00\x20ftypavif\x00\x00\x00\x00avifmif1miafMA1A" + data.random.bytes(500)
    )
    return [*data.image_words, "AVIF"]


@fault("unsupported-format")
def heic(data):
    data.file.write_bytes(b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + data.random.bytes(500))
    return [*data.image_words, "HE"]


def _cut(data, image_format: str, suffix: str, **options) -> list[str]:
    content = data.save_as(image_format, suffix, **options)
    data.file.write_bytes(content[: int(len(content) * data.random.uniform(0.4, 0.95))])
    return data.image_words


@fault("image-truncated")
def truncated_jpeg(data):
    return _cut(data, "JPEG", ".jpg")


@fault("image-truncated")
def truncated_progressive_jpeg(data):
    return _cut(data, "JPEG", ".jpg", progressive=True)


@fault("image-truncated")
def truncated_png(data):
    return _cut(data, "PNG", ".png")


@fault("image-truncated")
def truncated_webp(data):
    return _cut(data, "WEBP", ".webp")


@fault("image-truncated")
def truncated_bmp(data):
    return _cut(data, "BMP", ".bmp")


@fault("image-truncated")
def jpeg_without_its_last_byte(data):
    data.file.write_bytes(data.file.read_bytes()[:-1])
    return data.image_words


@fault("image-truncated")
def jpeg_header_only(data):
    content = data.file.read_bytes()
    start_of_scan = content.index(b"\xff\xda")
    data.file.write_bytes(content[: start_of_scan + 14])
    return data.image_words


@fault("image-damaged")
def jpeg_with_a_damaged_scan(data):
    content = bytearray(data.save_as("JPEG", ".jpg", quality=95))
    middle = len(content) * 2 // 3
    content[middle : middle + 60] = b"\xff\xd9" + bytes(58)  # the end, too early
    data.file.write_bytes(content)
    data.options["decode"] = True
    return data.image_words


@fault("image-damaged")
def png_with_a_flipped_bit(data):
    content = bytearray(data.save_as("PNG", ".png"))
    content[len(content) // 2] ^= 4
    data.file.write_bytes(content)
    data.options["decode"] = True
    return data.image_words


@fault("wrong-extension")
def png_named_jpg(data):
    data.save_as("PNG")
    return [*data.image_words, "PNG"]


@fault("image-size-differs")
def size_in_the_json_is_not_the_files(data):
    said = f"{data.image['width'] + 1} x {data.image['height']}"
    data.image["width"] += 1
    return [*data.image_words, said]


@fault("image-size-differs")
def width_and_height_swapped(data):
    image = data.image = data.document["images"][1]
    image["width"], image["height"] = image["height"], image["width"]
    return [*data.image_words, f"{image['width']} x {image['height']}"]


def _turn(data) -> None:
    picture = PIL.Image.open(data.file).convert("RGB")
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    picture.save(data.file, exif=exif, quality=95)


@fault("image-turned")
def size_after_the_exif_turn(data):
    image = data.image = data.document["images"][int(data.random.integers(3))]
    _turn(data)
    image["width"], image["height"] = image["height"], image["width"]
    return data.image_words


@fault("exif-turn")
def exif_turn_with_the_stored_size(data):
    _turn(data)
    return data.image_words


@fault("image-12-bit")
def twelve_bits_in_sixteen(data):
    width, height = data.image["width"], data.image["height"]
    values = data.random.integers(0, 4096, (height, width)).astype(np.uint16)
    data.file.unlink()
    data.image["file_name"] = "scan.png"
    PIL.Image.fromarray(values).save(data.file)
    return data.image_words


@fault("image-not-a-file")
def pipe_in_place_of_an_image(data):
    data.file.unlink()
    os.mkfifo(data.file)
    return data.image_words


@fault("image-not-a-file")
def directory_in_place_of_an_image(data):
    data.file.unlink()
    data.file.mkdir()
    return data.image_words


@fault("path-leaves-directory")
def path_above_the_image_directory(data):
    data.image["file_name"] = "../images/../../secret.jpg"
    return [f"image {data.image['id']}", "../images/../../secret.jpg"]


@fault("path-leaves-directory")
def absolute_path(data):
    data.image["file_name"] = "/etc/passwd"
    return [f"image {data.image['id']}", "/etc/passwd"]


@fault("image-too-large")
def decompression_bomb(data):
    data.file.unlink()
    data.image |= {"file_name": "bomb.png", "width": 20_000, "height": 15_000}
    PIL.Image.new("1", (20_000, 15_000)).save(data.file)
    assert data.file.stat().st_size < 100_000
    return [*data.image_words, "20000 x 15000", "300"]


@fault("image-too-large")
def over_a_lower_limit(data):
    data.image = data.document["images"][1]
    data.options["max_megapixels"] = 0.003
    return [*data.image_words, f"{data.image['width']} x {data.image['height']}"]


@fault("image-lfs-pointer")
def lfs_pointer_in_place_of_an_image(data):
    data.file.write_bytes(LFS_POINTER)
    return data.image_words


@fault("no-image-directory")
def no_image_directory(data):
    data.images_dir.rename(data.directory / "pictures")
    return [str(data.images_dir)]


@fault("no-images")
def no_image_can_be_read(data):
    for file in data.images_dir.iterdir():
        file.write_bytes(b"")
    data.options["on_bad_image"] = "skip"
    return ["6"]


@fault("repeated-file")
def two_images_of_one_file(data):
    first, second = data.document["images"][:2]
    second |= {"file_name": first["file_name"], "width": first["width"], "height": first["height"]}
    return [first["file_name"], str(first["id"]), str(second["id"])]
