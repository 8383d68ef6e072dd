"""Small exports of annotation tools as trees of dicts, lists and values, which a test can change.

All have five images of 40 x 20 pixels with two boxes each. exports.py in tests/tools/conversion has the exact
text of each tool.
"""

import collections
import copy
import csv
import io
import json
import pathlib
from xml.etree import ElementTree

import PIL.Image

from common.data import tfrecord
from tests.tools.conversion import exports
from tools.conversion.coco_to_tfrecord import serialized

NAMES = ("cat", "dog", "emu")
STEMS = [f"{letter}{i}" for i, letter in enumerate("abcde", 1)]
# (number of the image, name, left, top, right, bottom); each image has two boxes.
BOXES = [
    (i, NAMES[(i + j) % 3], 2 + i + 15 * j, 1 + i, 10 + i + 16 * j, 7 + i + j)
    for i in range(len(STEMS))
    for j in range(2)
]


def coco(root=(), prefix="", **extra):
    """`extra` are the keys of annotations of one tool, and `root` are categories without boxes."""
    names = [f"{prefix}{stem}.png" for stem in STEMS]
    categories = [{"id": i, "name": name, "supercategory": "pets"} for i, name in enumerate(NAMES, 1)]
    images = [{"id": i, "file_name": name, "width": 40, "height": 20} for i, name in enumerate(names)]
    boxes = [
        {"id": number, "image_id": i, "category_id": NAMES.index(name) + 1, "segmentation": []}
        | {"bbox": [x, y, r - x, b - y], "area": (r - x) * (b - y), "iscrowd": 0}
        | copy.deepcopy(extra)
        for number, (i, name, x, y, r, b) in enumerate(BOXES, 1)
    ]
    return {"in.json": {"images": images, "annotations": boxes, "categories": [*root, *categories]}}


def coco_of_cvat():
    """cvat-ai/datumaro, plugins/data_formats/coco/exporter.py."""
    return coco(attributes={"occluded": False, "rotation": 0.0})


def coco_of_label_studio():
    """HumanSignal/label-studio-converter, converter.py, convert_to_coco."""
    return coco(prefix="images/", ignore=0)


def coco_of_roboflow():
    return coco(root=[{"id": 0, "name": "pets", "supercategory": "none"}])


def node(tag, text="", parts=(), **attributes):
    return {"tag": tag, "attributes": attributes, "text": str(text), "parts": [*parts]}


def voc():
    files = {}
    for i, stem in enumerate(STEMS):
        size = node("size", parts=[node("width", 40), node("height", 20), node("depth", 3)])
        parts = [node("folder", "x"), node("filename", f"{stem}.png"), size]
        for _, name, x, y, r, b in BOXES[2 * i : 2 * i + 2]:
            sides = [node("xmin", x + 1), node("ymin", y + 1), node("xmax", r), node("ymax", b)]
            box = [node("name", name), node("difficult", 0), node("bndbox", parts=sides)]
            parts.append(node("object", parts=box))
        files[f"Annotations/{stem}.xml"] = node("annotation", parts=parts)
    return files


def cvat():
    labels = [node("label", parts=[node("name", name)]) for name in NAMES]
    meta = node("meta", parts=[node("task", parts=[node("labels", parts=labels)])])
    images = []
    for i, stem in enumerate(STEMS):
        boxes = [
            node("box", label=name, source="manual", occluded="0", xtl=x, ytl=y, xbr=r, ybr=b, z_order="0")
            for _, name, x, y, r, b in BOXES[2 * i : 2 * i + 2]
        ]
        images.append(node("image", "", boxes, id=str(i), name=f"{stem}.png", width="40", height="20"))
    return {"in.xml": node("annotations", parts=[meta, *images])}


def labelme():
    files = {}
    for i, stem in enumerate(STEMS):
        shapes = [(box[1], "rectangle", [box[2:4], box[4:]]) for box in BOXES[2 * i : 2 * i + 2]]
        files[f"images/{stem}.json"] = json.loads(exports.labelme_json(f"{stem}.png", shapes))
    return files


