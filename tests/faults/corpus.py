"""A corpus of faulty data sets: a small sound one is drawn, and one thing in it goes wrong, chosen by a seed.

Each fault is a function under `@fault(kind)`: it spoils a `DataSet` and returns what the report must say, at
least: the id of the offender and the value or the file.
"""

import dataclasses
import gzip
import io
import json
import os
import pathlib
import zlib
from collections.abc import Callable

import numpy as np
import PIL.Image

from common.findings import KINDS

NUM_IMAGES = 6
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 84977953\n"


class DataSet:
    """A sound COCO data set to be spoilt: six images, boxes within them, ids with gaps.

    Attributes:
        directory: it has images/ and, once written, instances.json.
        random: seeded; chooses the victims.
        document: the json to be.
        content: the bytes of the json where they are not those of `document`.
        image, annotation: the victims.
        options: of the check, `decode` and others.
    """

    def __init__(self, directory: pathlib.Path, seed: int):
        self.directory = directory
        self.random = np.random.default_rng(seed)
        self.content: bytes | None = None
        self.options: dict = {}
        (directory / "images").mkdir(parents=True)
        images, annotations = [], []
        for i in range(NUM_IMAGES):
            width, height = (40 + 8 * i, 72 - 5 * i)
            image_id = 11 + 7 * i
            images.append({"id": image_id, "file_name": f"{i:03d}.jpg", "width": width, "height": height})
            self._draw(width, height).save(directory / "images" / f"{i:03d}.jpg", quality=95)
            for _ in range(2):
                left, top = self.random.integers(0, 20, 2).tolist()
                annotations.append(
                    {
                        "id": 101 + 3 * len(annotations),
                        "image_id": image_id,
                        "category_id": int(self.random.choice([2, 5, 9])),
                        "bbox": [left, top, 10, 12],
                        "area": 120,
                        "iscrowd": 0,
                    }
                )
        categories = [{"id": i, "name": name} for i, name in ((2, "cat"), (5, "dog"), (9, "cow"))]
        self.document = {"images": images, "annotations": annotations, "categories": categories}
        self.image = images[int(self.random.integers(NUM_IMAGES))]
        self.annotation = annotations[int(self.random.integers(len(annotations)))]

    def _draw(self, width: int, height: int) -> PIL.Image.Image:
        return PIL.Image.fromarray(self.random.integers(0, 256, (height, width, 3), np.uint8))

    @property
    def images_dir(self) -> pathlib.Path:
        return self.directory / "images"

    @property
    def json_path(self) -> pathlib.Path:
        return self.directory / "instances.json"

    @property
    def file(self) -> pathlib.Path:
        """The victim's image file."""
        return self.images_dir / self.image["file_name"]

    @property
    def image_words(self) -> list[str]:
        """How a report must name the victim."""
        return [f"image {self.image['id']}", self.image["file_name"]]

    def name_of(self, annotation: dict) -> str:
        return f"annotation {annotation['id']}"

    def save_as(self, image_format: str, suffix: str | None = None, **options) -> bytes:
        """Writes the victim's image again in another format; returns the bytes."""
        picture = PIL.Image.open(self.file).convert("RGB")
        stream = io.BytesIO()
        picture.save(stream, image_format, **options)
        self.file.unlink()
        if suffix:
            self.image["file_name"] = f"{self.file.stem}{suffix}"
        self.file.write_bytes(stream.getvalue())
        return stream.getvalue()

    def write(self) -> None:
        """Writes the json, where no fault has put something else in its place."""
        if not self.json_path.exists() and not self.json_path.is_symlink() and self.content != b"absent":
            self.json_path.write_bytes(
                json.dumps(self.document).encode() if self.content is None else self.content
            )


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: its name, the kind that the report must give it, and how it is made."""

    name: str
    kind: str
    spoil: Callable[[DataSet], list[str]]

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())


FAULTS: list[Fault] = []


def fault(kind: str):
    assert kind in KINDS, kind

    def register(spoil: Callable[[DataSet], list[str]]):
        FAULTS.append(Fault(spoil.__name__, kind, spoil))
        return spoil

    return register


# --- image files ---


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


# --- the json ---


@fault("json-truncated")
def truncated_json(data):
    content = json.dumps(data.document).encode()
    data.content = content[: int(len(content) * data.random.uniform(0.1, 0.95))]
    return [f"{len(data.content)}"]


@fault("json-truncated")
def json_without_its_last_bracket(data):
    data.content = json.dumps(data.document).encode()[:-1]
    return [f"{len(data.content)}"]


@fault("json-empty")
def empty_json(data):
    data.content = b""
    return []


@fault("json-malformed")
def json_with_a_comma_too_many(data):
    content = json.dumps(data.document).encode()
    data.content = content.replace(b'"iscrowd": 0}', b'"iscrowd": 0,}', 1)
    return ["byte", "iscrowd"]


@fault("json-malformed")
def json_that_is_a_picture(data):
    data.content = data.file.read_bytes()
    return []


@fault("json-unreadable")
def no_json(data):
    data.content = b"absent"
    return ["No such file"]


@fault("json-not-a-file")
def pipe_in_place_of_the_json(data):
    os.mkfifo(data.json_path)
    return []


@fault("json-not-a-file")
def directory_in_place_of_the_json(data):
    data.json_path.mkdir()
    return []


@fault("json-lfs-pointer")
def lfs_pointer_in_place_of_the_json(data):
    data.content = LFS_POINTER
    return []


@fault("json-gzip")
def gzipped_json(data):
    data.content = gzip.compress(json.dumps(data.document).encode())
    return []


@fault("json-utf-16")
def json_in_utf_16(data):
    data.content = json.dumps(data.document).encode("utf-16")
    return ["UTF-8", "ff fe"]


@fault("repeated-key")
def jsons_merged_by_hand(data):
    annotations = data.document.pop("annotations")
    first, second = json.dumps(annotations[:6]), json.dumps(annotations[6:])
    rest = json.dumps(data.document)[1:]
    data.content = f'{{"annotations": {first}, "annotations": {second}, {rest}'.encode()
    return ["2 lists `annotations`"]


def _lacks(record: str, key: str, kind: str = "missing-key"):
    def spoil(data):
        victim = data.image if record == "image" else data.annotation
        del victim[key]
        return [str(victim.get("id", "")), key]

    spoil.__name__ = f"{record}_without_{key}"
    fault(kind)(spoil)


for _key in ("id", "file_name", "width", "height"):
    _lacks("image", _key)
for _key in ("image_id", "category_id", "bbox"):
    _lacks("annotation", _key)


def _lacks_list(key: str):
    def spoil(data):
        del data.document[key]
        return [key]

    spoil.__name__ = f"json_without_{key}"
    fault("missing-key")(spoil)


for _key in ("images", "annotations", "categories"):
    _lacks_list(_key)


def _wrong(record: str, key: str, value, name: str):
    def spoil(data):
        victim = data.image if record == "image" else data.annotation
        words = [] if key == "id" else [str(victim["id"])]
        victim[key] = value
        return [*words, key, str(value)]

    spoil.__name__ = name
    fault("wrong-type")(spoil)


_wrong("image", "id", "12", "image_id_as_a_string")
_wrong("image", "id", -4, "negative_image_id")
_wrong("image", "id", 1.5, "fractional_image_id")
_wrong("image", "width", 0, "image_of_width_0")
_wrong("image", "height", True, "height_that_is_true")
_wrong("image", "file_name", 7, "file_name_that_is_a_number")
_wrong("annotation", "image_id", "11", "annotation_of_an_image_id_as_a_string")
_wrong("annotation", "category_id", "cat", "category_by_name")
_wrong("annotation", "bbox", "1,2,3,4", "box_as_a_string")
_wrong("annotation", "iscrowd", 2, "iscrowd_of_2")
_wrong("annotation", "area", -5.0, "negative_area")


@fault("wrong-type")
def box_with_null(data):
    data.annotation["bbox"] = [1, None, 3, 4]
    return [data.name_of(data.annotation), "bbox"]


@fault("wrong-type")
def json_that_is_a_list(data):
    data.content = json.dumps(data.document["annotations"]).encode()
    return []


@fault("repeated-image-id")
def image_id_twice(data):
    first, second = data.document["images"][:2]
    second["id"] = first["id"]
    return [str(first["id"])]


@fault("repeated-annotation-id")
def annotation_id_twice(data):
    first, second = data.document["annotations"][:2]
    second["id"] = first["id"]
    return [str(first["id"])]


@fault("bad-category")
def category_id_twice(data):
    data.document["categories"][1]["id"] = 2
    return ["2", "cat", "dog"]


@fault("bad-category")
def category_name_twice(data):
    data.document["categories"][1]["name"] = "cat"
    return ["cat", "2", "5"]


@fault("bad-category")
def category_without_a_name(data):
    del data.document["categories"][1]["name"]
    return ["5"]


@fault("bad-category")
def category_id_as_a_string(data):
    data.document["categories"][1]["id"] = "5"
    return ["dog", "5"]


@fault("unknown-image")
def annotation_of_an_unknown_image(data):
    data.annotation["image_id"] = 4711
    return [data.name_of(data.annotation), "4711"]


@fault("unknown-category")
def annotation_of_an_unknown_category(data):
    data.annotation["category_id"] = 77
    return [data.name_of(data.annotation), "77"]


def _box(kind: str, name: str, box: Callable[[dict], list], words: Callable[[list], list[str]] | None = None):
    def spoil(data):
        image = next(i for i in data.document["images"] if i["id"] == data.annotation["image_id"])
        data.annotation["bbox"] = box(image)
        return [data.name_of(data.annotation), f"image {image['id']}"]

    spoil.__name__ = name
    fault(kind)(spoil)


_box("box-length", "box_of_three_numbers", lambda image: [1, 2, 3])
_box("box-length", "box_of_five_numbers", lambda image: [1, 2, 3, 4, 0.9])
_box("box-not-finite", "box_with_nan", lambda image: [1, float("nan"), 3, 4])
_box("box-not-finite", "infinite_box", lambda image: [1, 2, float("inf"), 4])
_box("box-negative", "box_of_negative_width", lambda image: [20, 10, -8, 5])
_box("box-negative", "box_of_negative_height", lambda image: [20, 10, 8, -0.5])
_box("box-empty", "box_of_width_0", lambda image: [20, 10, 0, 5])
_box("box-empty", "box_of_no_size", lambda image: [20, 10, 0, 0])
_box("box-outside", "box_over_the_right_edge", lambda image: [image["width"] - 4.5, 1, 9, 9])
_box("box-outside", "box_before_the_left_edge", lambda image: [-0.25, 1, 9, 9])


@fault("boxes-not-in-pixels")
def boxes_as_fractions(data):
    sizes = {image["id"]: (image["width"], image["height"]) for image in data.document["images"]}
    for annotation in data.document["annotations"]:
        width, height = sizes[annotation["image_id"]]
        left, top, *sides = annotation["bbox"]
        annotation["bbox"] = [left / width, top / height, sides[0] / width, sides[1] / height]
    first = data.document["annotations"][0]
    return [data.name_of(first), f"image {first['image_id']}", str(first["bbox"]), "40 x 72 pixels"]


@fault("boxes-of-corners")
def boxes_as_corners(data):
    sizes = {image["id"]: (image["width"], image["height"]) for image in data.document["images"]}
    for annotation in data.document["annotations"]:
        width, height = sizes[annotation["image_id"]]
        annotation["bbox"] = [width - 20, height - 15, width - 4, height - 3]
    first = data.document["annotations"][0]
    return [data.name_of(first), f"image {first['image_id']}", str([float(x) for x in first["bbox"]])]


@fault("box-empty")
def box_wholly_outside(data):
    image = next(i for i in data.document["images"] if i["id"] == data.annotation["image_id"])
    data.annotation["bbox"] = [image["width"] + 3, 2, 5, 5]
    return [data.name_of(data.annotation), f"image {image['id']}"]


@fault("large-id")
def image_id_above_2_to_the_31(data):
    before = data.image["id"]
    data.image["id"] = 5_000_000_000
    for annotation in data.document["annotations"]:
        if annotation["image_id"] == before:
            annotation["image_id"] = 5_000_000_000
    return ["image 5000000000"]


@fault("large-id")
def category_id_above_2_to_the_31(data):
    data.document["categories"][2]["id"] = 6_000_000_000
    for annotation in data.document["annotations"]:
        if annotation["category_id"] == 9:
            annotation["category_id"] = 6_000_000_000
    return ["category 6000000000", "cow"]


@fault("category-order")
def categories_out_of_order(data):
    data.document["categories"].reverse()
    return ["9", "2"]


@fault("crowd")
def crowd(data):
    data.annotation["iscrowd"] = 1
    return [data.name_of(data.annotation)]


@fault("image-without-boxes")
def image_without_boxes(data):
    annotations = data.document["annotations"]
    annotations[:] = [a for a in annotations if a["image_id"] != data.image["id"]]
    return data.image_words


@fault("no-images")
def no_images(data):
    data.document |= {"images": [], "annotations": []}
    return []


@fault("no-boxes")
def no_annotations(data):
    data.document["annotations"] = []
    return []


@fault("no-boxes")
def nothing_but_crowds(data):
    for annotation in data.document["annotations"]:
        annotation["iscrowd"] = 1
    return []


# --- several at once: each must be reported ---

TOGETHER = (
    "text_file",
    "annotation_of_an_image_id_as_a_string",
    "box_of_negative_width",
    "category_name_twice",
)
