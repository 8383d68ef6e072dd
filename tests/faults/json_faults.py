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
def missing_json(data):
    data.json_path.symlink_to("nowhere.json")
    return ["No such file"]


@fault("file-unreadable")
def pipe_as_json(data):
    os.mkfifo(data.json_path)
    return ["it is a pipe"]


def file_fault(name: str, kind: str, change: Callable[[bytes], bytes], *texts: str) -> None:
    """Adds a fault that changes the json's bytes by `change`. {} in a text is the new number of bytes."""

    @fault(kind, name)
    def damage(data):
        data.content = change(json.dumps(data.document).encode())
        return [text.replace("{}", str(len(data.content))) for text in texts]


LARGE = b'id": 5000000018,'
file_fault("truncated_json", "file-truncated", lambda text: text[:-300], "it ends after {} bytes")
file_fault("empty_json", "file-empty", lambda text: b"", "it has 0 bytes")
file_fault("superfluous_comma", "json-malformed", lambda text: text.replace(b"}", b",}", 1), ",}")
file_fault("lfs_pointer_as_json", "file-lfs-pointer", lambda text: LFS_POINTER)
file_fault("gzipped_json", "file-gzip", gzip.compress, "it has {} bytes and begins with 1f 8b")
file_fault("utf_16", "json-utf-16", lambda text: text.decode().encode("utf-16"), "UTF-8", "ff fe")
file_fault("merged_jsons", "repeated-key", lambda text: b'{"images": [], ' + text[1:], "2 lists `images`")
file_fault("large_image_id", "large-id", lambda text: text.replace(b'id": 18,', LARGE), "image 5000000018")


# --- one value ---


def value_fault(name: str, kind: str, record: str, key: str, value, *texts: str) -> None:
    """Adds a fault that sets a key of the record to `value`, or removes the key if `value` is `...`."""

    @fault(kind, name)
    def damage(data):
        records = {"image": data.image, "annotation": data.annotation, "json": data.document}
        records["category"] = data.document["categories"][1]
        entry = records[record]
        is_named = record in ("image", "annotation") and key != "id"
        if value is ...:
            del entry[key]
        else:
            entry[key] = value
        return [*([f"{record} {entry['id']}"] if is_named else []), *texts]


value_fault("no_height", "missing-key", "image", "height", ..., "has no height")
value_fault("no_category_id", "missing-key", "annotation", "category_id", ..., "no category_id")
value_fault(
    "repeated_image_id", "repeated-image-id", "image", "id", 11, "image 11 is given 2 times: '000.jpg', "
)
value_fault("boolean_height", "wrong-type", "image", "height", True, "has height True")
value_fault("repeated_id", "repeated-annotation-id", "annotation", "id", 101, "annotation 101 is given 2 ")
value_fault("unknown_image", "unknown-image", "annotation", "image_id", 4711, "image_id 4711, which no image")
value_fault("unknown_category", "unknown-category", "annotation", "category_id", 77, "category_id 77, which")
value_fault("crowd", "crowd", "annotation", "iscrowd", 1)
value_fault("repeated_category", "bad-category", "category", "id", 2, "category id 2 is given twice: 'cat'")
value_fault("category_order", "category-order", "json", "categories", CATEGORIES[::-1], "category 9 ('cow')")


def box_fault(name: str, kind: str, box: list, *texts: str) -> None:
    value_fault(name, kind, "annotation", "bbox", box, "(image ", *texts)


box_fault("box_of_three_numbers", "box-length", [1, 2, 3], "has bbox [1, 2, 3]")
box_fault("box_with_nan", "box-not-finite", [1, float("nan"), 3, 4], "[1, nan, 3, 4]")
box_fault("box_of_negative_width", "box-negative", [20, 10, -8, 5], "-8.0, 5.0]")
box_fault("box_of_width_0", "box-empty", [20, 10, 0, 5], "[20.0, 10.0, 0.0, 5.0] in ")
box_fault("box_over_the_right_edge", "box-outside", [30, 1, 60, 9], " 60.0, 9.0]")


# --- all annotations ---


def all_boxes_fault(name: str, kind: str, change: Callable[[list], list], *texts: str) -> None:
    """Adds a fault that changes all boxes by `change`."""

    @fault(kind, name)
    def damage(data):
        for annotation in data.document["annotations"]:
            annotation["bbox"] = change(annotation["bbox"])
        return ["annotation 101 (image 11)", *texts]


all_boxes_fault("fractions", "boxes-not-in-pixels", lambda box: [x / 80 for x in box], "40 x 72 pixels")
all_boxes_fault("corners", "boxes-of-corners", lambda box: [30, 40, 40, 47], "[30.0, 40.0, 40.0, 47.0]")


@fault("image-without-boxes")
def image_without_boxes(data):
    annotations = data.document["annotations"]
    annotations[:] = [a for a in annotations if a["image_id"] != data.image["id"]]


@fault("no-boxes")
def only_crowds(data):
    for annotation in data.document["annotations"]:
        annotation["iscrowd"] = 1
    return ["each of the 12 boxes is a crowd or has no area"]
