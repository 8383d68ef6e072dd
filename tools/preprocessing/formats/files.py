"""Opens image files and files of NumPy arrays (H, W, C)."""

import glob
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from common.args import IMAGE_SUFFIXES
from common.data.check import coco
from common.data.check import images as image_checks
from common.data.check.image_headers import ImageFacts
from common.data.check.issues import Issues
from common.errors import UserError
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Content, Found, Image, Opening, Reader


def open_files(opening: Opening) -> Content:
    """Opens --source=files: a directory, a file or a glob."""
    return _checked(opening, _find(opening, IMAGE_SUFFIXES))


def open_list(opening: Opening) -> Content:
    """Opens --source=list: a text file with paths."""
    return _checked(opening, _listed(opening.path))


def open_coco(opening: Opening) -> Content:
    """Opens --source=coco: a json and the directory of its images. Boxes are checked, but not used.

    Either --input is the json and --images the directory, or --input is the directory and --annotations the
    json.
    """
    if bool(opening.annotations) == bool(opening.images):
        raise UserError(
            f"--source=coco --input={opening.path} needs one more flag: --annotations=FILE if --input is the"
            " directory of the images, or --images=DIR if --input is the json"
        )
    directory = opening.images or opening.path
    annotations = coco.load_coco(opening.annotations or opening.path, directory, policy=opening.policy)
    opening.issues = Issues(annotations.origin)
    opening.issues.extend(annotations.issues)
    images = [Image(name, os.path.abspath(os.path.join(directory, name))) for name in annotations.file_names]
    return Content([(image, image.name, ImageFacts()) for image in images], _load, _file_reader)


def open_numpy(opening: Opening) -> Content:
    """Opens --source=numpy: a directory of .npy files, one file, or a glob."""
    images = [image._replace(label=None) for image in _find(opening, (".npy",))]
    opening.label_names = {}
    return Content(map(_check_array, images), _load_array, _numpy_reader)


def _checked(opening: Opening, images: Sequence[Image]) -> Content:
    facts = image_checks.inspect_files(os.curdir, [image.file for image in images], opening.policy)
    return Content(zip(images, (repr(i.name) for i in images), facts, strict=True), _load, _file_reader)


def _load(image: Image) -> np.ndarray:
    return base.read_bytes(image.file)


def _file_reader(images: Sequence[Image], labelled: bool) -> Reader:
    labels = [image.label if labelled else base.NO_LABEL for image in images]
    return Reader("file", {"files": [image.file for image in images], "labels": labels}, label=1)


# --- which files ---


def _find(opening: Opening, suffixes: tuple[str, ...]) -> list[Image]:
    """Returns the files that --input names, sorted by name. A directory is searched with all subdirectories.

    Each direct subdirectory is a class. The labels 0, 1, 2 ... follow the order of the subdirectories' names.
    Hidden files are left out; symbolic links are followed.
    """
    path = opening.path
    if os.path.isdir(path):
        root, found = path, list(_below(path, suffixes))
    elif os.path.exists(path) or not glob.has_magic(path):
        return [Image(os.path.basename(path), os.path.abspath(path))]
    else:
        root = os.path.dirname(re.split(r"[*?[]", path)[0]) or "."
        found = sorted(file for file in glob.glob(path, recursive=True) if file.lower().endswith(suffixes))
    if not found:
        raise UserError(f"--input={path}: no file there ends in {', '.join(suffixes)}")
    images = [Image(os.path.relpath(file, root), os.path.abspath(file)) for file in found]
    if os.path.isdir(path) and any("/" in image.name for image in images):
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name[0] != ".")
        numbers = {name: number for number, name in enumerate(names)}
        opening.label_names = dict(enumerate(names))
        labels = [numbers.get(image.name.split("/")[0], base.NO_LABEL) for image in images]
        images = [image._replace(label=label) for image, label in zip(images, labels, strict=True)]
    return images


def _below(directory: str, suffixes: tuple[str, ...], above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the files in a directory and its subdirectories.

    `above` contains the real paths of the parents. A link to one of them is skipped, to avoid endless loops.
    """
    here = os.path.realpath(directory)
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name) if here not in above else ():
        if entry.name[0] == ".":
            continue
        if entry.is_dir():
            yield from _below(entry.path, suffixes, above | {here})
        elif entry.name.lower().endswith(suffixes):
            yield entry.path


def _listed(path: str) -> list[Image]:
    """Reads a text file. Each line is a path, or a path, blanks and a label (a whole number).

    Paths are relative to the list. Empty lines and lines that begin with # are left out.
    """
    text = pathlib.Path(path).read_text("utf-8-sig", "surrogateescape")
    lines = [line for line in map(str.strip, text.split("\n")) if line and line[0] != "#"]
    if not lines or "\0" in text:
        raise UserError(f"--input={path} is not a list of files: write a path, or path and label, per line")
    directory, images = os.path.dirname(os.path.abspath(path)), []
    for line in lines:
        match = re.fullmatch(r"(.*\S)\s+(-?[0-9]+)", line)
        label = base.check_label(int(match[2]), f"{path}: {line!r}") if match else None
        images.append(Image(match[1] if match else line, "", label))
    bare = [line for line, image in zip(lines, images, strict=True) if image.label is None]
    if bare and len(bare) < len(lines):
        raise UserError(f"{path}: {bare[0]!r} has no label: write labels on all lines or on none")
    return [i._replace(file=os.path.normpath(os.path.join(directory, i.name))) for i in images]


# --- arrays ---


def _check_array(image: Image) -> Found:
    fault = detail = ""
    try:
        base.check_file(image.file)  # np.load would wait for a pipe
        array = np.load(image.file, mmap_mode="r", allow_pickle=False)
        if array.dtype in ("u1", "<f4") and array.ndim == 3 and array.size:
            return image._replace(form=array.dtype.name), repr(image.name), array
        fault = "unsupported-format"
        detail = f"{array.dtype} {array.shape}: uint8 or float32 (height, width, channels) is needed"
    except Exception as error:
        fault, detail = "not-an-image", " ".join(f"NumPy cannot read it: {error}".split())
    return image, repr(image.name), ImageFacts(fault=fault, detail=detail)


def _load_array(image: Image) -> np.ndarray:
    return np.ascontiguousarray(np.load(image.file, allow_pickle=False))


def _numpy_reader(images: Sequence[Image], labelled: bool) -> Reader:
    return Reader("numpy", {"files": [image.file for image in images]})
