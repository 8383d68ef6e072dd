"""Images in tar archives, as WebDataset lays them out: `0001.jpg` and `0001.cls`, its label in digits.

Indexes (`x.idx` beside `x.tar`) are not trusted, and not needed: DALI gets an index of ours, of the samples
that are read, from the cache directory.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from common.datacheck import images
from common.datacheck.images import IMAGE_SUFFIXES, ImageFacts, ImagePolicy
from common.datacheck.tfrecord import expand_pattern
from common.errors import UserError
from common.files import store_cached
from common.issues import Findings
from common.reader_calls import Call, ReaderCall
from common.shards import container_order
from tools.preprocessing.formats import base, memory, tar_walk
from tools.preprocessing.formats.base import Given, ImageSource, Part, Seen
from tools.preprocessing.formats.mapped import mapped, read_span

_IMAGES = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)  # of several, the first in this order
_LABEL = "cls"
_LONGEST_LABEL = 64  # bytes


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WebDatasetImages(ImageSource):
    """Images in tar archives.

    Attributes:
        files: the archives.
        places: int64 (size, 5), number of the file; offset and size of the image; offset of the label and
            number of its digits: 0 where there is none, or it is no plain number.
    """

    kind = "webdataset"
    files: Sequence[str]
    places: np.ndarray
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str]

    def encoded(self, i: int) -> bytes:
        file, offset, size, _, _ = self.places[i].tolist()
        return read_span(self.files[file], offset, size)

    def _call(self, part: Part) -> Call:
        has_digits = self.places[:, 4] > 0
        has_labels = bool(has_digits.any())
        if not all(map(base.is_text, self.files)) or not (
            has_digits.all() or (self.labels == base.NO_LABEL).all()
        ):
            return self._external_call(part)
        read = np.unique(self.places[:, 0]).tolist()
        arguments = {
            "paths": [self.files[file] for file in read],
            "index_paths": [
                _index_of(self.places[self.places[:, 0] == file, 1:].tolist(), has_labels) for file in read
            ],
            "ext": ["image", _LABEL] if has_labels else ["image"],
            "missing_component_behavior": "error",
        }
        return ReaderCall(
            "webdataset",
            arguments | part.shard | container_order(part.training, part.seed),
            label=1 if has_labels else None,
            label_is_text=True,
        )


def open_webdataset(given: Given) -> WebDatasetImages:
    """--source=webdataset: a glob of tar files, or several with commas between them."""
    files = expand_pattern(given.path)
    look = functools.partial(_look, policy=given.policy)
    seen, file_numbers = memory.seen_in_files("webdataset", files, given.policy, look)
    findings = Findings(given.path)
    for file, count in zip(files, np.bincount(file_numbers, minlength=len(files)).tolist(), strict=True):
        if not _is_index_right(file, count):
            findings.add("index-stale", file)
    kept = base.judge(
        seen, findings, given.policy, lambda row: f"{files[file_numbers[row]]} sample {seen[row].name!r}"
    )
    given.on_report(findings)
    places = np.array([seen[row].place for row in kept], np.int64).reshape(-1, 4)
    labels = base.column_of([seen[row].label for row in kept])
    return WebDatasetImages(
        files=files,
        places=np.insert(places, 0, file_numbers[kept], axis=1),
        names=[seen[row].name for row in kept],
        labels=labels,
        label_names=base.names_of(labels, given.label_map),
    )


def _look(file: str, policy: ImagePolicy) -> list[Seen]:
    content = mapped(file)
    seen = [_seen(sample, content, file, policy) for sample in tar_walk.walk(file)]
    if not seen:
        raise UserError(f"{file} holds no sample: its files are directories, links, or begin with a dot")
    return seen


def _seen(sample: tar_walk.Sample, content: memoryview, file: str, policy: ImagePolicy) -> Seen:
    image, label = tar_walk.first_of(sample, _IMAGES), sample.components.get(_LABEL)
    number, digits = None, (0, 0)
    if label is not None:
        text = bytes(content[label.offset : label.offset + min(label.size, _LONGEST_LABEL)])
        number = _number(text, f"{file}: {label.name!r}")
        # What DALI hands on, the graph takes for digits alone.
        if text.rstrip().isdigit():
            digits = label.offset, len(text.rstrip())
    if image is None:
        held = ", ".join(f".{extension}" for extension in sample.components)
        missing = ImageFacts(fault="image-missing", detail=f"it has {held}")
        return Seen(_shown(sample.key), missing, number, place=(0, 0, *digits))
    facts = images.inspect(
        content[image.offset : image.offset + image.size],
        decode=policy.decode,
        max_megapixels=policy.max_megapixels,
    )
    return Seen(_shown(image.name), facts, number, place=(image.offset, image.size, *digits))


def _number(text: bytes, whose: str) -> int:
    try:
        label = int(text.decode("ascii"))
    except ValueError as error:
        raise UserError(f"{whose} holds {text[:20]!r}: a label is a whole number in digits") from error
    return base.check_label(label, whose)


def _shown(name: str) -> str:
    """A name as text: tar's need not be UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _index_of(places: Sequence[Sequence[int]], has_labels: bool) -> str:
    """DALI's index of an archive: kinds, offsets and sizes of the parts of each sample."""
    lines = [f"v1.1 {len(places)}"]
    for offset, size, label_offset, digits in places:
        label = f" {_LABEL} {label_offset} {digits}" if has_labels else ""
        lines.append(f"image {offset} {size}{label}")
    return os.fspath(store_cached(("\n".join(lines) + "\n").encode(), ".idx"))


def _is_index_right(file: str, count: int) -> bool:
    """Whether an archive's index, if there is one, lists as many samples as there are."""
    try:
        head = pathlib.Path(file).with_suffix(".idx").read_bytes().split(b"\n", 1)[0].split()
    except OSError:
        return True
    return len(head) == 2 and head[0] in (b"v1.1", b"v1.2") and head[1] == b"%d" % count
