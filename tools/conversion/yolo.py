"""Reads YOLO's text labels: one .txt for each image, with one line `class cx cy w h` for each object.

The four numbers are the centre and the size of the box as fractions of the image's width and height. An image
has no objects if its label file is empty or missing. The label file has the image's path with `labels` in
place of `images` (or `JPEGImages`), else it is next to the image. Label files in a directory that belong to
no image are named. A label file whose name differs from that of its image only in case or in the Unicode
normal form is an error.

A line with more numbers is one of these. Six numbers are refused: the last one would be a confidence.

- A polygon, `class x1 y1 x2 y2 x3 y3 ...`, becomes its bounding box.
- A box with keypoints, `class cx cy w h` and two or three numbers for each keypoint, becomes the box. All
  lines of such a data set are equally long, as `kpt_shape` in its data.yaml says.

Labels do not tell whether the image was rotated by its EXIF orientation before it was labelled. So images
with an EXIF rotation are refused unless --yolo_pixels is given.

A data set is given as one of these:

- a directory with images/ and labels/; `split` selects images/<split>, or <split>/images as in Roboflow's
  exports;
- a directory that has the images and their labels together;
- Ultralytics' data.yaml: `path`, `names`, and for each split one or more directories or lists of images;
- Darknet's list of images, one path per line (train.txt). Paths are relative to the list or to the working
  directory. They may begin with `data/`, Darknet's directory, although the list is in it: CVAT and Datumaro
  write data/obj_train_data/a.jpg for an image in obj_train_data/.

Source: AlexeyAB/darknet README "How to train"; https://docs.ultralytics.com/datasets/detect/ and /pose/, and
ultralytics/data/utils.py (verify_image_label); datumaro plugins/data_formats/yolo/base.py (localize_path).
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import yaml

from common.args import ImagePolicy
from common.data.annotations import Annotations
from common.data.check.image_headers import ImageFacts
from common.data.check.images import similar_files
from common.data.check.issues import Issues
from common.data.coco import turn_back
from common.data.image_files import Tree, difference, is_hidden, list_tree, spelling
from common.data.labels import LabelMap
from common.errors import UserError
from common.files import encoding_of
from tools.conversion.labels import (
    Box,
    LabelledImage,
    Object,
    check_images,
    find_listed,
    make_annotations,
    read_lines,
)

_YAML = (".yaml", ".yml")
_NAME_FILES = ("data.yaml", "classes.txt", "obj.names", "labels/classes.txt")
_IMAGE_FOLDERS = ("images", "JPEGImages")  # Darknet, src/utils.c replace_image_to_label
_BOX = 5  # numbers of a box with its class
_SHOWN = 60  # characters of a label line that a message shows
_FARTHEST = 1.0  # limit outside the image, in image sides; larger numbers are pixels
_DECIMALS = 6  # of coordinates in pixels, as many as labels have


def read_yolo(
    path: str,
    *,
    split: str | None = None,
    names_file: str | None = None,
    label_map_file: str | None = None,
    yolo_pixels: str | None = None,
    yolo_labels: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks a data set with YOLO's labels.

    Without a label map, class 0 becomes category 1, and so on.

    Args:
        path: path of the data set, see the module docstring.
        split: name of a split; the default of a data.yaml is "train".
        names_file: file of the class names; default: the data.yaml, or the first file of _NAME_FILES.
        yolo_pixels: "stored" or "turned": how labels of images with an EXIF rotation were made.
        yolo_labels: "polygon" or "pose": what lines with more than five numbers are; default: see `is_pose`.

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them with file and line.
        UserError, OSError: files or directories do not exist, or class names are missing.
    """
    issues = Issues(path, policy)
    files, images_dir, trees = find_files(path, split, issues)
    names_file = names_file or find_names(path)
    names = read_names(names_file)
    if label_map_file:
        label_map = LabelMap.load(label_map_file)
    else:
        try:
            label_map = LabelMap.from_categories({"id": i + 1, "name": name} for i, name in names.items())
        except UserError as error:
            raise UserError(f"{names_file}: {error}") from error
    ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    category_ids: dict[float, int] = {
        number: ids[str(name)] for number, name in names.items() if str(name) in ids
    }
    by_label_file: dict[str, LabelledImage] = {}
    for file in files:
        image = LabelledImage(os.path.relpath(file, images_dir), label_file_of(file))
        other = by_label_file.setdefault(image.label_file, image)
        if other != image:
            message = f"{image.label_file} belongs to {other.file_name!r} and to {image.file_name!r}"
            issues.add("label-file", message)
    images = list(by_label_file.values())
    _report_label_files(trees, by_label_file, issues)
    usable, facts = check_images(images, images_dir, issues)
    lines = [_read_lines(image, issues) for image in images]
    shape = read_keypoint_shape(path) or read_keypoint_shape(names_file)
    pose: bool | None = yolo_labels == "pose"
    if yolo_labels is None:
        pose = shape is not None or is_pose([line.words for of_image in lines for line in of_image])
    objects = [
        _read_objects(image, of_image, fact, category_ids, yolo_pixels, pose, shape, issues)
        for image, of_image, fact in zip(images, lines, facts, strict=True)
    ]
    return make_annotations(images, usable, facts, objects, label_map, issues), images_dir


