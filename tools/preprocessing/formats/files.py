"""Images in files: a directory tree, a glob, a list, the images of a COCO json, or NumPy arrays (H, W, C)."""

import glob
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from common.datacheck import coco, images
from common.datacheck.images import IMAGE_SUFFIXES, ImageFacts
from common.errors import UserError
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Image, ImageSource, SourceFlags
from tools.preprocessing.reading import ReaderCall

_DTYPES = (np.dtype("u1"), np.dtype("<f4"))
_PLAIN = b"\x93NUMPY\1\0"  # the only version of NumPy's format that DALI reads


class Found(NamedTuple):
    """Files that were found, not checked yet; names of the labels 0, 1, ..., () where they have none."""

    images: Sequence[Image]
    label_names: Sequence[str] = ()


def open_files(flags: SourceFlags) -> ImageSource:
    """--source=files: a directory, a file or a glob."""
    return _open("files", flags, _tree(flags.path, IMAGE_SUFFIXES))


def open_list(flags: SourceFlags) -> ImageSource:
    """--source=list: a text file."""
    return _open("list", flags, _list(flags.path))


def open_coco(flags: SourceFlags) -> ImageSource:
    """--source=coco: a json and the directory of its images; boxes are checked, and not handed on.

    --input is either of the two, --annotations or --images the other.
    """
    if bool(flags.annotations) == bool(flags.images):
        raise UserError(
            f"--source=coco --input={flags.path} needs one more: --annotations=FILE,"
            " or --images=DIR where the input is the json"
        )
    json_path, directory = flags.path, flags.images
    if flags.annotations:
        json_path, directory = flags.annotations, flags.path
    annotations = coco.load_coco(json_path, directory, policy=flags.policy)
    found = [Image(name, os.path.abspath(os.path.join(directory, name))) for name in annotations.file_names]
    issues = annotations.issues
    return base.make_source("coco", flags, found, _load, _file_reader, issues=issues)


def open_numpy(flags: SourceFlags) -> ImageSource:
    """--source=numpy: a directory of .npy files, one, a glob, or a list of them that ends in .txt."""
    found, names = _list(flags.path) if flags.path.endswith(".txt") else _tree(flags.path, (".npy",))
    checked = [_check_array(image, flags.policy.max_megapixels) for image in found]
    return base.make_source(
        "numpy", flags, checked, _load_array, _numpy_reader, label_names=names, is_decoded=True
    )


def _open(kind: str, flags: SourceFlags, found: Found) -> ImageSource:
    policy = flags.policy
    files = [image.file for image in found.images]
    facts = images.inspect_list(files, decode=policy.decode, max_megapixels=policy.max_megapixels)
    checked = [image.judged(fact, repr(image.name)) for image, fact in zip(found.images, facts, strict=True)]
    return base.make_source(kind, flags, checked, _load, _file_reader, label_names=found.label_names)


def _load(image: Image) -> np.ndarray:
    return base.read_bytes(image.file)


def _file_reader(found: Sequence[Image]) -> ReaderCall:
    labels = [base.NO_LABEL if image.label is None else image.label for image in found]
    return ReaderCall("file", {"files": [image.file for image in found], "labels": labels})


# --- which files ---


def _tree(path: str, suffixes: Sequence[str]) -> Found:
    """The files of a directory and of all below it, in the order of their names, directory by directory.

    A file's label is the number of the first directory on its way, of all that are there, by name. Files
    beside these directories have none, nor has any file where no directory holds one. Names that begin with
    a dot are left out; symbolic links are followed. A path that is no directory is one file, or a glob.
    """
    if not os.path.isdir(path):
        return _matches(path, suffixes)
    names = sorted(_below(path, suffixes), key=lambda name: name.split("/"))
    if not names:
        raise UserError(f"--input={path}: no file there ends in {', '.join(suffixes)}")
    with os.scandir(path) as entries:
        directories = sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
    labels = [directories.index(name.split("/", 1)[0]) if "/" in name else None for name in names]
    is_flat = all(label is None for label in labels)
    files = [os.path.join(os.path.abspath(path), name) for name in names]
    return Found(list(map(Image, names, files, labels)), () if is_flat else directories)


