"""Defines all kinds of errors and warnings that the data check can report, with their texts.

Errors stop a run, and all of them are listed at once. Some issues are fixed in the data that DALI
reads, never in the user's files. Other issues are warnings.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from common.args import VIDEO_SUFFIXES, ImagePolicy
from common.errors import UserError

SHOWN = 5  # number of offenders that a message names
_LONGEST = 500  # characters of an offender; a name or value in a file may have any length
KEPT = 1000  # number of offenders that are stored for the report
_REPEATS = 4  # number of rows with the same key that a message names


class Severity(enum.Enum):
    ERROR = "Error"
    IMAGE = "Error, or the image is skipped"  # --on_bad_image decides
    FIXED = "Fixed"
    SKIPPED = "Skipped"
    WARNING = "Warning"


class Kind(NamedTuple):
    """One kind of issue.

    Attributes:
        severity: what happens because of the issue.
        what: the name of the issue in messages, in the singular.
        remedy: what the user can do about it, or what was done; a sentence without full stop.
    """

    severity: Severity
    what: str
    remedy: str


# Each row: `what` and `remedy` of a Kind.
_ERRORS = {
    "file-unreadable": ("file that cannot be read", "correct the path or its permissions"),
    "file-empty": ("empty file", "copy or write it again, or remove it"),
    "file-truncated": ("file that is cut off", "copy or write it again"),
    "file-lfs-pointer": ("git-lfs pointer in place of a file", "run git lfs pull"),
    "file-gzip": ("gzip-compressed file", "gunzip it"),
    "foreign-format": ("file in another format", "the table in docs/data.md has all formats"),
    "json-malformed": ("annotations file is not valid JSON", "copy or export it again"),
    "json-utf-16": ("annotations file is UTF-16", "save it as UTF-8"),
    "repeated-key": ("repeated key", "merge the lists: readers of JSON keep only the last"),
    "missing-key": ("missing key", "export the annotations in COCO's format, with this key"),
    "wrong-type": ("value of the wrong type or out of range", "correct the value"),
    "repeated-image-id": ("repeated image id", "make image ids unique"),
    "repeated-annotation-id": ("repeated annotation id", "make annotation ids unique"),
    "bad-category": ("category that cannot be used", "correct `categories`"),
    "unknown-image": ("annotation of an unknown image", "add the image or remove the annotation"),
    "unknown-category": ("annotation of an unknown category", "add the category or remove the annotation"),
    "box-length": ("box that does not have four numbers", "COCO's bbox is [left, top, width, height]"),
    "box-not-finite": ("box with a number that is NaN or infinite", "correct or remove it"),
    "box-negative": ("box with a negative side", "COCO's bbox is [left, top, width, height]: correct it"),
    "boxes-not-in-pixels": ("box that is normalised, like all others", "COCO's bbox is in pixels"),
    "boxes-of-corners": ("box that only fits as x1, y1, x2, y2", "COCO's bbox is [left, top, width, height]"),
    "no-images": ("no usable image", "there is nothing to read: check the data"),
    "no-boxes": ("no usable box", "there is nothing to train on: check the annotations"),
    "no-image-directory": ("image directory does not exist", "correct the path"),
    "path-leaves-directory": ("file_name that leaves the image directory", "use relative paths below it"),
    "image-size-differs": ("image whose size differs from the annotations", "correct width and height there"),
    "image-turned": (
        "image whose annotated size is that after EXIF rotation",
        "rotate pixels or boxes; for a COCO json, set --coco_pixels=turned",
    ),
    "boxes-turned": (
        "image whose boxes only fit after its EXIF rotation",
        "set --coco_pixels to turned, or to stored if boxes refer to the stored pixels",
    ),
    "no-record-file": ("no file matches", "check the path, and quote the pattern in the shell"),
    "not-a-record": ("not a TFRecord: the checksum of a length is wrong", "copy or write the file again"),
    "record-damaged": ("record whose checksum is wrong", "copy or write the file again"),
    "not-an-example": ("record that is not a tf.train.Example", "write the file again (tools/convert.py)"),
    "record-key-missing": ("record that lacks a key", "use TensorFlow Object Detection's schema"),
    "record-key-type": ("record with a key of the wrong type", "use TensorFlow Object Detection's schema"),
    "record-ragged": ("record whose lists of boxes differ in length", "write one value per box in each list"),
    "record-value": ("record with an invalid value", "correct the value"),
    "repeated-record": (
        "image with several records",
        "write one record per image, with all of its boxes, or number the images in image/source_id",
    ),
    "class-text": ("label that the label map names otherwise", "give the label map of these records"),
    "box-in-pixels": ("box with an edge above 2", "normalise the boxes: records do not hold pixels"),
    "not-a-tar": ("tar file that is damaged", "copy or write the file again"),
    "repeated-sample": (
        "sample that occurs twice in a tar file",
        "write its files next to each other (tar --sort=name)",
    ),
    "sample-components": (
        "sample without one image and its annotations",
        "a sample needs one image, and a .json, or a .boxes.npy and a .labels.npy",
    ),
    "sample-value": ("sample with an invalid value", "correct the value: docs/data.md shows the format"),
    "index-longer": ("record file with fewer records than its index", "copy the file, or remove the index"),
    "label-file": ("label file that cannot be used", "correct or remove it"),
    "image-labelled-twice": ("image with two sets of labels", "merge them: an image has one entry"),
    "label-misnamed": (
        "label file whose name is almost that of its image",
        "up to the last dot, both names must be the same",
    ),
    "label-line": ("label that cannot be used", "correct or remove it"),
    "label-ambiguous": (
        "label that may be a polygon, or a box with keypoints",
        "set --yolo_labels to polygon or to pose",
    ),
    "label-turned": ("labelled image with EXIF orientation", "set --yolo_pixels to stored or to turned"),
    "eval-categories": (
        "category without the same id and name in training",
        "use the training's categories; tools/convert.py --label_map=FILE sets them",
    ),
    "fewer-than-batch": ("fewer images than one batch of all ranks", "lower --batch_size or use fewer ranks"),
}
_BAD_IMAGES = {
    "image-missing": ("missing image file", "correct its name or the image directory, or copy it there"),
    "image-not-a-file": ("image that is not a regular file", "put a file there"),
    "image-unreadable": ("image file that cannot be read", "correct its permissions or name"),
    "image-empty": ("empty image file", "copy it again"),
    "image-lfs-pointer": ("git-lfs pointer in place of an image", "run git lfs pull"),
    "not-an-image": ("file that is not an image", "replace it"),
    "unsupported-format": ("image format that DALI does not decode", "convert it to JPEG or PNG"),
    "video": (
        "video in place of an image",
        f"remove it, or give it to infer.py, with a name that ends in {', '.join(VIDEO_SUFFIXES)}",
    ),
    "image-truncated": ("image that is cut off", "copy it again"),
    "image-damaged": ("image with damaged data", "copy it again"),
    "image-too-large": ("image larger than --max_megapixels", "raise the limit if the size is correct"),
    "image-12-bit": ("16-bit image with values below 4096, almost black in DALI", "convert it to 8 bits"),
}
_FIXES = {
    "box-outside": ("box that reaches outside its image", "it is clipped to the image"),
    "box-empty": ("box without area inside its image", "it is dropped"),
    "box-repeated": ("box that repeats another one of the same image and category", "it is dropped"),
    "box-turned": ("image with EXIF orientation", "--coco_pixels=turned: its boxes are turned back"),
    "ignored": ("box with `ignore`: 1", "it is used as a crowd"),
    "root-category": ("category without boxes that is the supercategory of all others", "it is dropped"),
    "large-id": ("id above 2^31", "it is renumbered for DALI; results keep the original id"),
    "category-order": ("categories are not in the order of their ids", "classes are sorted by id"),
}
_WARNINGS = {
    "crowd": ("crowd", "training ignores it; evaluation ignores detections inside it"),
    "area-differs": (
        "area that does not fit its box",
        "it decides between APs, APm and APl: correct it, or evaluate with --box_areas",
    ),
    "repeated-image": ("images with the same content", "remove all but one"),
    "shared-image": ("evaluation image that is also in the training data", "evaluate on other images"),
    "image-without-boxes": ("image without boxes", "training uses it as background"),
    "many-objects": (
        "image with more than 100 objects of a category",
        "COCO's metrics count 100 detections of them, which limits recall and AP",
    ),
    "too-many-boxes": ("image with more boxes than max_instances", "its largest boxes are kept for training"),
    "few-files": (
        "fewer record files than ranks",
        "ranks read the same parts of a file in all epochs: use --shuffle=global, or convert to more files",
    ),
    "repeated-file": ("file that several images name", "it is read once for each image"),
    "image-unchecked": ("image file that was not checked", "--check=all checks it"),
    "exif-turn": ("image with an EXIF orientation", "the tag is ignored: boxes refer to the stored pixels"),
    "wrong-extension": ("file name extension that does not match the format", "the extension is ignored"),
    "shard-missing": ("missing record file of a numbered set", "check that the copy is complete"),
    "index-made": ("record file without an index", "the index was written"),
    "index-stale": ("record file with a wrong index", "the index was written again"),
    "record-completed": ("record without all keys that DALI reads", "a completed copy is read instead"),
    "record-numbered": ("record without a number in image/source_id", "its image is numbered, in a copy"),
    "sample-numbered": ("sample without an image_id", "its image is numbered"),
    "file-hidden": ("hidden file or folder, or one that a system adds", "it is not read"),
    "link-skipped": ("link to a folder that is read already, or contains the data", "it is not followed"),
    "folder-skipped": ("folder in the directory", "it is not read: a glob such as DIR/**/* reads folders"),
    "format-skipped": (
        "image or video that is not read",
        "convert it to JPEG or PNG; infer.py reads a video",
    ),
    "video-skipped": ("video beside images", "it is not read: infer.py reads one video, --images=VIDEO"),
    "label-unused": ("label file without an image", "add the image, or correct the name of one of the two"),
    "label-missing": ("image without a label file", "it is used as an image without objects"),
    "polygon": ("polygon instead of a box", "its bounding box is used"),
    "box-rotated": ("rotated box or ellipse", "the upright box around it is used"),
    "shape-without-box": ("point, line, skeleton or tag", "it is left out"),
    "boxes-turned-back": ("image labelled as turned by EXIF", "its boxes are converted to the stored pixels"),
    "image-unlabelled": ("image without labels", "it is left out"),
    "not-labels": ("json without labels", "it is left out"),
    "pose": ("box with keypoints", "the keypoints are not used"),
    "difficult": ("object marked difficult", "see --difficult"),
    "voc-zero": ("box with an edge below 1, VOC's first pixel", "check whether --voc_pixels=zero_based fits"),
}
KINDS = {kind: Kind(Severity.ERROR, *row) for kind, row in _ERRORS.items()}
KINDS |= {kind: Kind(Severity.FIXED, *row) for kind, row in _FIXES.items()}
KINDS |= {kind: Kind(Severity.IMAGE, *row) for kind, row in _BAD_IMAGES.items()}
KINDS |= {kind: Kind(Severity.WARNING, *row) for kind, row in _WARNINGS.items()}


@dataclasses.dataclass
class Issue:
    """All images, boxes, records or files (the offenders) with a fault of one kind.

    Attributes:
        kind: a key of KINDS.
        count: the number of offenders.
        offenders: texts that describe the first KEPT offenders, each with its id.
        skipped: whether the offenders are unreadable images that --on_bad_image=skip leaves out.
    """

    kind: str
    count: int = 0
    offenders: list[str] = dataclasses.field(default_factory=list)
    skipped: bool = False

    @property
    def severity(self) -> Severity:
        return Severity.SKIPPED if self.skipped else KINDS[self.kind].severity

    @property
    def stops(self) -> bool:
        return self.severity in (Severity.ERROR, Severity.IMAGE)

    def line(self, shown: int = SHOWN) -> str:
        """Returns a line such as `box with a negative side (1): annotation 7. Correct it`."""
        kind = KINDS[self.kind]
        count = f" ({self.count})" if self.count > 1 else ""
        named = "; ".join(self.offenders[:shown])
        more = f"; and {self.count - shown} more" if self.count > shown else ""
        remedy = kind.remedy + (", or --on_bad_image=skip" if kind.severity is Severity.IMAGE else "")
        if self.skipped:
            remedy = "left out by --on_bad_image=skip"
        return f"{kind.what}{count}: {named}{more}. {remedy[0].upper()}{remedy[1:]}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class Fault(Exception):  # noqa: N818 (a property of the data, not an error of the program)
    """Tells why a file or an image cannot be used: the kind of issue, and a detail."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)


