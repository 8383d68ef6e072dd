"""What is wrong or remarkable in a data set: every kind that is looked for, and how it is said.

A finding has a kind (a row of KINDS), a count, and the offenders in words with their ids. Kinds that would
make training wrong stop it, and all of them are listed at once. Four kinds are mended in what DALI gets
(boxes clipped, boxes dropped, ids renumbered, categories sorted), never in the user's files; the rest is
said.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

from common.errors import UserError

SHOWN = 5  # offenders that a message names before it counts the rest
KEPT = 1000  # offenders that are remembered, for the report


class Severity(enum.Enum):
    """What a kind of finding leads to."""

    STOPS = "stops"
    IMAGE = "stops, or the image is skipped"  # by --on_bad_image
    MENDED = "mended"
    SKIPPED = "skipped"
    NOTE = "said"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of finding.

    Attributes:
        severity: what it leads to.
        what: it, in a few words, in the singular.
        remedy: what the user can do about it, or what was done; a sentence without its full stop.
    """

    severity: Severity
    what: str
    remedy: str


_STOPS, _IMAGE, _MENDED, _, _NOTE = Severity

KINDS = {
    # --- the annotations' file ---
    "json-unreadable": Kind(_STOPS, "annotations file cannot be read", "correct the path or its permissions"),
    "json-not-a-file": Kind(_STOPS, "annotations are no regular file", "name a json file"),
    "json-empty": Kind(_STOPS, "annotations file is empty", "copy or export it again"),
    "json-truncated": Kind(_STOPS, "annotations file is cut off", "copy or export it again"),
    "json-malformed": Kind(_STOPS, "annotations file is no valid JSON", "copy or export it again"),
    "json-lfs-pointer": Kind(_STOPS, "git-lfs pointer in place of the annotations", "run git lfs pull"),
    "json-gzip": Kind(_STOPS, "annotations file is gzip-compressed", "gunzip it"),
    "json-utf-16": Kind(_STOPS, "annotations file is UTF-16", "save it as UTF-8"),
    # --- its records ---
    "repeated-key": Kind(
        _STOPS,
        "key given more than once",
        "readers of JSON keep the last and drop the rest: merge the lists into one, with unique ids",
    ),
    "missing-key": Kind(_STOPS, "missing key", "export the annotations in COCO's format, with this key"),
    "wrong-type": Kind(_STOPS, "value of the wrong type or out of range", "correct the value"),
    "repeated-image-id": Kind(_STOPS, "image id given more than once", "make image ids unique"),
    "repeated-annotation-id": Kind(
        _STOPS, "annotation id given more than once", "make annotation ids unique"
    ),
    "bad-category": Kind(_STOPS, "category that cannot be used", "correct `categories`"),
    "unknown-image": Kind(_STOPS, "annotation of an unknown image", "add the image or remove the annotation"),
    "unknown-category": Kind(
        _STOPS, "annotation of an unknown category", "add the category or remove the annotation"
    ),
    "box-length": Kind(
        _STOPS, "box that has not four numbers", "COCO's bbox is [left, top, width, height] in pixels"
    ),
    "box-not-finite": Kind(_STOPS, "box with a number that is NaN or infinite", "correct or remove it"),
    "box-negative": Kind(
        _STOPS, "box with a negative side", "COCO's bbox is [left, top, width, height]; correct or remove it"
    ),
    "boxes-not-in-pixels": Kind(
        _STOPS,
        "box that reaches no further than one pixel, as all boxes do",
        "they seem to be fractions: COCO's bbox is [left, top, width, height] in pixels",
    ),
    "boxes-of-corners": Kind(
        _STOPS,
        "box that reaches outside, like most, and would not as left, top, right, bottom",
        "COCO's bbox is [left, top, width, height]: subtract",
    ),
    "no-images": Kind(_STOPS, "no usable image", "there is nothing to read: check the data"),
    "no-boxes": Kind(
        _STOPS, "no usable box", "there is nothing to train on or to compare with: check the annotations"
    ),
    "box-outside": Kind(_MENDED, "box that reaches outside its image", "it is clipped to the image"),
    "box-empty": Kind(_MENDED, "box without area inside its image", "it is dropped"),
    "large-id": Kind(_MENDED, "id above 2^31", "DALI gets numbers of our own, results keep the ids"),
    "category-order": Kind(
        _MENDED, "categories are not in the order of their ids", "classes follow the ids, in every file"
    ),
    "crowd": Kind(_NOTE, "crowd", "it is no target; evaluation ignores what lies in it"),
    "image-without-boxes": Kind(_NOTE, "image without boxes", "it trains as background"),
    "too-many-boxes": Kind(
        _NOTE, "image with more boxes than max_instances", "its largest boxes are kept for training"
    ),
    "repeated-file": Kind(_NOTE, "file that several images name", "it is read for each of them"),
    # --- image files ---
    "no-image-directory": Kind(_STOPS, "image directory does not exist", "correct the path"),
    "path-leaves-directory": Kind(
        _STOPS, "file_name that leaves the image directory", "file names are relative paths below it"
    ),
    "image-missing": Kind(
        _IMAGE, "missing image file", "correct the image directory, copy it there, or --on_bad_image=skip"
    ),
    "image-not-a-file": Kind(
        _IMAGE, "image that is no regular file", "put a file there, or --on_bad_image=skip"
    ),
    "image-unreadable": Kind(
        _IMAGE, "image file that cannot be read", "correct its permissions, or --on_bad_image=skip"
    ),
    "image-empty": Kind(_IMAGE, "empty image file", "copy it again, or --on_bad_image=skip"),
    "image-lfs-pointer": Kind(
        _IMAGE, "git-lfs pointer in place of an image", "run git lfs pull, or --on_bad_image=skip"
    ),
    "not-an-image": Kind(_IMAGE, "file that is no image", "replace it, or --on_bad_image=skip"),
    "unsupported-format": Kind(
        _IMAGE, "image format that DALI does not decode", "convert it to JPEG or PNG, or --on_bad_image=skip"
    ),
    "image-not-jpeg-or-png": Kind(
        _IMAGE,
        "image that is neither JPEG nor PNG",
        "TFRecords hold these two: convert it, or --on_bad_image=skip",
    ),
    "image-truncated": Kind(_IMAGE, "image that is cut off", "copy it again, or --on_bad_image=skip"),
    "image-damaged": Kind(_IMAGE, "image with damaged data", "copy it again, or --on_bad_image=skip"),
    "image-too-large": Kind(
        _IMAGE,
        "image larger than --max_megapixels",
        "raise the limit if it is meant to be so large, or --on_bad_image=skip",
    ),
    "image-12-bit": Kind(
        _IMAGE,
        "16-bit image with values below 4096 (12-bit data decode to almost black)",
        "convert it to 8 bits, or --on_bad_image=skip",
    ),
    "image-size-differs": Kind(
        _STOPS,
        "image whose size is not the one in the annotations",
        "its boxes would be scaled wrongly: correct width and height",
    ),
    "image-turned": Kind(
        _STOPS,
        "image whose size in the annotations is that after its EXIF turn",
        "boxes must refer to the stored pixels: turn the pixels and drop the tag, or turn the boxes",
    ),
    "exif-turn": Kind(
        _NOTE,
        "image with an EXIF turn",
        "the tag is ignored: boxes are taken to refer to the stored pixels",
    ),
    "wrong-extension": Kind(_NOTE, "file name that does not fit its format", "the content counts"),
    # --- TFRecords ---
    "no-record-file": Kind(_STOPS, "no file matches", "check the path, and quote the pattern in the shell"),
    "record-file-unreadable": Kind(
        _STOPS, "record file that cannot be read", "correct the path or its permissions"
    ),
    "record-file-empty": Kind(_STOPS, "record file without any record", "remove it or write it again"),
    "record-gzip": Kind(_STOPS, "gzip-compressed record file", "gunzip it: DALI reads plain TFRecords"),
    "record-lfs-pointer": Kind(_STOPS, "git-lfs pointer in place of a record file", "run git lfs pull"),
    "record-truncated": Kind(_STOPS, "record file that is cut off", "copy or write it again"),
    "not-a-record": Kind(
        _STOPS,
        "no TFRecord: the checksum of a length is wrong",
        "the file is damaged or of another kind: copy or write it again",
    ),
    "record-damaged": Kind(_STOPS, "record whose checksum is wrong", "copy or write the file again"),
    "not-an-example": Kind(
        _STOPS, "record that is no tf.train.Example", "write the file again (common/tfrecord.py)"
    ),
    "record-key-missing": Kind(
        _STOPS, "record that lacks a key", "write it in the schema of TensorFlow Object Detection"
    ),
    "record-key-type": Kind(
        _STOPS, "record with a key of the wrong type", "write it in the schema of TensorFlow Object Detection"
    ),
    "record-ragged": Kind(
        _STOPS, "record whose lists of boxes differ in length", "write one value per box in each list"
    ),
    "record-value": Kind(_STOPS, "record with an impossible value", "correct the value"),
    "box-in-pixels": Kind(
        _STOPS,
        "box that reaches more than a whole image beyond its image",
        "it seems to be in pixels: records hold fractions of the width and the height",
    ),
    "index-longer": Kind(
        _STOPS,
        "record file that ends before its index does",
        "copy the file again; or remove the index, if records were meant to go",
    ),
    "shard-missing": Kind(
        _NOTE,
        "record file that the names of the others promise",
        "check that the copy is complete and the pattern right",
    ),
    "index-made": Kind(_NOTE, "record file that had no index", "it was made"),
    "index-stale": Kind(_NOTE, "record file whose index was not its own", "the index was made again"),
    "record-completed": Kind(
        _NOTE, "record without the keys of its boxes", "a complete copy is read in its place"
    ),
    # --- label files of other formats (tools/convert.py) ---
    "label-file": Kind(_STOPS, "label file that cannot be used", "correct or remove it"),
    "label-line": Kind(_STOPS, "label that cannot be used", "correct or remove it"),
    "label-turned": Kind(
        _STOPS,
        "labelled image with an EXIF turn",
        "say what its labels refer to: --yolo_pixels=stored or --yolo_pixels=turned",
    ),
    "label-missing": Kind(_NOTE, "image without a label file", "it is taken to hold no object"),
    "polygon": Kind(_NOTE, "polygon in place of a box", "its bounding box is taken"),
    "size-missing": Kind(_NOTE, "label file without the size of its image", "the image's header says it"),
    "difficult": Kind(_NOTE, "object marked difficult", "see --difficult"),
    "voc-filename": Kind(
        _NOTE, "xml file with the filename of another image", "the image of the xml's own name is taken"
    ),
    "voc-zero": Kind(
        _NOTE,
        "box that begins before pixel 1, the first of Pascal VOC",
        "where coordinates are counted from 0, say --voc_pixels=zero_based",
    ),
    # --- train against eval, data against the run ---
    "eval-categories": Kind(
        _STOPS,
        "category that training does not know under this id and name",
        "the ids must mean the same things",
    ),
    "fewer-than-batch": Kind(
        _STOPS, "fewer images than one batch of all ranks", "lower --batch_size or use fewer ranks"
    ),
    "fewer-than-ranks": Kind(_STOPS, "fewer images than ranks", "use fewer ranks"),
}


