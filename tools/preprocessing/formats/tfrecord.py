"""Images in TFRecords, in the schema of TensorFlow Object Detection or in that of ImageNet's records.

Of a record, `image/encoded` is read; `image/filename` is its name, and `image/class/label` its label where it
has one. Lengths, checksums and the schema are checked as before training (tfrecord.py): DALI
checks none of them.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Sequence

import numpy as np
import nvidia.dali.tfrecord as dali_tfrecord

from common.datacheck import images, tfrecord, tfrecord_scan
from common.datacheck.images import ImageFacts, ImagePolicy
from common.datacheck.tfrecord_example import CLASS_KEY, LabelledImage, parse_image
from common.errors import UserError
from common.issues import Findings
from common.reader_calls import Call, ReaderCall
from common.shards import container_order
from common.tfrecord import RecordFile, image_of, read_record
from tools.preprocessing.formats import base, memory
from tools.preprocessing.formats.base import Given, ImageSource, Part, Seen

_THREADS = min(16, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TFRecordImages(ImageSource):
    """Images in record files.

    Attributes:
        files: with at least one image that is read.
        indexes: of each, DALI's, with the records that are read.
        spans: int64 (size, 3), number of the file, offset and size with frame of each record.
        is_labelled: whether all images have a label; None: some have.
    """

    kind = "tfrecord"
    files: Sequence[str]
    indexes: Sequence[str]
    spans: np.ndarray
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str]
    is_labelled: bool | None

    def encoded(self, i: int) -> bytes:
        file, offset, size = self.spans[i].tolist()
        try:
            return image_of(read_record(self.files[file], offset, size))
        except OSError as error:
            raise UserError(f"{self.files[file]}: {error.strerror}") from error

    def _call(self, part: Part) -> Call:
        if self.is_labelled is None:  # DALI gives whatever is in memory for a key that is not there
            return self._external_call(part)
        features = {"image/encoded": dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, "")}
        if self.is_labelled:
            features[CLASS_KEY] = dali_tfrecord.VarLenFeature(dali_tfrecord.int64, 0)
        arguments = {"path": list(self.files), "index_path": list(self.indexes), "features": features}
        return ReaderCall(
            "tfrecord",
            arguments | part.shard | container_order(part.training, part.seed),
            image="image/encoded",
            label=CLASS_KEY if self.is_labelled else None,
        )


def open_tfrecord(given: Given) -> TFRecordImages:
    """--source=tfrecord: a glob of record files, or several with commas between them."""
    if os.path.isdir(given.path):
        raise UserError(
            f"--input={given.path} is a directory: name the files in it,"
            f" '{os.path.join(given.path, '*.tfrecord')}'"
        )
    files = tfrecord.expand_pattern(given.path)
    for file in files:
        if not base.is_text(file):
            raise UserError(f"{file!r}: rename it, TensorFlow, which checks records, knows UTF-8 names only")
    findings = Findings(tfrecord_scan.name_files(files))
    walked = tfrecord.walk_files(files, findings)
    findings.raise_if_stopping()
    missing = tfrecord.missing_shards(files)
    findings.add_many("shard-missing", len(missing), missing)
    state = [(os.fsencode(file.path), file.size, file.mtime_ns, file.digest) for file in walked]
    seen = memory.seen_in("tfrecord", state, given.policy, lambda: _look(walked, given.policy))
    records = [file.name(number) for file in walked for number in range(len(file.spans))]
    kept = base.judge(seen, findings, given.policy, records.__getitem__)

    read, indexes, spans, begin = [], [], [], 0
    for file in walked:
        rows = kept[(kept >= begin) & (kept < begin + len(file.spans))] - begin
        begin += len(file.spans)
        if len(rows) == len(file.spans):
            indexes.append(tfrecord.index_of(file, findings))
        elif len(rows):
            indexes.append(tfrecord.store_index(file.spans[rows]))
        else:
            continue
        spans.append(np.insert(file.spans[rows], 0, len(read), axis=1))
        read.append(file.path)
    given.on_report(findings)
    labels = [seen[row].label for row in kept]
    return TFRecordImages(
        files=read,
        indexes=indexes,
        spans=np.concatenate(spans),
        names=[seen[row].name for row in kept],
        is_labelled=base.is_labelled(labels),
        labels=base.column_of(labels),
        label_names=base.names_of(base.column_of(labels), given.label_map),
    )


def _look(files: Sequence[RecordFile], policy: ImagePolicy) -> list[Seen]:
    """At all records.

    Raises:
        DataError: everything in them that is no image, and must be mended in the files.
    """
    findings = Findings(tfrecord_scan.name_files([file.path for file in files]))

    def look_at(file: RecordFile, begin: int, end: int) -> tuple[list[Seen], Findings]:
        found = Findings(findings.origin)
        records = enumerate(tfrecord_scan.contents(file, begin, end, found), begin)
        return [_seen(record, file, number, policy, found) for number, record in records], found

    parts = [(file, *part) for file in files for part in tfrecord_scan.parts(file)]
    seen = []
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for looks, found in pool.map(lambda part: look_at(*part), parts):
            seen += looks
            findings.extend(found)
    findings.raise_if_stopping()
    return seen


def _seen(
    record: bytes | None, file: RecordFile, number: int, policy: ImagePolicy, findings: Findings
) -> Seen:
    image = LabelledImage() if record is None else parse_image(record, file.name(number), findings)
    if image.encoded is None:  # which was reported, and stops
        return Seen("", ImageFacts())
    facts = images.inspect(image.encoded, decode=policy.decode, max_megapixels=policy.max_megapixels)
    name = image.file_name or f"{os.path.basename(file.path)}-{number}"
    return Seen(name, facts, base.check_label(image.label, file.name(number)))
