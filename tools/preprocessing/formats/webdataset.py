"""Images in tar archives, as WebDataset has them: `0001.jpg` and `0001.cls`, its label in digits.

A sample is files that follow each other and have the same path up to the first dot of their name:
webdataset/webdataset README, and dali/operators/reader/loader/webdataset_loader.cc of NVIDIA/DALI. Indexes
(`x.idx` beside `x.tar`) are not needed: DALI gets one of the samples that are read, from the cache directory.
"""

import itertools
import os
import tarfile
from collections.abc import Sequence

import numpy as np

from common import cache, tfrecord_index
from common.datacheck.images import IMAGE_SUFFIXES, ImageFacts, ImagePolicy
from common.errors import UserError
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Image, ImageSource, SourceFlags
from tools.preprocessing.reading import ReaderCall

_LABEL = ".cls"
_LONGEST_LABEL = 64  # bytes


def open_webdataset(flags: SourceFlags) -> ImageSource:
    """--source=webdataset: a glob of tar files, or several with commas between them."""
    files = tfrecord_index.expand_pattern(flags.path)
    found = [image for file in files for image in base.remembered(file, flags.policy, _check)]
    return base.make_source("webdataset", flags, found, _load, _reader)


def _load(image: Image) -> np.ndarray:
    return base.read_bytes(image.file, *image.place[:2])


def _reader(found: Sequence[Image]) -> ReaderCall | None:
    labelled = base.are_labelled(found)
    if labelled is None or (labelled and not all(image.place[3] for image in found)):
        return None  # the graph reads plain digits only
    lines: dict[str, list[str]] = {}
    for image in found:
        offset, size, label_offset, digits = image.place
        label = f" cls {label_offset} {digits}" if labelled else ""
        lines.setdefault(image.file, []).append(f"image {offset} {size}{label}\n")
    indexes = [f"v1.1 {len(part)}\n{''.join(part)}" for part in lines.values()]
    arguments = {
        "paths": list(lines),
        "index_paths": [os.fspath(cache.store(index.encode(), ".idx")) for index in indexes],
        "ext": ["image", "cls"] if labelled else ["image"],
        "missing_component_behavior": "error",
    }
    return ReaderCall("webdataset", arguments, label=1 if labelled else None, label_is_text=True)


def _check(file: str, policy: ImagePolicy) -> list[Image]:
    content = base.mapped(file)
    samples = itertools.groupby(_members(file), lambda member: _split(member)[0])
    found = []
    for key, members in samples:
        parts = {_split(member)[1].lower(): member for member in members}
        found.append(_check_sample(key, parts, content, file, policy))
    if not found:
        raise UserError(f"{file} holds no sample: its files are directories, links, or begin with a dot")
    return found


def _members(file: str) -> list[tarfile.TarInfo]:
    """The files of an archive, without links and names that begin with a dot."""
    try:
        with tarfile.open(file, "r:", errorlevel=2) as archive:
            members = archive.getmembers()
            end = archive.offset
    except tarfile.TarError as error:
        raise UserError(f"{file} is no whole, plain tar archive ({error}): write it again") from error
    block = base.read_bytes(file, end, tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or block.any():  # tarfile takes any other header for the end
        raise UserError(f"{file} is damaged or cut off at byte {end}: copy or write it again")
    return [
        member
        for member in members
        if member.isfile() and not member.issparse() and not os.path.basename(member.name).startswith(".")
    ]


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """("a/b", ".seg.png") of "a/b.seg.png"."""
    directory, slash, name = member.name.rpartition("/")
    stem, dot, extension = name.partition(".")
    return directory + slash + stem, dot + extension


def _check_sample(
    key: str, parts: dict[str, tarfile.TarInfo], content: memoryview, file: str, policy: ImagePolicy
) -> Image:
    label, digits = None, (0, 0)
    if member := parts.get(_LABEL):
        size = min(member.size, _LONGEST_LABEL)
        text = bytes(content[member.offset_data : member.offset_data + size])
        label = _parse_label(text, f"{file}: {member.name!r}")
        if text.rstrip().isdigit():
            digits = member.offset_data, len(text.rstrip())
    member = next((parts[suffix] for suffix in IMAGE_SUFFIXES if suffix in parts), None)
    if member is None:
        facts = ImageFacts(fault="image-missing", detail=f"it has {', '.join(parts)}")
        return Image(_as_text(key), file, label).judged(facts, f"{file} sample {_as_text(key)!r}")
    begin, name = member.offset_data, _as_text(member.name)
    image = Image(name, file, label, (begin, member.size, *digits))
    return image.checked(content[begin : begin + member.size], f"{file} sample {name!r}", policy)


def _parse_label(text: bytes, owner: str) -> int:
    try:
        label = int(text.decode("ascii"))
    except ValueError as error:
        raise UserError(f"{owner} holds {text[:20]!r}: a label is a whole number in digits") from error
    return base.check_label(label, owner)


def _as_text(name: str) -> str:
    """A name of a tar member, which need not be UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