@dataclasses.dataclass
class Finding:
    """What was found of one kind.

    Attributes:
        kind: a key of KINDS.
        count: how many.
        offenders: the first KEPT of them in words, each with its id; no final full stop.
        skipped: an unreadable image that --on_bad_image=skip left out.
    """

    kind: str
    count: int = 0
    offenders: list[str] = dataclasses.field(default_factory=list)
    skipped: bool = False

    @property
    def severity(self) -> Severity:
        """What it leads to here; SKIPPED where images were left out."""
        return Severity.SKIPPED if self.skipped else KINDS[self.kind].severity

    @property
    def stops(self) -> bool:
        return self.severity in (Severity.STOPS, Severity.IMAGE)

    def line(self, shown: int = SHOWN) -> str:
        """`box with a negative side (2): annotation 7 (image 3) ...; annotation 9 ... . Correct it.`"""
        kind = KINDS[self.kind]
        count = f" ({self.count})" if self.count > 1 else ""
        named = "; ".join(self.offenders[:shown])
        more = f"; and {self.count - shown} more" if self.count > shown else ""
        remedy = "left out by --on_bad_image=skip" if self.skipped else kind.remedy
        return f"{kind.what}{count}: {named}{more}. {remedy[0].upper()}{remedy[1:]}"


class DataError(UserError):
    """Data that would make training wrong.

    Attributes:
        findings: everything that was found, by data set; the message lists what stops.
    """

    def __init__(self, *findings: "Findings"):
        self.findings = findings
        lines = [f"{of.origin}: {finding.line()}" for of in findings for finding in of.stopping]
        if len(lines) == 1:
            super().__init__(lines[0])
        else:
            super().__init__("\n  ".join([f"{len(lines)} kinds of faults in the data:", *lines]))


