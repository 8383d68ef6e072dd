"""Checks a source before DALI reads it, and makes the indexes that DALI's readers need.

DALI's readers do not check what they read: a wrong index hides records, a record without image gives random
bytes, a database that is cut off ends the process, and one damaged image ends the pipeline. `open_source`
finds this first, and names the file or image. Index files beside the data are not used.
"""

import collections
import glob
import importlib.util
import operator
import os
import pathlib
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from common.args import IMAGE_SUFFIXES
from common.data import tfrecord
from common.data.check import images as image_checks
from common.data.check.image_headers import ImageFacts
from common.data.check.issues import KINDS, Issues
from common.data.coco import load_coco
from common.data.image_files import list_tree
from common.data.open import log_issues
from common.data.readers import clean_json
from common.errors import UserError
from examples.preprocessing import sources

SHOWN = 5  # images that a message names
RECORDIO_MAGIC = b"\x0a\x23\xd7\xce"


class Source(NamedTuple):
    """A source that DALI can read.

    Attributes:
        arguments: arguments of the functions `<kind>_pipeline` and `<kind>_dynamic` of sources.py.
        names: name of each image without suffix, in order; a path below an output directory.
        sizes: stored (height, width) of each image, before any EXIF rotation.
        is_decoded: whether the images are arrays.
    """

    arguments: dict[str, Any]
    names: list[str]
    sizes: list[tuple[int, int]]
    is_decoded: bool = False


def open_source(kind: str, path: str, images: str | None, scratch: str) -> Source:
    """Opens and checks what --source and --input name.

    Args:
        images: for the kind "coco": directory of the images; None: `images` beside the json.
        scratch: a temporary directory for indexes, which DALI reads.

    Raises:
        UserError: the source cannot be read, has no images, or has images that DALI cannot decode.
    """
    if images and kind != "coco":
        raise UserError(f"--images is for --source=coco, not for --source={kind}: remove it")
    match kind:
        case "files":
            return _open_files(path)
        case "list":
            return _open_list(path, scratch)
        case "external":
            return _open_external(path)
        case "tfrecord":
            return _open_tfrecord(path, scratch)
        case "coco":
            return _open_coco(path, images, scratch)
        case "lmdb":
            return _open_lmdb(path)
        case "recordio":
            return _open_recordio(path, scratch)
        case "webdataset":
            return _open_webdataset(path)
        case _:
            return _open_numpy(path)


# --- files ---


def _find(path: str, suffixes: tuple[str, ...]) -> list[str]:
    """Returns the files that a path names, sorted: a file, a glob, or a directory with its subdirectories."""
    if os.path.isdir(path):
        tree, issues = list_tree(path), Issues(f"--input={path}")
        tree.report(issues)
        if suffixes == IMAGE_SUFFIXES:
            issues.add_each("format-skipped", tree.unsupported, repr)
        log_issues(issues.origin, issues)
        files = tree.with_suffix(*suffixes)
        if not files:
            raise UserError(f"--input={path}: no file there ends in {', '.join(suffixes)}")
        return files
    files = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    if not files:
        raise UserError(f"--input={path} does not exist: give a directory, a file or a glob")
    return files


def _names(path: str, files: Sequence[str]) -> list[str]:
    """Returns paths without suffix, relative to the directory that all files share."""
    directory = path if os.path.isdir(path) else os.path.commonpath([os.path.dirname(file) for file in files])
    return [os.path.splitext(os.path.relpath(file, directory or "."))[0] for file in files]


def _open_files(path: str) -> Source:
    """Each first level of directories is a class."""
    files = _find(path, IMAGE_SUFFIXES)
    names = _names(path, files)
    classes = [name.split(os.sep)[0] if os.sep in name else "" for name in names]
    labels = [sorted(set(classes)).index(each) for each in classes]
    return Source({"paths": files, "labels": labels}, names, _sizes_of_files(path, files))


