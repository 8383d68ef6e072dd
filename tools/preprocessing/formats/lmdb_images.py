"""Images in an LMDB of Caffe or Caffe2, in the order of its keys."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from common.datacheck import images
from common.datacheck.images import ImageFacts, ImagePolicy
from common.errors import UserError
from common.issues import Findings
from common.reader_calls import Call, ReaderCall
from common.shards import buffer_order
from tools.preprocessing.formats import base, lmdb_file, lmdb_records, memory
from tools.preprocessing.formats.base import Given, ImageSource, Part, Seen

# DALI's reader of each form, its arguments, and which output is the label.
_READERS = {
    "caffe": ("caffe", {}, 1),
    "caffe-alone": ("caffe", {"label_available": False}, None),
    "caffe2-int32": ("caffe2", {}, 1),
    "caffe2-float": ("caffe2", {}, 1),
    "caffe2-alone": ("caffe2", {"label_type": 4}, None),  # NO_LABEL of caffe2_parser.h
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LmdbImages(ImageSource):
    """Images in an LMDB.

    Attributes:
        file: of the LMDB.
        keys: of the images.
        form: of all values, one of lmdb_records.Record; "" where DALI cannot be given the LMDB: it has no
            index that could leave out an image, and tells forms not apart.
    """

    kind = "lmdb"
    file: str
    keys: Sequence[bytes]
    form: str
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str]

    def encoded(self, i: int) -> bytes:
        with lmdb_file.reading(self.file, copies=False) as transaction:
            value = transaction.get(self.keys[i])
            if value is None:
                raise UserError(f"{self.file} has changed: the key {self.names[i]!r} has gone")
            return bytes(lmdb_records.parse(value).encoded)

    def _call(self, part: Part) -> Call:
        directory = os.path.dirname(self.file)
        if not self.form or self.file != os.path.join(directory, "data.mdb") or not base.is_text(directory):
            return self._external_call(part)
        operator, arguments, label = _READERS[self.form]
        arguments = {"path": directory, **arguments} | part.shard | buffer_order(part.training, part.seed)
        return ReaderCall(operator, arguments, label=label)


def open_lmdb(given: Given) -> LmdbImages:
    """--source=lmdb: the directory of one."""
    file = os.path.abspath(lmdb_file.data_file(given.path))
    with lmdb_file.reading(file) as transaction:
        keys = list(transaction.cursor().iternext(keys=True, values=False))
    if not keys:
        raise UserError(f"{file} holds no record")
    names = [key.decode("utf-8", "backslashreplace") for key in keys]
    seen = memory.seen_in(
        "lmdb", memory.state_of(file), given.policy, lambda: _look(file, names, given.policy)
    )
    findings = Findings(given.path)
    kept = base.judge(seen, findings, given.policy, lambda row: f"record {names[row]!r}")
    given.on_report(findings)
    forms = {image.form for image in seen}
    labels = base.column_of([seen[row].label for row in kept])
    return LmdbImages(
        file=file,
        keys=[keys[row] for row in kept],
        form=forms.pop() if len(kept) == len(keys) and len(forms) == 1 and forms <= _READERS.keys() else "",
        names=[names[row] for row in kept],
        labels=labels,
        label_names=base.names_of(labels, given.label_map),
    )


def _look(file: str, names: Sequence[str], policy: ImagePolicy) -> list[Seen]:
    seen = []
    with lmdb_file.reading(file, copies=False) as transaction:
        values = transaction.cursor().iternext(keys=False, values=True)
        for name, value in zip(names, values, strict=True):
            try:
                record = lmdb_records.parse(value)
            except ValueError as error:
                raise UserError(f"{file}: record {name!r} {error}") from error
            label = base.check_label(record.label, f"{file}: record {name!r}")
            if record.encoded is None:
                facts = ImageFacts(fault="image-missing", detail="the record holds none")
            else:
                facts = images.inspect(
                    record.encoded, decode=policy.decode, max_megapixels=policy.max_megapixels
                )
            seen.append(Seen(name, facts, label, record.form))
    return seen