class Findings:
    """What was found in one data set, by kind in the order of KINDS.

    Args:
        origin: the file or the pattern that was looked at, for messages.
    """

    def __init__(self, origin: str):
        self.origin = origin
        self._of_kind: dict[str, Finding] = {}

    def add(self, kind: str, offender: str) -> None:
        """One offender, by id and value in words: `annotation 7 (image 3) has bbox [1, 2, -3, 4]`."""
        self.add_many(kind, 1, [offender])

    def add_many(self, kind: str, count: int, offenders: Iterable[str]) -> None:
        """`count` offenders, of which `offenders` names all or the first KEPT; nothing where count is 0."""
        if kind not in KINDS:
            raise KeyError(kind)
        if not count:
            return
        finding = self._of_kind.setdefault(kind, Finding(kind))
        finding.count += count
        room = KEPT - len(finding.offenders)
        finding.offenders += [text for text, _ in zip(offenders, range(room), strict=False)]

    def skip_images(self) -> None:
        """Unreadable images were left out: their findings stop nothing any more."""
        for finding in self._of_kind.values():
            finding.skipped = KINDS[finding.kind].severity is Severity.IMAGE

    def extend(self, other: "Findings") -> None:
        """Adds what was found elsewhere in the same data set."""
        for finding in other:
            self.add_many(finding.kind, finding.count, finding.offenders)
            self._of_kind[finding.kind].skipped = finding.skipped

    def __iter__(self):
        return iter([self._of_kind[kind] for kind in KINDS if kind in self._of_kind])

    def __getitem__(self, kind: str) -> Finding:
        """What was found of a kind: a count of 0 where nothing was."""
        return self._of_kind.get(kind) or Finding(kind)

    @property
    def stopping(self) -> Sequence[Finding]:
        return [finding for finding in self if finding.stops]

    def raise_if_stopping(self) -> None:
        """DataError with everything that stops."""
        if self.stopping:
            raise DataError(self)

    def to_json(self) -> list[dict[str, Any]]:
        """All findings as JSON can hold them, in the order of KINDS."""
        return [
            {"kind": f.kind, "severity": f.severity.value, "count": f.count, "offenders": f.offenders}
            for f in self
        ]

    @classmethod
    def from_json(cls, origin: str, items: Iterable[dict[str, Any]]) -> "Findings":
        """What `to_json` gave, for another mention of the same data."""
        findings = cls(origin)
        for item in items:
            findings.add_many(item["kind"], item["count"], item["offenders"])
            if item["severity"] != KINDS[item["kind"]].severity.value:
                findings._of_kind[item["kind"]].skipped = True
        return findings
