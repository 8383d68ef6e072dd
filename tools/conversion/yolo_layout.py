"""Where the images, the labels and the class names of a set with YOLO's labels are.

What can be named:

- a directory with images/ and labels/; `split` chooses images/<split>, or <split>/images as Roboflow has it.
  Or a directory with images and their labels side by side;
- Ultralytics' data.yaml: `path`, `names`, and for each split a directory, a list of images, or several;
- Darknet's list of images, one path a line (train.txt).

Class names come from the file that is named, else from the data.yaml, else from data.yaml, classes.txt or
obj.names in the directory, or labels/classes.txt (labelImg).
"""

import os
import pathlib
from typing import Any, NamedTuple

import yaml

from common.datacheck.images import IMAGE_SUFFIXES
from common.datacheck.issues import Issues
from common.errors import UserError, unknown
from tools.conversion.labels import find_listed, read_list, read_text

_YAML = (".yaml", ".yml")
_NAME_FILES = ("data.yaml", "classes.txt", "obj.names", "labels/classes.txt")
_IMAGE_FOLDERS = ("images", "JPEGImages")  # Darknet, src/utils.c replace_image_to_label


class YoloFiles(NamedTuple):
    """The files of a set.

    Attributes:
        images_dir: absolute; the directory that `images` are relative to.
        images: the images, those of directories sorted, those of lists in their order.
        names: class -> name.
        names_origin: the file of the names, for messages.
        listed: whether lists name the images, so that other label files may belong to another split.
    """

    images_dir: str
    images: list[str]
    names: dict[int, str]
    names_origin: str
    listed: bool

    def label_file(self, image: str) -> str:
        """The path of an image's labels, whether there are any or not."""
        directory, name = os.path.split(os.path.join(self.images_dir, image))
        return os.path.join(_label_directory(directory), f"{os.path.splitext(name)[0]}.txt")


def find_files(
    path: str | os.PathLike, split: str | None, names: str | os.PathLike | None, issues: Issues
) -> YoloFiles:
    """Finds the files of a set.

    Args:
        path: one of what the module lists.
        split: of a directory or a data.yaml, whose default is "train".
        names: the file with the names of the classes.
        issues: gets images that a list names and that are not there.

    Raises:
        UserError: something is not there, a file cannot be understood, or nothing names the classes.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        places = [_split_directory(path, split)]
    elif path.endswith(_YAML):
        places = _yaml_places(path, _read_yaml(path), split or "train")
    elif path.endswith(".txt"):
        if split:
            raise UserError(f"--split={split}: {path} is the list of one split already")
        places = [path]
    else:
        raise UserError(f"--input={path} is no directory, no data.yaml and no list of images (.txt)")

    origin = os.fspath(names) if names else path if path.endswith(_YAML) else _find_names(path)
    images, directories = [], []
    for place in places:
        is_directory = os.path.isdir(place)
        found = _walk(place) if is_directory else _read_images(place, issues)
        images += found
        directories += [place] if is_directory else map(os.path.dirname, found or [place])
    images_dir = os.path.commonpath(directories)
    return YoloFiles(
        images_dir=images_dir,
        images=[os.path.relpath(image, images_dir) for image in images],
        names=_read_names(origin),
        names_origin=origin,
        listed=not all(map(os.path.isdir, places)),
    )


def _label_directory(directory: str) -> str:
    parts = pathlib.PurePath(directory).parts
    for number in reversed(range(len(parts))):
        if parts[number] in _IMAGE_FOLDERS:
            labels = os.path.join(*parts[:number], "labels", *parts[number + 1 :])
            return labels if os.path.isdir(labels) else directory
    return directory


def _split_directory(path: str, split: str | None) -> str:
    folder = os.path.join(path, "images")
    if split is not None:
        choices = [os.path.join(folder, split), os.path.join(path, split, "images")]
        for choice in choices:
            if os.path.isdir(choice):
                return os.path.normpath(choice)
        raise UserError(f"--split={split}: neither {choices[0]} nor {choices[1]} is a directory")
    if not os.path.isdir(folder):
        return path
    with os.scandir(folder) as entries:
        inside = sorted(entry.name for entry in entries if entry.is_dir())
    if len(inside) > 1:
        raise UserError(f"{folder} holds {', '.join(inside)}: choose one by --split, or all by --split=.")
    return folder


def _walk(directory: str) -> list[str]:
    found = []
    for folder, _, names in os.walk(directory):
        found += [os.path.join(folder, n) for n in names if os.path.splitext(n)[1].lower() in IMAGE_SUFFIXES]
    return sorted(found)


def _read_images(path: str, issues: Issues) -> list[str]:
    """The images of a list; relative paths start at the list or, as in Darknet, at the working directory."""

    def find(line: str) -> str | None:
        places = (os.path.dirname(path), os.getcwd())
        choices = [os.path.normpath(os.path.join(place, line)) for place in places]
        return next(filter(os.path.exists, choices), None)

    return find_listed(path, find, "image-missing", issues)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} is no YAML that can be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is no data.yaml: it holds no keys")
    if "kpt_shape" in document:
        raise UserError(f"{path} has kpt_shape: labels of poses are not read, only boxes and polygons")
    return document


def _yaml_places(path: str, document: dict[str, Any], split: str) -> list[str]:
    splits = [key for key in ("train", "val", "test") if document.get(key)]
    if split not in splits:
        if not splits:
            raise UserError(f"{path} names no train, val or test")
        raise unknown(f"split of {path}", split, splits)
    beside = os.path.dirname(path)
    roots = [os.path.join(beside, str(document.get("path") or "")), beside]
    entries = document[split]
    places = []
    for entry in entries if isinstance(entries, list) else [entries]:
        # Roboflow writes ../train/images in a data.yaml that stands beside train/.
        spellings = [str(entry), str(entry).removeprefix("../")]
        choices = [os.path.normpath(os.path.join(root, spelt)) for spelt in spellings for root in roots]
        place = next(filter(os.path.exists, choices), None)
        if place is None:
            raise UserError(f"{path}: {split} is {entry!r}, but {choices[0]} does not exist")
        places.append(place)
    return places


def _find_names(path: str) -> str:
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    for name in _NAME_FILES:
        if os.path.isfile(os.path.join(directory, name)):
            return os.path.join(directory, name)
    raise UserError(
        f"nothing names the classes of {path}: give --names=FILE, one name a line, or a data.yaml"
        f" (none of {', '.join(_NAME_FILES)} is in {directory})"
    )


def _read_names(path: str) -> dict[int, str]:
    if path.endswith(_YAML):
        return _names_of(_read_yaml(path), path)
    lines = read_list(path)
    for expected, (number, name) in enumerate(lines, 1):
        if number != expected:
            raise UserError(f"{path} line {expected} is blank, but {name!r} follows: which class is it?")
    return {number - 1: name for number, name in lines}


def _names_of(document: dict[str, Any], path: str) -> dict[int, str]:
    given = document.get("names")
    names = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(names, dict) or not names:
        raise UserError(f"{path} has names {given!r}: it needs a list, or 0: name and so on")
    for key, name in names.items():
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise UserError(f"{path} has the class {key!r} in names: classes are whole numbers from 0 on")
        if not isinstance(name, str):
            raise UserError(
                f"{path} names class {key} {name!r}, which YAML takes for no text: put it in quotes"
            )
    count = document.get("nc", len(names))
    if count != len(names):
        raise UserError(f"{path} has nc: {count}, but {len(names)} names")
    return names
