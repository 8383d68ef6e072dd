"""Faults in COCO jsons, each with its kind."""

import gzip
import json
import os
from collections.abc import Callable

from tests.faults.data_set import CATEGORIES, LFS_POINTER, Fault, registry

FAULTS: list[Fault] = []
fault = registry(FAULTS)


# --- the file ---


@fault("file-unreadable")
def no_json(data):
    data.json_path.symlink_to("nowhere.json")
    return ["No such file"]


@fault("file-unreadable")
def pipe_in_place_of_the_json(data):
    os.mkfifo(data.json_path)
    return ["it is a pipe"]


def written(name: str, kind: str, change: Callable[[bytes], bytes], *words: str) -> None:
    """Adds a fault that changes the json's bytes by `change`."""

    def spoil(data):
        data.content = change(json.dumps(data.document).encode())
        return [word.replace("{}", str(len(data.content))) for word in words]

    fault(kind, name)(spoil)


written("truncated_json", "file-truncated", lambda sound: sound[:-300], "it ends after {} bytes")
written("empty_json", "file-empty", lambda sound: b"", "it has 0 bytes")
written("json_with_a_comma_too_many", "json-malformed", lambda sound: sound.replace(b"}", b",}", 1), ",}")
written("lfs_pointer_in_place_of_the_json", "file-lfs-pointer", lambda sound: LFS_POINTER)
written("gzipped_json", "file-gzip", gzip.compress, "it has {} bytes and begins with 1f 8b")
written("json_in_utf_16", "json-utf-16", lambda sound: sound.decode().encode("utf-16"), "UTF-8", "ff fe")
written("jsons_merged", "repeated-key", lambda sound: b'{"images": [], ' + sound[1:], "2 lists `images`")
LARGE = b'id": 5000000018,'
written("large_image_id", "large-id", lambda sound: sound.replace(b'id": 18,', LARGE), "image 5000000018")


# --- one value ---


def valued(name: str, kind: str, record: str, key: str, value, *words: str) -> None:
    """Adds a fault that sets a key of the record to `value`, or removes the key if `value` is `...`."""

    def spoil(data):
        victims = {"image": data.image, "annotation": data.annotation, "json": data.document}
        victim = victims.get(record) or data.document["categories"][1]
        named = [f"{record} {victim['id']}"] if record in ("image", "annotation") and key != "id" else []
        if value is ...:
            del victim[key]
        else:
            victim[key] = value
        return [*named, *words]

    fault(kind, name)(spoil)


valued("image_without_height", "missing-key", "image", "height", ..., "has no height")
valued("annotation_without_category_id", "missing-key", "annotation", "category_id", ..., "no category_id")

valued("image_id_twice", "repeated-image-id", "image", "id", 11, "image 11 is given 2 times: '000.jpg', ")
valued("height_that_is_true", "wrong-type", "image", "height", True, "has height True")

valued("annotation_id_twice", "repeated-annotation-id", "annotation", "id", 101, "annotation 101 is given 2 ")
valued("unknown_image", "unknown-image", "annotation", "image_id", 4711, "has image_id 4711, which no image")
valued("unknown_category", "unknown-category", "annotation", "category_id", 77, "has category_id 77, which")
valued("crowd", "crowd", "annotation", "iscrowd", 1)


def boxed(name: str, kind: str, box: list, *words: str) -> None:
    valued(name, kind, "annotation", "bbox", box, "(image ", *words)


boxed("box_of_three_numbers", "box-length", [1, 2, 3], "has bbox [1, 2, 3]")
boxed("box_with_nan", "box-not-finite", [1, float("nan"), 3, 4], "[1, nan, 3, 4]")
boxed("box_of_negative_width", "box-negative", [20, 10, -8, 5], "-8.0, 5.0]")
boxed("box_of_width_0", "box-empty", [20, 10, 0, 5], "[20.0, 10.0, 0.0, 5.0] in ")
boxed("box_over_the_right_edge", "box-outside", [30, 1, 60, 9], " 60.0, 9.0]")

valued("category_id_twice", "bad-category", "category", "id", 2, "category id 2 is given twice: 'cat'")
valued("category_order", "category-order", "json", "categories", CATEGORIES[::-1], "category 9 ('cow')")


# --- all annotations ---


def all_boxes(name: str, kind: str, change: Callable[[list], list], *words: str) -> None:
    """`change` converts all boxes."""

    def spoil(data):
        for annotation in data.document["annotations"]:
            annotation["bbox"] = change(annotation["bbox"])
        return ["annotation 101 (image 11)", *words]

    fault(kind, name)(spoil)


all_boxes("boxes_as_fractions", "boxes-not-in-pixels", lambda box: [x / 80 for x in box], "40 x 72 pixels")
all_boxes("boxes_as_corners", "boxes-of-corners", lambda box: [30, 40, 40, 47], "[30.0, 40.0, 40.0, 47.0]")


@fault("image-without-boxes")
def image_without_boxes(data):
    annotations = data.document["annotations"]
    annotations[:] = [a for a in annotations if a["image_id"] != data.image["id"]]


@fault("no-boxes")
def nothing_but_crowds(data):
    for annotation in data.document["annotations"]:
        annotation["iscrowd"] = 1
    return ["each of the 12 boxes is a crowd or has no area"]
