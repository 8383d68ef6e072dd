"""Converts exports that a random mutation damages: each box is in the result, or a message tells of a fault.

A mutation changes the labels of one image, or what all images share. The boxes of the other images must be in
the result as they were. Boxes of the changed image may only be absent if a message says so.
"""

import copy
import pathlib
import random

import numpy as np
import pytest

from common.data.check.issues import DataError
from common.data.coco import load_coco
from common.data.labels import LabelMap
from common.data.open import open_tfrecords
from common.errors import UserError
from tests.faults import export_trees
from tests.faults.export_trees import BOXES, NAMES, STEMS, content_of, encoded
from tests.tools.conversion import exports
from tests.tools.conversion.labelled_images import options_of, write_file
from tools.convert import convert

_VALUES = (None, True, "", " ", "x", "1e400", "٣", "a\nb", "\0", "\ud800", -3, 0, 1.5, 10**400, 9999)
_VALUES += (float("nan"), float("inf"), [], {}, [[]], "nan", "-7", "inf", "9" * 5000)
# Function that writes an export -> the value of --from, and the path to convert.
FORMS = {
    export_trees.coco_of_cvat: ("coco", "in.json"),
    export_trees.coco_of_label_studio: ("coco", "in.json"),
    export_trees.coco_of_roboflow: ("coco", "in.json"),
    export_trees.voc: ("voc", ""),
    export_trees.cvat: ("cvat", "in.xml"),
    export_trees.labelme: ("labelme", "images"),
    export_trees.yolo: ("yolo", "data.yaml"),
    export_trees.tensorflow_csv: ("csv", "in.csv"),
    export_trees.openimages_csv: ("csv", "in.csv"),
    export_trees.records: ("tfrecord", "in.tfrecord"),
}
_EXPECTED = ("root-category", "index-made")
_OF_IMAGES = ("image-unlabelled", "image-without-boxes", "label-missing", "not-labels")


# --- mutations ---


