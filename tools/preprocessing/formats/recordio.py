"""Images in RecordIO files of MXNet.

Their indexes (`x.idx` beside `x.rec`) are not trusted, and not needed: the records are found by walking, and
DALI gets an index of ours, of the records that are read, from the cache directory.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from common.datacheck import images
from common.datacheck.images import ImagePolicy
from common.datacheck.tfrecord import expand_pattern
from common.files import store_cached
from common.issues import Findings
from common.reader_calls import Call, ReaderCall
from common.shards import container_order
from tools.preprocessing.formats import base, memory
from tools.preprocessing.formats.base import Given, ImageSource, Part, Seen
from tools.preprocessing.formats.mapped import mapped, read_span
from tools.preprocessing.formats.recordio_walk import image_of, walk


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RecordIoImages(ImageSource):
    """Images in RecordIO files.

    Attributes:
        files: of the records.
        spans: int64 (size, 3), number of the file, offset and size of each record.
        is_labelled: whether all images have one label; None: some have.
    """

    kind = "recordio"
    files: Sequence[str]
    spans: np.ndarray
    is_labelled: bool | None
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str]

    def encoded(self, i: int) -> bytes:
        file, offset, size = self.spans[i].tolist()
        return image_of(read_span(self.files[file], offset, size), self.files[file])

    def _call(self, part: Part) -> Call:
        # DALI 2.4 looks for the last record of several files in the wrong one if it is alone there.
        if len(self.files) > 1 or self.is_labelled is None or not base.is_text(self.files[0]):
            return self._external_call(part)
        index = "".join(f"{i}\t{offset}\n" for i, offset in enumerate(self.spans[:, 1].tolist()))
        arguments = {
            "path": list(self.files),
            "index_path": [os.fspath(store_cached(index.encode(), ".idx"))],
        }
        return ReaderCall(
            "mxnet",
            arguments | part.shard | container_order(part.training, part.seed),
            label=1 if self.is_labelled else None,
        )


def open_recordio(given: Given) -> RecordIoImages:
    """--source=recordio: a glob of .rec files, or several with commas between them."""
    files = expand_pattern(given.path)
    look = functools.partial(_look, policy=given.policy)
    seen, file_numbers = memory.seen_in_files("recordio", files, given.policy, look)
    spans = np.array([image.place for image in seen], np.int64).reshape(-1, 2)
    findings = Findings(given.path)
    for number, file in enumerate(files):
        if not _is_index_right(file, spans[file_numbers == number, 0]):
            findings.add("index-stale", file)
    first = np.searchsorted(file_numbers, file_numbers)
    numbers = np.arange(len(seen)) - first
    kept = base.judge(
        seen, findings, given.policy, lambda row: f"{files[file_numbers[row]]} record {numbers[row]}"
    )
    given.on_report(findings)
    labels = [seen[row].label for row in kept]
    return RecordIoImages(
        files=files,
        spans=np.insert(spans, 0, file_numbers, axis=1)[kept],
        is_labelled=base.is_labelled(labels),
        names=[seen[row].name for row in kept],
        labels=base.column_of(labels),
        label_names=base.names_of(base.column_of(labels), given.label_map),
    )


def _look(file: str, policy: ImagePolicy) -> list[Seen]:
    seen = []
    for number, record in enumerate(walk(mapped(file), file)):
        label = record.labels[0] if len(record.labels) == 1 else None
        label = base.check_label(label, f"{file} record {number}")
        facts = images.inspect(record.encoded, decode=policy.decode, max_megapixels=policy.max_megapixels)
        name = f"{os.path.basename(file)}-{number}"
        seen.append(Seen(name, facts, label, place=(record.offset, record.size)))
    return seen


def _is_index_right(file: str, offsets: np.ndarray) -> bool:
    """Whether a file's index, if there is one, lists just the records: key, blank and offset on each line."""
    try:
        listed = pathlib.Path(file).with_suffix(".idx").read_bytes().split()
    except OSError:
        return True
    try:
        return sorted(map(int, listed[1::2])) == offsets.tolist() and len(listed) == 2 * len(offsets)
    except ValueError:
        return False