def _list(path: str) -> Found:
    """The files of a text file: on each line a path, or a path, blanks and a whole number, its label.

    Either all lines have a label or none has. Paths are relative to the list, and may hold blanks, but not
    begin or end with one. Empty lines and lines that begin with # are left out (`./#1.jpg` is a file).
    """
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UserError(f"--input={path}: {error.strerror}") from error
    if "\0" in text:
        raise UserError(f"--input={path} is no text file: a list has one path a line")
    lines = {number: line.strip() for number, line in enumerate(text.split("\n"), 1)}
    lines = {number: line for number, line in lines.items() if line and line[0] != "#"}
    if not lines:
        raise UserError(f"--input={path} lists no file: write one path a line, or a path and a label")
    parts = {number: line.rsplit(maxsplit=1) for number, line in lines.items()}
    bare = [
        number for number, part in parts.items() if len(part) < 2 or not re.fullmatch(r"-?[0-9]+", part[-1])
    ]
    if bare and len(bare) < len(lines):
        raise UserError(
            f"{path} line {bare[0]}, {lines[bare[0]]!r}, has no label, and others have: give all or none"
        )
    names, labels = list(lines.values()), [None] * len(lines)
    if not bare:
        names = [name for name, _ in parts.values()]
        labels = [base.check_label(int(part[1]), f"{path} line {n}") for n, part in parts.items()]
    directory = os.path.dirname(os.path.abspath(path))
    files = [os.path.normpath(os.path.join(directory, name)) for name in names]
    return Found(list(map(Image, names, files, labels)))


def _matches(path: str, suffixes: Sequence[str]) -> Found:
    if os.path.exists(path):
        return Found([Image(os.path.basename(path), os.path.abspath(path))])
    if not glob.has_magic(path):
        raise UserError(f"--input={path}: there is no such file or directory")
    files = sorted(file for file in glob.glob(path, recursive=True) if file.lower().endswith(tuple(suffixes)))
    if not files:
        raise UserError(f"--input={path} matches no file that ends in {', '.join(suffixes)}")
    begin = os.path.dirname(path[: min(path.index(magic) for magic in "*?[" if magic in path)])
    return Found([Image(os.path.relpath(file, begin or "."), os.path.abspath(file)) for file in files])


def _below(
    directory: str, suffixes: Sequence[str], prefix: str = "", above: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Names with `prefix`, in no order; `above`: real paths of the directories on the way, against cycles."""
    here = os.path.realpath(directory)
    if here in above:
        return
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    for entry in entries:
        if entry.name[0] == ".":
            continue
        if entry.is_dir():
            yield from _below(entry.path, suffixes, f"{prefix}{entry.name}/", above | {here})
        elif entry.name.lower().endswith(tuple(suffixes)):
            yield prefix + entry.name


# --- arrays ---


def _check_array(image: Image, max_megapixels: float) -> Image:
    fault, detail = _array_fault(image.file)
    if fault:
        return image.judged(ImageFacts(fault=fault, detail=detail), repr(image.name))
    array = np.load(image.file, mmap_mode="r", allow_pickle=False)
    magic = base.read_bytes(image.file, 0, len(_PLAIN)).tobytes()
    is_plain = magic == _PLAIN and os.path.getsize(image.file) == array.offset + array.nbytes
    image = msgspec.structs.replace(image, form=array.dtype.name, place=(int(is_plain),))
    facts = images.limited(ImageFacts("NPY", array.shape[0], array.shape[1]), max_megapixels)
    return image.judged(facts, repr(image.name))


def _array_fault(file: str) -> tuple[str, str]:
    """(kind, detail) of what is wrong with an array; ("", "") for nothing."""
    if not os.path.isfile(file):
        return ("image-not-a-file" if os.path.exists(file) else "image-missing"), ""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header raises anything that Python's parser can
        return "not-an-image", " ".join(f"NumPy cannot read it: {error}".split())
    if not isinstance(array, np.memmap) or array.dtype not in _DTYPES:
        return "unsupported-format", f"an array of {getattr(array, 'dtype', '?')}: uint8 or float32 is read"
    if array.ndim != 3 or 0 in array.shape:
        return "unsupported-format", f"the shape {array.shape}: height, width, channels are read"
    return "", ""


def _load_array(image: Image) -> np.ndarray:
    try:
        return np.ascontiguousarray(np.load(image.file, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise UserError(f"{image.file}: {error}") from error


def _numpy_reader(found: Sequence[Image]) -> ReaderCall | None:
    # DALI's reader has no labels.
    if not all(image.place == (1,) and image.label is None for image in found):
        return None
    return ReaderCall("numpy", {"files": [image.file for image in found]}, label=None, layout="HWC")