def places_of(tree, path=()):
    """Yields (container, key, path) of each value below a tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield tree, key, (*path, key)
        yield from places_of(value, (*path, key))


def image_of(file, path):
    """Returns the number of the image that a place describes; None if it is about all images."""
    stem, suffix = pathlib.Path(file).stem, pathlib.Path(file).suffix
    if stem in STEMS:
        return STEMS.index(stem)
    if suffix == ".json":
        return {"images": path[1], "annotations": path[1] // 2}.get(path[0]) if len(path) > 1 else None
    if suffix == ".xml":
        return path[1] - 1 if path[0] == "parts" and len(path) > 1 and path[1] else None
    if suffix == ".csv":
        return (path[0] - 1) // 2 if path[0] else None
    return path[0] if suffix == ".tfrecord" else None


def num_removed(file, path, container, key):
    """Returns how many boxes the export no longer has without its value at a place."""
    is_row = file.endswith((".csv", ".txt")) and len(path) == 1 and file + str(key) != "in.csv0"
    is_entry = len(path) == 2 and path[0] in ("annotations", "shapes")
    is_element = isinstance(container[key], dict) and container[key].get("tag") in ("object", "box")
    return 2 * (file == "in.tfrecord" and len(path) == 1) or int(is_row or is_entry or is_element)


def mutate(files, random):
    """Changes one place of one file. Returns its image or None, and the number of boxes that it removes."""
    file = random.choice(sorted(files))
    places = list(places_of(files[file]))
    container, key, path = random.choice(places)
    image, removed, value = image_of(file, path), 0, container[key]
    operation = random.choice(("drop", "copy", "value", "value", "type", "swap", "shuffle"))
    if operation == "drop":
        removed = num_removed(file, path, container, key)
        del container[key]
    elif operation == "copy" and isinstance(container, list):
        container.insert(random.randrange(len(container) + 1), copy.deepcopy(value))
    elif operation == "copy":
        container[key.swapcase()] = container.pop(key)
    elif operation == "swap":
        others = [
            (c, k) for c, k, p in places if image_of(file, p) == image and not isinstance(c[k], dict | list)
        ]
        other, other_key = random.choice(others or [(container, key)])
        if not isinstance(value, dict | list):
            container[key], other[other_key] = other[other_key], value
    elif operation == "shuffle":
        lists = [c[k] for c, k, p in places if isinstance(c[k], list) and image_of(file, p) == image]
        random.shuffle(random.choice(lists or [[]]))
    else:
        changed = (str(value), [value], {"value": value}, str(value).upper())
        container[key] = random.choice(_VALUES if operation == "value" else changed)
        if isinstance(value, dict) and value.get("tag") == "object":
            removed = 1
        elif container[key] in (None, "", " ", []):  # an empty line
            removed = num_removed(file, path, {key: value}, key) * file.endswith((".csv", ".txt"))
    return image, removed


def mutate_bytes(contents, random):
    """Changes the bytes of one file. Returns its image or None, and the number of boxes that it removes."""
    file = random.choice(sorted(contents))
    content, image = contents[file], image_of(file, ("", 0)) if pathlib.Path(file).stem in STEMS else None
    change = random.choice(("mark", "utf-16", "lines", "returns", "cut", "byte"))
    place = random.randrange(len(content))
    text = content.decode("latin-1")
    contents[file] = {
        "mark": b"\xef\xbb\xbf" + content,
        "utf-16": text.encode("utf-16"),
        "lines": content.replace(b"\n", b"\r\n"),
        "returns": content.replace(b"\n", b"\r"),
        "cut": content[:place],
        "byte": content[:place] + bytes([random.randrange(256)]) + content[place + 1 :],
    }[change]
    is_text = file.endswith((".csv", ".txt"))  # in which a cut or another digit cannot be seen
    return image, 10 * (change in ("cut", "byte") and is_text)


# --- tests ---


def read(form, directory):
    """Returns the annotations of an export."""
    source, path = FORMS[form]
    if source == "tfrecord":
        LabelMap((1, 2, 3), NAMES).save(directory / "labels.json")
        return open_tfrecords(str(directory / path), str(directory / "labels.json")).annotations
    if source == "coco":
        return load_coco(directory / path, directory / "images")
    images = {} if source == "yolo" else {"images": directory / "images"}
    options = options_of(input=directory / path, output=directory / "out.json", **images)
    return next(iter(convert(source, "coco", options)[0].values()))


def write(form, directory, contents):
    for i, stem in enumerate(STEMS if FORMS[form][0] != "tfrecord" else ()):
        folder = "images/images" if form is export_trees.coco_of_label_studio else "images"
        write_file(directory, f"{folder}/{stem}.png", encoded(i))
    for file, content in contents.items():
        write_file(directory, file, content)


def boxes_of(annotations):
    """Returns the boxes as in BOXES, with the name of the image."""
    names = dict(zip(annotations.label_map.category_ids, annotations.label_map.names, strict=True))
    boxes = annotations.boxes_ltwh_px.copy()
    boxes[:, 2:] += boxes[:, :2]
    rows = zip(
        annotations.box_image, annotations.category_ids.tolist(), np.round(boxes, 3).tolist(), strict=True
    )
    stems = [pathlib.Path(name).stem for name in annotations.file_names]
    return [(stems[image], names[category_id], *box) for image, category_id, box in rows]


def assert_one_line_for_each_fault(error, directory):
    lines = str(error).split("\n")
    num_kinds = sum(len(issues.stopping) for issues in error.issues) if isinstance(error, DataError) else 1
    assert len(lines) == num_kinds + (num_kinds > 1)
    assert max(map(len, lines)) < 3000
    assert str(directory) in str(error) or "--" in str(error)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_export_is_converted_with_all_boxes(tmp_path, form):
    write(form, tmp_path, {file: content_of(file, tree) for file, tree in form().items()})
    annotations = read(form, tmp_path)
    assert sorted(boxes_of(annotations)) == sorted((STEMS[i], *box) for i, *box in BOXES)
    assert {issue.kind for issue in annotations.issues} <= {*_EXPECTED}


@pytest.mark.parametrize("seed", range(27))
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_mutated_export_is_refused_or_no_box_is_lost_silently(tmp_path, form, seed):
    numbers, files = random.Random(f"{form.__name__} {seed}"), form()
    change_bytes = numbers.random() < 0.2
    image, removed = (None, 0) if change_bytes else mutate(files, numbers)
    contents = {file: content_of(file, tree) for file, tree in files.items()}
    if change_bytes:
        image, removed = mutate_bytes(contents, numbers)
    write(form, tmp_path, contents)
    try:
        annotations = read(form, tmp_path)
    except UserError as error:
        assert_one_line_for_each_fault(error, tmp_path)
        return
    boxes = boxes_of(annotations)
    unchanged = [(STEMS[i], *box) for i, *box in BOXES if image not in (None, i)]
    assert [box for box in unchanged if box not in boxes] == []
    reports = [issue for issue in annotations.issues if issue.kind not in _EXPECTED]
    num_reported = sum(issue.count * (1 + (issue.kind in _OF_IMAGES)) for issue in reports)
    assert len(boxes) + num_reported >= len(BOXES) - removed
    assert all("\n" not in issue.line() for issue in annotations.issues)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "write_export", [exports.write_label_studio, exports.write_webdataset, exports.write_via]
)
def test_mutated_export_of_a_format_that_is_not_read_is_refused(tmp_path, write_export, seed):
    path, numbers = write_export(tmp_path), random.Random(seed)
    contents = {path.name: path.read_bytes()}
    mutate_bytes(contents, numbers)
    path.write_bytes(contents[path.name])
    source = numbers.choice(["coco", "labelme", "cvat", "csv", "yolo", "tfrecord"])
    options = {"input": path, "output": tmp_path / "out.json", "images": tmp_path}
    with pytest.raises(UserError) as raised:
        convert(source, "tfrecord" if source == "coco" else "coco", options_of(**options))
    assert_one_line_for_each_fault(raised.value, tmp_path)