class DataError(UserError):
    """The error for data that would make training wrong.

    Attributes:
        issues: one `Issues` for each data set.
    """

    def __init__(self, *issues: "Issues"):
        self.issues = issues
        lines = [f"{of.origin}: {issue.line()}" for of in issues for issue in of.stopping]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} kinds of faults in the data:")
        super().__init__("\n  ".join(lines))


class Issues:
    """Collects the issues of one data set. Iteration yields them in the order of KINDS.

    Args:
        origin: the annotations file or the pattern of the record files, for messages.
        policy: how images are checked, and whether bad images are errors or skipped.
    """

    def __init__(self, origin: str, policy: ImagePolicy = ImagePolicy()):
        self.origin, self.policy = origin, policy
        self._of_kind: dict[str, Issue] = {}

    def add(self, kind: str, offender: str) -> None:
        """Adds one offender, such as `annotation 7 (image 3) has bbox [1, 2, -3, 4]`."""
        self.add_many(kind, 1, [offender])

    def add_many(self, kind: str, count: int, offenders: Iterable[str]) -> None:
        """Adds `count` (0 or more) offenders. `offenders` has at least the first KEPT of them."""
        skipped = KINDS[kind].severity is Severity.IMAGE and self.policy.on_bad_image == "skip"
        if not count:
            return
        issue = self._of_kind.setdefault(kind, Issue(kind, skipped=skipped))
        issue.count += count
        room = KEPT - len(issue.offenders)
        issue.offenders += [_shorten(text) for text, _ in zip(offenders, range(room), strict=False)]

    def add_each(self, kind: str, items: Collection[Any], describe: Callable[[Any], str]) -> None:
        """Adds one offender per item."""
        self.add_many(kind, len(items), map(describe, items))

    def add_repeats(self, kind: str, what: str, keys: Iterable[Any], name: Callable[[int], str]) -> None:
        """Adds an offender for each key that is repeated, except "" and -1, which replace invalid keys.

        Args:
            what: the word before the key in messages, for example "image".
            keys: the key of each row.
            name: row -> the name of the row for messages.
        """
        keys = list(keys)
        if len(set(keys)) == len(keys):  # saves time and memory
            return
        rows_of = collections.defaultdict(list)
        for row, key in enumerate(keys):
            rows_of[key].append(row)
        for key, rows in rows_of.items():
            if len(rows) > 1 and key not in ("", -1):
                named = [*map(name, rows[:_REPEATS]), *(["..."] if len(rows) > _REPEATS else [])]
                self.add(kind, f"{what} {key!r} is given {len(rows)} times: {', '.join(named)}")

    def extend(self, other: Iterable[Issue]) -> None:
        """Adds issues of the same data set."""
        for issue in other:
            self.add_many(issue.kind, issue.count, issue.offenders)
            self._of_kind[issue.kind].skipped = issue.skipped

    def __iter__(self) -> Iterator[Issue]:
        return iter([self._of_kind[kind] for kind in KINDS if kind in self._of_kind])

    def __getitem__(self, kind: str) -> Issue:
        """Returns the issue of a kind, with count 0 if there is none."""
        return self._of_kind.get(kind) or Issue(kind)

    @property
    def stopping(self) -> Sequence[Issue]:
        return [issue for issue in self if issue.stops]

    def raise_if_stopping(self) -> None:
        """Raises DataError with all issues that stop the run, if there are any."""
        if self.stopping:
            raise DataError(self)
