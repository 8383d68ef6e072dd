"""Finds the images, the labels and the class names of a data set with YOLO's labels.

A data set is given as one of these:

- a directory with images/ and labels/; `split` selects images/<split>, or <split>/images as in Roboflow's
  exports;
- a directory that has the images and their labels together;
- Ultralytics' data.yaml: `path`, `names`, and for each split one or more directories or lists of images;
- Darknet's list of images, one path per line (train.txt).
"""

import functools
import os
import pathlib
from typing import Any

import yaml

from common.args import IMAGE_SUFFIXES
from common.data.check.issues import Issues
from common.errors import UserError
from tools.conversion.labels import find_listed, read_lines

_YAML = (".yaml", ".yml")
_NAME_FILES = ("data.yaml", "classes.txt", "obj.names", "labels/classes.txt")
_IMAGE_FOLDERS = ("images", "JPEGImages")  # Darknet, src/utils.c replace_image_to_label


def find_files(path: str, split: str | None, issues: Issues) -> tuple[list[str], str]:
    """Finds the images of a data set.

    Args:
        path: path of the data set, see the module docstring.
        split: name of a split of a directory or a data.yaml; the default of a data.yaml is "train".
        issues: listed images that do not exist are added here.

    Returns:
        (paths, directory). The paths of the images are absolute. Those from a directory are sorted; those
        from a list keep its order. The directory contains all images.

    Raises:
        UserError: a file or directory does not exist, or a file cannot be parsed.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        places = [_image_directory(path, split)]
    elif path.endswith(_YAML):
        places = _yaml_places(path, split or "train")
    elif path.endswith(".txt") and not split:
        places = [path]
    else:
        raise UserError(
            f"--input={path}: give a directory, a data.yaml or, without --split, a list of images (.txt)"
        )
    files, directories = [], []
    for place in places:
        if os.path.isdir(place):
            every = pathlib.Path(place).rglob("*")
            files += sorted(str(file) for file in every if file.suffix.lower() in IMAGE_SUFFIXES)
            directories.append(place)
        else:
            listed = find_listed(place, functools.partial(_find, list_file=place), "image-missing", issues)
            files += listed
            directories += map(os.path.dirname, listed or [place])
    return files, os.path.commonpath(directories)


def label_file_of(image: str) -> str:
    path = pathlib.PurePath(image).with_suffix(".txt")
    folders = list(path.parent.parts)
    for number in reversed(range(len(folders))):
        if folders[number] in _IMAGE_FOLDERS:
            folders[number] = "labels"
            labels = os.path.join(*folders)
            return os.path.join(labels, path.name) if os.path.isdir(labels) else str(path)
    return str(path)


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
    given = _read_yaml(path).get("names")
    names = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(names, dict) or not all(isinstance(key, int) for key in names):
        raise UserError(f"names in {path} is {given!r}: write a list, or a mapping such as 0: cat")
    return names


def _image_directory(path: str, split: str | None) -> str:
    folder = os.path.join(path, "images")
    if split is not None:
        choices = [os.path.normpath(os.path.join(folder, split)), os.path.join(path, split, "images")]
        for choice in filter(os.path.isdir, choices):
            return choice
        raise UserError(f"--split={split}: neither {choices[0]} nor {choices[1]} is a directory")
    if not os.path.isdir(folder):
        return path
    inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if len(inside) > 1:
        raise UserError(f"{folder} contains {', '.join(inside)}: give --split=NAME, or --split=. for all")
    return folder


def _yaml_places(path: str, split: str) -> list[str]:
    document = _read_yaml(path)
    entries = document.get(split)
    if not entries:
        raise UserError(f"{path} has no split {split!r}: choose one of its splits by --split")
    beside = os.path.dirname(path)
    roots = [os.path.join(beside, str(document.get("path") or "")), beside]
    places = []
    for entry in entries if isinstance(entries, list) else [entries]:
        # Roboflow's data.yaml has the path ../train/images for train/images.
        spellings = [str(entry), str(entry).removeprefix("../")]
        choices = [os.path.normpath(os.path.join(root, spelt)) for spelt in spellings for root in roots]
        place = next(filter(os.path.exists, choices), None)
        if place is None:
            raise UserError(f"{path}: {split} is {entry!r}, but {choices[0]} does not exist")
        places.append(place)
    return places


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a data.yaml: it holds no keys")
    if "kpt_shape" in document:
        raise UserError(f"{path} has pose labels (kpt_shape): give a data set with boxes or polygons")
    return document


def _find(line: str, list_file: str) -> str | None:
    """Returns the path of the image that a line of a list names, or None if the image does not exist."""
    places = (os.path.dirname(list_file), os.getcwd())
    choices = [os.path.normpath(os.path.join(place, line)) for place in places]
    return next(filter(os.path.exists, choices), None)
