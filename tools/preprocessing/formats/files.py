"""Images in files: a directory tree, a glob, a list, or the images of a COCO json."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from common.datacheck import coco, images
from common.datacheck.images import IMAGE_SUFFIXES
from common.errors import UserError
from common.issues import Findings
from common.reader_calls import Call, ReaderCall
from common.shards import order
from tools.preprocessing.formats import base, file_names
from tools.preprocessing.formats.base import Given, ImageSource, Part, Seen
from tools.preprocessing.formats.file_names import Found


@dataclasses.dataclass(frozen=True, eq=False)
class FileImages(ImageSource):
    """Image files, in any number of directories.

    Attributes:
        files: absolute paths.
    """

    kind: str
    files: Sequence[str]
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str] = ()

    def encoded(self, i: int) -> bytes:
        return base.read_file(self.files[i])

    def _call(self, part: Part) -> Call:
        if not all(map(base.is_text, self.files)):
            return self._external_call(part)
        arguments = {"files": list(self.files), "labels": self.labels.tolist()}
        return ReaderCall("file", arguments | part.shard | order(part.training, part.seed))


def open_files(given: Given) -> FileImages:
    """--source=files: a directory, a file or a glob."""
    return _open("files", given, file_names.of_tree(given.path, IMAGE_SUFFIXES))


def open_list(given: Given) -> FileImages:
    """--source=list: a text file."""
    return _open("list", given, file_names.of_list(given.path))


def open_coco(given: Given) -> FileImages:
    """--source=coco: a json and the directory of its images; boxes are checked, and not handed on.

    --input is either of the two, --annotations or --images the other.
    """
    if bool(given.annotations) == bool(given.images):
        raise UserError(
            f"--source=coco --input={given.path} needs one more: --annotations=FILE,"
            " or --images=DIR where the input is the json"
        )
    json_path, directory = given.path, given.images
    if given.annotations:
        json_path, directory = given.annotations, given.path
    annotations = coco.load_coco(json_path, directory, policy=given.policy)
    given.on_report(annotations.findings)
    files = [os.path.abspath(os.path.join(directory, name)) for name in annotations.file_names]
    return FileImages("coco", files, annotations.file_names, base.column_of([None] * len(files)))


def _open(kind: str, given: Given, found: Found) -> FileImages:
    policy = given.policy
    facts = images.inspect_list(found.files, decode=policy.decode, max_megapixels=policy.max_megapixels)
    seen = [Seen(name, fact) for name, fact in zip(found.names, facts, strict=True)]
    findings = Findings(given.path)
    kept = base.judge(seen, findings, policy, lambda row: repr(found.names[row]))
    given.on_report(findings)
    labels = base.column_of([found.labels[row] for row in kept])
    return FileImages(
        kind,
        [found.files[row] for row in kept],
        [found.names[row] for row in kept],
        labels,
        found.label_names or base.names_of(labels, given.label_map),
    )