# --- label files ---


class Line(NamedTuple):
    """A line of a label file.

    Attributes:
        location: file, number and text for messages.
    """

    location: str
    words: list[str]


def _read_lines(image: LabelledImage, issues: Issues) -> list[Line]:
    try:
        text = pathlib.Path(image.label_file).read_text(encoding_of(image.label_file))
    except FileNotFoundError:
        issues.add("label-missing", str(image))
        return []
    except UnicodeError:
        issues.add("label-file", f"{image.label_file} is not text in UTF-8")
        return []
    return [
        Line(f"{image.label_file} line {number} {line.strip()[:_SHOWN]!r}", line.split())
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


def is_pose(lines: Sequence[list[str]]) -> bool | None:
    """Whether the lines with more than six numbers are boxes with keypoints and not polygons. None: unclear.

    Boxes with keypoints have one number of columns in the data set, and lie in the image. They are recognised
    by the visibility of the keypoints, which is 0, 1 or 2. A rotated rectangle (nine numbers) is a polygon.
    """
    long_lines = [words for words in lines if len(words) > _BOX + 1]
    if len(set(map(len, long_lines))) != 1:
        return False
    try:
        _, x, y, width, height, *keypoints = np.array(long_lines, np.float64).T
    except ValueError:
        return False  # `parse_line` reports the line
    low, high = np.minimum(x - width / 2, y - height / 2), np.maximum(x + width / 2, y + height / 2)
    is_box = (low > -0.01) & (high < 1.01)
    if is_box.mean() < 0.9:  # some boxes may be wrong
        return False
    if len(keypoints) % 3 == 0 and np.isin(keypoints[2::3], (0, 1, 2)).all():
        return True
    if len(keypoints) % 2:
        return False
    if len(keypoints) == 4:  # a polygon with the corners (x, y), (width, height) and two more
        x3, y3, x4, y4 = keypoints
        is_parallelogram = np.maximum(abs(x + x3 - width - x4), abs(y + y3 - height - y4)) < 0.01
        if is_parallelogram.mean() > 0.9:
            return False
    return None


def _read_objects(
    image: LabelledImage,
    lines: Sequence[Line],
    facts: ImageFacts,
    category_ids: Mapping[float, int],
    pixels: str | None,
    pose: bool | None,
    shape: tuple[int, int] | None,
    issues: Issues,
) -> list[Object]:
    boxes, object_ids = [], []
    for location, words in lines:
        if pose is None and len(words) > _BOX:
            issues.add("label-ambiguous", location)
            continue
        try:
            class_index, box = parse_line(words, pose=bool(pose), shape=shape)
            if class_index not in category_ids:
                raise ValueError(f"has class {words[0]}, which is not one of the {len(category_ids)} classes")
        except ValueError as error:
            issues.add("label-line", f"{location} {error}")
            continue
        if len(words) > _BOX:
            issues.add("pose" if pose else "polygon", location)
        boxes.append(box)
        object_ids.append(category_ids[class_index])
    boxes_ltwh = np.array(boxes).reshape(-1, 4)
    if facts.orientation != 1 and len(boxes_ltwh):
        if pixels is None:
            issues.add("label-turned", f"{image} has orientation {facts.orientation}")
        elif pixels == "turned":
            orientations = np.full(len(boxes_ltwh), facts.orientation)
            boxes_ltwh = turn_back(boxes_ltwh, np.ones((len(boxes_ltwh), 2)), orientations)
    boxes_ltwh_px = np.round(boxes_ltwh * ([facts.width, facts.height] * 2), _DECIMALS)
    rows = zip(map(tuple, boxes_ltwh_px.tolist()), object_ids, strict=True)
    return [(box, category_id, False) for box, category_id in rows]


def parse_line(
    words: list[str], *, pose: bool = False, shape: tuple[int, int] | None = None
) -> tuple[float, Box]:
    """Parses a line of a label file; raises ValueError if it is not a label.

    Args:
        pose: whether numbers after the first five are keypoints, and not corners of a polygon.
        shape: `kpt_shape`, the number of keypoints and of numbers for each; None if it is unknown.

    Returns:
        The class, and the box (left, top, width, height) as fractions of the image's width and height.
    """
    num_more = len(words) - _BOX
    if pose:
        expected = f"{shape[0]} keypoints of {shape[1]}" if shape else "keypoints of 2 or 3"
        is_complete = num_more == shape[0] * shape[1] if shape else num_more % 2 == 0 or num_more % 3 == 0
        if num_more < 0 or (num_more > 0 and not is_complete):
            raise ValueError(f"has {len(words)} numbers: a label is class cx cy w h, and {expected} numbers")
    elif num_more < 0 or num_more % 2:
        shapes = "a box is class cx cy w h without a confidence, a polygon is class x1 y1 x2 y2 ..."
        raise ValueError(f"has {len(words)} numbers: {shapes}")
    try:
        class_index, *numbers = map(float, words)
    except ValueError:
        raise ValueError("holds something that is not a number") from None
    numbers = numbers[: _BOX - 1] if pose else numbers
    if not all(abs(number - 0.5) <= 0.5 + _FARTHEST for number in numbers):  # True for NaN, too
        raise ValueError("is not normalised: the numbers are fractions of the image's width and height")
    if len(numbers) > _BOX - 1:
        left, top = min(numbers[::2]), min(numbers[1::2])
        return class_index, (left, top, max(numbers[::2]) - left, max(numbers[1::2]) - top)
    x, y, width, height = numbers
    if width < 0 or height < 0:
        raise ValueError("has a negative side")
    return class_index, (x - width / 2, y - height / 2, width, height)


# --- images, label files and class names of a data set ---


def find_files(path: str, split: str | None, issues: Issues) -> tuple[list[str], str, dict[str, Tree]]:
    """Finds the images of a data set.

    Args:
        path: path of the data set, see the module docstring.
        split: name of a split of a directory or a data.yaml; the default of a data.yaml is "train".
        issues: listed images that do not exist, and files that are skipped, are added here.

    Returns:
        (paths, directory, trees). The paths of the images are absolute. Those from a directory are sorted;
        those from a list keep its order. The directory contains all images. `trees` has the directories of
        which all images are read.

    Raises:
        UserError: a file or directory does not exist, a file cannot be parsed, or there is no image.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        sources = [_image_directory(path, split)]
    elif path.endswith(_YAML):
        sources = _yaml_entries(path, split or "train")
    elif path.endswith(".txt") and not split:
        sources = [path]
    else:
        raise UserError(
            f"--input={path}: give a directory, a data.yaml or, without --split, a list of images (.txt)"
        )
    files, directories = [], []
    trees: dict[str, Tree] = {}
    for source in sources:  # directories and lists
        if os.path.isdir(source):
            tree = trees[source] = list_tree(source)
            tree.report(issues)
            _report_unsupported(tree.unsupported, tree.images, issues)
            files += tree.images
            directories.append(source)
        else:
            images = _listed_images(source, issues)
            files += images
            directories += map(os.path.dirname, images or [source])
    if not files and os.path.isdir(path) and not issues.stopping:
        raise UserError(
            f"--input={path} has no images: give the directory that holds the images and their labels"
        )
    return files, os.path.commonpath(directories), trees


def label_file_of(image: str) -> str:
    """Returns the path of an image's label file, by the rule in the module docstring. It need not exist."""
    choices = _label_choices(image)
    with_capitals = [path for choice in choices for path in (choice, f"{choice[:-4]}.TXT")]
    return next(filter(os.path.isfile, with_capitals), choices[0])


def _label_choices(image: str) -> list[str]:
    """Returns the paths that the label file may have: first by the last folder `images` next to `labels`."""
    parts = pathlib.PurePath(image).with_suffix(".txt").parts
    choices = [
        os.path.join(*parts[:number], "labels", *parts[number + 1 :])
        for number in reversed(range(len(parts) - 1))
        if parts[number] in _IMAGE_FOLDERS and os.path.isdir(os.path.join(*parts[:number], "labels"))
    ]
    return [*choices, os.path.join(*parts)]


def _report_unsupported(files: Sequence[str], images: Sequence[str], issues: Issues) -> None:
    """Adds files in formats that are not read. Those with a label file stop the conversion."""
    stems = {os.path.splitext(image)[0] for image in images}
    for file in files:
        label_file = label_file_of(file)
        if os.path.isfile(label_file) and os.path.splitext(file)[0] not in stems:
            issues.add("unsupported-format", f"{file!r} ({label_file})")
        else:
            issues.add("format-skipped", repr(file))


def _report_label_files(
    trees: Mapping[str, Tree], image_of: Mapping[str, LabelledImage], issues: Issues
) -> None:
    """Adds the label files that belong to no image, and those whose name is almost that of an image.

    Args:
        trees: directories of which all images are read.
        image_of: path of a label file, which need not exist -> its image.
    """
    missing = {spelling(file): file for file in image_of if not os.path.exists(file)}
    used = {*image_of}
    files: dict[str, bool] = {}  # path -> whether all images of the directory are read
    for folder, tree in trees.items():
        used |= {*map(label_file_of, tree.unsupported)}
        labels = os.path.dirname(_label_choices(os.path.join(folder, "image.jpg"))[0])
        label_trees = [tree]
        if labels != folder and os.path.isdir(labels):
            label_trees.append(list_tree(labels))
            label_trees[-1].report(issues)
        files |= dict.fromkeys([f for each in label_trees for f in each.with_suffix(".txt")], True)
    for folder in filter(os.path.isdir, {os.path.dirname(file): None for file in missing.values()}):
        for file in list_tree(folder, recursive=False).with_suffix(".txt"):
            files.setdefault(file, False)
    for file, is_complete in files.items():
        if file in used or not _is_label_file(file):
            continue
        if expected := missing.get(spelling(file)):
            name = image_of[expected].file_name
            issues.add("label-misnamed", f"{file!r} and image {name!r}, {difference(file, expected)}")
        elif is_complete:
            issues.add("label-unused", repr(file))


def _is_label_file(path: str) -> bool:
    """Whether a text file has labels, or is empty. Lists of images or class names do not have labels."""
    if os.path.basename(path) in _NAME_FILES:
        return False
    text = pathlib.Path(path).read_text(encoding_of(path), errors="replace")
    words = text.strip().split("\n", 1)[0].split()
    return not words or (len(words) >= _BOX and all(map(_is_number, words[1:])))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def find_names(path: str) -> str:
    """Returns the file with the class names: the data.yaml, or the first file of _NAME_FILES."""
    if path.endswith(_YAML):
        return path
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    for name in _NAME_FILES:
        if os.path.isfile(os.path.join(directory, name)):
            return os.path.join(directory, name)
    raise UserError(
        f"no class names for {path}: give --names=FILE with one name per line, or a data.yaml"
        f" (none of {', '.join(_NAME_FILES)} is in {directory})"
    )


def read_names(path: str) -> dict[int, str]:
    """Reads class -> name from a text file or a data.yaml; raises UserError if it has no names."""
    if not path.endswith(_YAML):
        return dict(enumerate(read_lines(path)))
    value = _read_yaml(path).get("names")
    names = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(names, dict) or not all(type(key) is int for key in names):
        raise UserError(f"names in {path} is {value!r}: write a list, or a mapping such as 0: cat")
    texts = _written_names(path)
    if len(texts) != len(names):
        raise UserError(f"names in {path} repeats a number: give each class its own")
    for name, text in zip(names.values(), texts, strict=True):
        if text and isinstance(text, str) and not isinstance(name, str):
            raise UserError(f"names in {path}: YAML reads {text} as {name!r}: quote it, '{text}'")
    return names


def _written_names(path: str) -> list[Any]:
    """Returns the values of `names` in a data.yaml as they are written, in their order."""
    loader = yaml.SafeLoader(pathlib.Path(path).read_bytes())
    document = loader.get_single_node()
    loader.flatten_mapping(document)  # `<<: *base`
    nodes = {key.value: value for key, value in document.value}["names"].value
    return [(node[1] if isinstance(node, tuple) else node).value for node in nodes]


def read_keypoint_shape(path: str) -> tuple[int, int] | None:
    """Returns `kpt_shape` of a data.yaml, if there is one: number of keypoints, and of numbers for each."""
    shape = _read_yaml(path).get("kpt_shape") if path.endswith(_YAML) else None
    if shape is None:
        return None
    is_valid = isinstance(shape, list) and len(shape) == 2 and type(shape[0]) is int and shape[1] in (2, 3)
    if not is_valid:
        raise UserError(f"kpt_shape in {path} is {shape!r}: write [number of keypoints, 2 or 3]")
    return shape[0], shape[1]


def _image_directory(path: str, split: str | None) -> str:
    folder = os.path.join(path, "images")
    if split is not None:
        choices = [os.path.normpath(os.path.join(folder, split)), os.path.join(path, split, "images")]
        for choice in filter(os.path.isdir, choices):
            return choice
        raise UserError(f"--split={split}: neither {choices[0]} nor {choices[1]} is a directory")
    if not os.path.isdir(folder):
        return path
    splits = sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and not is_hidden(entry.name)
    )
    if len(splits) > 1:
        raise UserError(f"{folder} contains {', '.join(splits)}: give --split=NAME, or --split=. for all")
    return folder