def yolo():
    files = {"data.yaml": [["path:", "."], ["train:", "images"], ["names:", "[cat,", "dog,", "emu]"]]}
    for i, stem in enumerate(STEMS):
        files[f"labels/{stem}.txt"] = [
            [NAMES.index(name), (x + r) / 80, (y + b) / 40, (r - x) / 40, (b - y) / 20]
            for _, name, x, y, r, b in BOXES[2 * i : 2 * i + 2]
        ]
    return files


def tensorflow_csv():
    titles = ["filename", "width", "height", "class", "xmin", "ymin", "xmax", "ymax"]
    return {"in.csv": [titles, *([f"{STEMS[i]}.png", 40, 20, *box] for i, *box in BOXES)]}


def openimages_csv():
    rows = [
        [STEMS[i], "xclick", name, 1, x / 40, r / 40, y / 20, b / 20, *"01000"]
        for i, name, x, y, r, b in BOXES
    ]
    return {"in.csv": [exports.OPENIMAGES_TITLES.split(","), *rows]}


def records():
    """One record for each image, in the schema of TensorFlow Object Detection."""
    rows = []
    for i, stem in enumerate(STEMS):
        boxes = BOXES[2 * i : 2 * i + 2]
        columns = zip(*((x / 40, y / 20, r / 40, b / 20) for *_, x, y, r, b in boxes), strict=True)
        row = {"image/encoded": [encoded(i)], "image/height": [20], "image/width": [40]}
        row |= {"image/source_id": [str(i)], "image/filename": [f"{stem}.png"]}
        row |= {tfrecord.TEXT_KEY: [box[1] for box in boxes]}
        row |= {tfrecord.LABEL_KEY: [NAMES.index(box[1]) + 1 for box in boxes]}
        rows.append(row | dict(zip(tfrecord.BOX_KEYS, map(list, columns), strict=True)))
    return {"in.tfrecord": rows}


def encoded(i):
    stream = io.BytesIO()
    PIL.Image.new("RGB", (40, 20), (50 * i, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


# --- the bytes of a file ---


def element_of(tree):
    tree = tree if isinstance(tree, dict) else node("x", tree)
    element = ElementTree.Element(str(tree.get("tag", "x")))
    attributes, parts = tree.get("attributes"), tree.get("parts")
    for key, value in attributes.items() if isinstance(attributes, dict) else ():
        element.set(key, str(value))
    element.text = str(tree.get("text", ""))
    element.extend(map(element_of, parts if isinstance(parts, list) else [parts]))
    return element


def record_of(tree):
    """An Example with the type of list that the values have."""
    lists = collections.defaultdict(dict)
    for key, values in tree.items() if isinstance(tree, dict) else ():
        values = values if isinstance(values, list) else [values]
        if values and all(type(value) is int and abs(value) < 2**63 for value in values):
            lists["int64_list"][key] = values
        elif values and all(isinstance(value, float) for value in values):
            lists["float_list"][key] = values
        else:
            texts = (
                value if isinstance(value, bytes) else str(value).encode(errors="replace") for value in values
            )
            lists["bytes_list"][key] = list(texts)
    return tfrecord.framed(serialized(lists))


def content_of(file, tree):
    suffix = pathlib.Path(file).suffix
    if suffix == ".json":
        return json.dumps(tree).encode()
    if suffix == ".xml":
        return ElementTree.tostring(element_of(tree), encoding="unicode").encode(errors="replace")
    rows = tree if isinstance(tree, list) else [tree]
    if suffix == ".tfrecord":
        return b"".join(map(record_of, rows))
    stream = io.StringIO()
    rows = [row if isinstance(row, list) else [row] for row in rows]
    if suffix == ".csv":
        csv.writer(stream, lineterminator="\n").writerows(rows)
    else:
        stream.write("".join(" ".join(map(str, row)) + "\n" for row in rows))
    return stream.getvalue().encode(errors="replace")