def _open_list(path: str, scratch: str) -> Source:
    """Reads lines `path` or `path label`; paths are relative to the list."""
    lines = pathlib.Path(path).read_text("utf-8-sig", "surrogateescape").splitlines()
    rows = [line.strip().rsplit(maxsplit=1) for line in lines if line.strip() and line[0] != "#"]
    directory = os.path.dirname(os.path.abspath(path))
    has_label = [len(row) == 2 and row[1].lstrip("-").isdigit() for row in rows]
    names = [row[0] if label else " ".join(row) for row, label in zip(rows, has_label, strict=True)]
    files = [os.path.normpath(os.path.join(directory, name)) for name in names]
    if not files:
        raise UserError(f"--input={path} names no images: write a path, or a path and a label, on each line")
    complete = "".join(
        f"{file} {row[1] if label else 0}\n" for file, row, label in zip(files, rows, has_label, strict=True)
    )
    listed = pathlib.Path(scratch, "list.txt")
    listed.write_text(complete, "utf-8", "surrogateescape")
    names = [os.path.splitext(os.path.basename(name))[0] for name in names]
    return Source({"path": str(listed), "directory": "/"}, names, _sizes_of_files(path, files))


def _open_coco(path: str, images: str | None, scratch: str) -> Source:
    """`path` is the json, or a directory with one json."""
    if os.path.isdir(path):
        jsons = glob.glob(f"{glob.escape(path)}/*.json")
        if len(jsons) != 1:
            raise UserError(f"--input={path} has {len(jsons)} json files: give the json, and --images=DIR")
        path = jsons[0]
    beside = os.path.join(os.path.dirname(path), "images")
    directory = images or (beside if os.path.isdir(beside) else os.path.dirname(path) or ".")
    annotations = load_coco(path)
    names = list(annotations.file_names)
    outside = [name for name in names if image_checks.path_fault(name)]
    if outside:
        raise UserError(f"{path}: the file name {outside[0]!r} leads outside the image directory: correct it")
    sizes = _sizes_of_files(path, [os.path.join(directory, name) for name in names])
    # DALI's own parser refuses or misreads some files that the check accepts.
    clean = pathlib.Path(scratch, "instances.json")
    clean.write_bytes(clean_json(annotations))
    arguments = {"annotations": str(clean), "directory": directory, "images": names}
    return Source(arguments, [os.path.splitext(name)[0] for name in names], sizes)


def _open_numpy(path: str) -> Source:
    files, dtypes, sizes = _find(path, (".npy",)), collections.Counter(), []
    for file in files:
        if not os.path.isfile(file):  # opening a pipe would wait
            raise UserError(f"{file} is not a regular file: replace or remove it")
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UserError(f"{file} is not a whole .npy file of numbers: write it again") from error
        if array.dtype not in ("uint8", "float32") or array.ndim != 3 or not array.size:
            raise UserError(
                f"{file} is {array.dtype} {array.shape}: uint8 or float32 (height, width, channels) is needed"
            )
        dtypes[str(array.dtype)] += 1
        sizes.append(array.shape[:2])
    if len(dtypes) > 1:
        raise UserError(f"--input={path} has {dict(dtypes)} arrays: DALI reads only one dtype at a time")
    return Source({"paths": files}, _names(path, files), sizes, is_decoded=True)


# --- Python ---