def _yaml_entries(path: str, split: str) -> list[str]:
    """Returns the directories and lists of images of a split."""
    document = _read_yaml(path)
    entries = document.get(split)
    if not entries:
        raise UserError(f"{path} has no split {split!r}: choose one of its splits by --split")
    directory = os.path.dirname(path)
    roots = [os.path.join(directory, str(document.get("path") or "")), directory]
    sources = []
    for entry in entries if isinstance(entries, list) else [entries]:
        # Roboflow's data.yaml has the path ../train/images for train/images.
        names = [str(entry), str(entry).removeprefix("../")]
        choices = [os.path.normpath(os.path.join(root, name)) for name in names for root in roots]
        source = next(filter(os.path.exists, choices), None)
        if source is None:
            raise UserError(f"{path}: {split} is {entry!r}, but {choices[0]} does not exist")
        sources.append(source)
    return sources


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(pathlib.Path(path).read_bytes())
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a data.yaml: it holds no keys")
    return document


def _listed_images(list_file: str, issues: Issues) -> list[str]:
    """Returns the paths of the images that a list names, by the rules in the module docstring."""
    folder = os.path.dirname(list_file)

    def find(line: str) -> str | None:
        path = line.replace("\\", "/")
        choices = [os.path.join(directory, path) for directory in (folder, os.getcwd())]
        choices.append(os.path.join(folder, os.path.normpath(path).removeprefix("data/")))
        return next(filter(os.path.exists, map(os.path.normpath, choices)), None)

    return find_listed(list_file, find, "image-missing", issues, lambda lines: similar_files(folder, lines))
