"""Faults of COCO jsons."""

import gzip
import json
import os
from collections.abc import Callable

from tests.faults.data_set import LFS_POINTER, Fault, registry

FAULTS: list[Fault] = []
fault = registry(FAULTS)


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