def _open_external(path: str) -> Source:
    """`FILE.py:name` is a sequence of encoded images or arrays; any other path names image files."""
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        files = _find(path, IMAGE_SUFFIXES)
        images = [pathlib.Path(each).read_bytes() for each in files]
        checked = list(zip(files, map(image_checks.inspect, images), strict=True))
        return Source({"images": images}, _names(path, files), _sizes(path, checked))
    try:
        spec = importlib.util.spec_from_file_location("external_images", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # for dataclasses
        spec.loader.exec_module(module)
        images = operator.attrgetter(name)(module)
        images = list(images() if callable(images) else images)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--input={path} raised {type(error).__name__}: {reason}") from error
    kinds = {_kind_of(image) for image in images}
    if len(kinds) != 1 or not kinds <= {"bytes", "uint8", "float32"}:
        raise UserError(
            f"--input={path} has {' and '.join(sorted(kinds)) or 'no images'}: give images as bytes, or as"
            " arrays (height, width, channels) of uint8 or float32"
        )
    names = [f"{number:06d}" for number in range(len(images))]
    if kinds != {"bytes"}:
        return Source({"images": images}, names, [np.shape(image)[:2] for image in images], is_decoded=True)
    checked = list(zip(names, map(image_checks.inspect, images), strict=True))
    return Source({"images": images}, names, _sizes(path, checked))


def _kind_of(image: Any) -> str:
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.size:
        return str(image.dtype)
    return type(image).__name__


# --- containers ---


def _open_tfrecord(path: str, scratch: str) -> Source:
    files = [file for file in _find(path, (".tfrecord", ".record")) if not file.endswith(".idx")]
    indexes, names, checked = [], [], []
    for number, file in enumerate(files):
        records = tfrecord.walk(file)
        if records.fault:
            raise UserError(f"{records.fault[1]}: copy or write it again")
        for record, (offset, size) in enumerate(records.spans.tolist()):
            data = tfrecord.read_record(file, offset, size)
            if tfrecord.masked_crc32c(data) != records.checksums[record]:
                raise UserError(f"{records.name(record)} has a wrong checksum: copy or write it again")
            name, image = _parse_example(data, records.name(record))
            names.append(name or f"{len(names):06d}")
            checked.append((records.name(record), image_checks.inspect(image)))
        index = pathlib.Path(scratch, f"{number}.idx")
        index.write_bytes(tfrecord.format_index(records.spans))
        indexes.append(str(index))
    arguments = {"paths": list(files), "indexes": indexes, "features": sources.ONLY_IMAGES}
    return Source(arguments, names, _sizes(path, checked))


def _parse_example(data: bytes, owner: str) -> tuple[str, bytes]:
    """Returns the file's name without suffix, "" if unknown, and the encoded image."""
    try:
        features = tf.train.Example.FromString(data).features.feature
        (image,) = features["image/encoded"].bytes_list.value
    except Exception as error:  # google.protobuf.message.DecodeError, whose module TensorFlow hides
        raise UserError(f"{owner} is not a tf.train.Example with one image/encoded") from error
    name = b"".join(features["image/filename"].bytes_list.value).decode("utf-8", "replace")
    name = os.path.splitext(os.path.basename(name))[0]
    return name if name.isprintable() else "", image


def _open_recordio(path: str, scratch: str) -> Source:
    """Only one file: the Dynamic API of DALI 2.4 refuses several."""
    file, *others = _find(path, (".rec",))
    if others:
        raise UserError(f"--input={path}: DALI reads one .rec file at a time; this names {1 + len(others)}")
    index = pathlib.Path(scratch, "0.idx")
    if not os.path.getsize(file):
        raise UserError(f"{file} is empty: copy or write it again")
    content = np.memmap(file, np.uint8, mode="r").data
    offsets = list(_recordio_offsets(file, content))
    index.write_text("".join(f"{number}\t{offset}\n" for number, offset in enumerate(offsets)))
    arguments = {"path": file, "index": str(index)}
    return _read(path, arguments, sources.recordio_dynamic(**arguments, batch_size=1), len(offsets))


def _recordio_offsets(file: str, content: memoryview) -> Iterator[int]:
    """Yields where each record begins (dmlc-core, include/dmlc/recordio.h). A record can have parts."""
    at, is_open = 0, False
    while at < len(content) or is_open:
        word = int.from_bytes(content[at + 4 : at + 8], "little")
        part, size = word >> 29, word & (1 << 29) - 1  # part: 0 whole, 1 first, 2 middle, 3 last
        is_whole = content[at : at + 4] == RECORDIO_MAGIC and at + 8 + size <= len(content)
        if not is_whole or (part in (0, 1)) == is_open or (part == 0 and size < 24):
            raise UserError(f"{file} has no whole image record at byte {at}: copy or write it again")
        if not is_open:
            yield at
        is_open = part in (1, 2)
        at += 8 + -(-size // 4) * 4


def _open_webdataset(path: str) -> Source:
    files = _find(path, (".tar",))
    for file in files:
        try:
            with tarfile.open(file, "r:", errorlevel=2) as archive:
                archive.getmembers()
                end = archive.offset
        except tarfile.TarError as error:
            raise UserError(f"{file} is not a whole plain tar file ({error}): write it again") from error
        with open(file, "rb") as stream:  # tarfile stops without an error at a damaged header
            stream.seek(end)
            block = stream.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE or any(block):
            raise UserError(f"{file} is damaged or cut off at byte {end}: copy or write it again")
    arguments = {"paths": files, "extensions": (sources.IMAGE,)}
    return _read(path, arguments, sources.webdataset_dynamic(**arguments, batch_size=1))


def _open_lmdb(path: str) -> Source:
    """Accepts the directory of a database, or its data.mdb. DALI reads only a file of this name."""
    directory = path if os.path.isdir(path) else os.path.dirname(path) or "."
    file = os.path.join(directory, "data.mdb")
    if not os.path.exists(file) or not os.path.samefile(path, directory if os.path.isdir(path) else file):
        raise UserError(f"--input={path} is not a directory with a file data.mdb")
    try:
        import lmdb
    except ImportError as error:
        raise UserError("--source=lmdb needs a package to check the file: pip install lmdb==3.0.0") from error
    try:
        with lmdb.open(directory, readonly=True, lock=False) as environment:
            needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
            size = os.path.getsize(file)
            if size < needed:  # reading beyond the end kills the process
                raise UserError(f"{file} is cut off after {size} of {needed} bytes: copy it again")
            with environment.begin() as transaction:
                tensors = [_count_tensors(value) for _, value in transaction.cursor()]
    except lmdb.Error as error:
        raise UserError(f"{file} cannot be read as LMDB ({error}): copy or write it again") from error
    kinds = set(tensors) or {0}
    if len(kinds) > 1 or not kinds <= {0, 1, 2}:
        counts = " and ".join(map(str, sorted(kinds)))
        raise UserError(
            f"{file} has records of {counts} tensors: DALI reads Caffe's records"
            " (0 tensors), or Caffe2's with an image (1), or with an image and its label (2)"
        )
    # Only Caffe2's reader must know whether there are labels.
    arguments = {"directory": directory, "caffe2": kinds != {0}, "has_labels": kinds == {2}}
    return _read(path, arguments, sources.lmdb_dynamic(**arguments, batch_size=1), len(tensors))


def _count_tensors(message: bytes) -> int:
    """Counts the tensors in Caffe2's TensorProtos: protobuf fields of number 1. Caffe's Datum has none."""
    at = count = 0
    while message[at : at + 1] == b"\n":
        at, size, shift = at + 1, 0, 0
        while message[at : at + 1] > b"\x7f":  # a varint: seven bits per byte, the lowest first
            size, shift, at = size | (message[at] & 127) << shift, shift + 7, at + 1
        size |= int.from_bytes(message[at : at + 1], "little") << shift
        at, count = at + 1 + size, count + 1
    return count


def _read(path: str, arguments: dict[str, Any], batches: Iterable[tuple], count: int | None = None) -> Source:
    """Reads all images of a container with DALI, one by one, and checks them.

    `count` is the number of records, if known.
    """
    if count == 0:
        raise UserError(f"--input={path} has no images")
    try:
        facts = [image_checks.inspect(np.array(images.tensors[0]).tobytes()) for images, *_ in batches]
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--input={path} cannot be read: {reason(error)}") from error
    if count is not None and len(facts) != count:
        raise UserError(f"--input={path} has {count} records, but DALI reads {len(facts)}: write it again")
    names = [f"{number:06d}" for number in range(len(facts))]
    return Source(arguments, names, _sizes(path, list(zip(names, facts, strict=True))))


# --- images ---


def _sizes_of_files(path: str, files: Sequence[str]) -> list[tuple[int, int]]:
    facts = image_checks.inspect_files(os.curdir, list(map(os.path.abspath, files)))
    return _sizes(path, list(zip(files, facts, strict=True)))


def _sizes(path: str, checked: Sequence[tuple[str, ImageFacts]]) -> list[tuple[int, int]]:
    """Returns the sizes of images, or raises UserError with the names of those that cannot be used."""
    faults = [f"{name} ({KINDS[facts.fault].what})" for name, facts in checked if facts.fault]
    if not checked:
        raise UserError(f"--input={path} has no images")
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        shown = f"{', '.join(faults[:SHOWN])}{more}. Replace or remove them"
        raise UserError(f"--input={path}: {len(faults)} of {len(checked)} images cannot be used: {shown}")
    return [(facts.height, facts.width) for _, facts in checked]


def reason(error: Exception) -> str:
    """Returns the first line of DALI's message that tells what is wrong."""
    text = str(error.__cause__ or error).rpartition("encountered:")[2]
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
