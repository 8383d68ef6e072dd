"""Reads a WebDataset tar file once. Checks the components, the annotations and the image of each sample.

common/data/webdataset.py describes the two forms of annotations.
"""

import io
import itertools
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
import numpy as np

from common.args import IMAGE_SUFFIXES
from common.data import storage
from common.data.annotations import NONE, OBJECT, CocoObject, table_of
from common.data.check.image_headers import ImageFacts
from common.data.check.images import inspect
from common.data.check.issues import Fault, Issues
from common.data.check.repeated_images import checksum_of
from common.data.image_files import UNSUPPORTED_SUFFIXES, is_hidden
from common.data.labels import LabelMap
from common.data.webdataset import Member, members

_IMAGE_ENDINGS = {suffix[1:] for suffix in (*IMAGE_SUFFIXES, *UNSUPPORTED_SUFFIXES)}
_FARTHEST = 2  # largest edge of a normalised box
_MAX_ID = 2**63 - 1
_REPR = reprlib.Repr()
_REPR.maxlist, _REPR.maxdict, _REPR.maxstring = 8, 4, 80


class Sample(msgspec.Struct, gc=False, array_like=True):
    """The content of one sample.

    Attributes:
        name: the name of the sample for messages: `a.tar sample '0001' (image 12)`.
        offset, size: place of the image in the tar file.
        facts: the facts about the image.
        file_name: the file name in the json; if there is none, the name of the image in the tar file.
        image_id: the image id; NONE if there is none.
        image_size: (height, width) in the json; (0, 0) if they are missing.
        objects: the bytes of an array of OBJECT, with boxes ltwh in pixels; empty if any value is invalid.
    """

    name: str
    offset: int
    size: int
    facts: ImageFacts
    file_name: str
    image_id: int = NONE
    image_size: tuple[int, int] = (0, 0)
    objects: bytes = b""  # needs less memory than tuples


def scan(file: str, path: str, label_map: LabelMap, issues: Issues) -> tuple[list[Sample], list[str]]:
    """Reads and checks all samples of a tar file. Returns them, and the names of hidden files in it.

    Args:
        file: the path of a local file.
        path: the path in messages.
        label_map: the categories that annotations may have.
        issues: receives the errors in the file and its annotations, not those in images; its policy sets how
            images are checked.

    Raises:
        OSError: the file cannot be read.
    """
    samples, hidden, keys = [], [], set()

    def visible_members() -> Iterator[Member]:
        for member in members(file, path):
            if any(map(is_hidden, member.name.removeprefix("./").split("/"))):
                hidden.append(member.name)
            else:
                yield member

    try:
        for key, group in itertools.groupby(visible_members(), _key):
            files, name = list(group), f"{path} sample {key!r}"
            of_ending = {member.name[len(key) + 1 :].lower(): member for member in files}
            if key in keys or len(of_ending) < len(files):
                issues.add("repeated-sample", name)
            keys.add(key)
            if sample := _read_sample(file, name, of_ending, issues):
                samples.append(sample)
    except Fault as fault:
        issues.add(*fault.args)
    else:
        if not keys:
            issues.add("no-images", f"{path} has no samples")
    known = set(label_map.category_ids)
    for sample in samples:
        category_ids = np.frombuffer(sample.objects, OBJECT)["category_id"].tolist()
        for category_id in sorted(set(category_ids) - known):
            categories = f"{len(known)} categories from {min(known)} to {max(known)}"
            text = f"{sample.name} has category {category_id}, which none of {categories} has"
            issues.add("unknown-category", text)
    return samples, hidden


def _key(member: Member) -> str:
    """Returns the name up to the first dot after the last slash."""
    folder, slash, base = member.name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _read_sample(file: str, name: str, of_ending: Mapping[str, Member], issues: Issues) -> Sample | None:
    """Returns one sample; None if it lacks the image or the annotations, or has two images."""
    endings = sorted(of_ending.keys() & _IMAGE_ENDINGS)
    if len(endings) != 1 or not ("json" in of_ending or of_ending.keys() >= {"boxes.npy", "labels.npy"}):
        files = ", ".join(f".{ending}" if ending else "a file without a dot" for ending in of_ending)
        issues.add("sample-components", f"{name} has {files}")
        return None
    image = of_ending[endings[0]]
    encoded = storage.read(file, image.offset, image.size)
    facts = inspect(encoded, issues.policy)
    facts.checksum = checksum_of(encoded)
    sample = Sample(name, image.offset, image.size, facts, image.name)
    try:
        if "json" in of_ending:
            _add_json(sample, storage.read(file, *of_ending["json"][1:]))
        else:
            arrays = {
                ending: _array(ending, storage.read(file, *of_ending[ending][1:]))
                for ending in _ARRAYS
                if ending in of_ending
            }
            _add_arrays(sample, arrays)
    except Fault as fault:
        kind, detail = fault.args
        issues.add(kind, f"{name}: {detail}")
    if sample.image_id != NONE:
        sample.name = f"{name} (image {sample.image_id})"
    return sample


# --- annotations as json ---

_Id = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ID)]
_Side = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Mark = Annotated[int, msgspec.Meta(ge=0, le=1)] | bool


class _Object(msgspec.Struct, gc=False):
    """An annotation as in COCO; `bbox` is left, top, width, height in pixels."""

    category_id: _Id
    bbox: tuple[float, float, float, float]
    iscrowd: _Mark = 0
    area: Annotated[float, msgspec.Meta(ge=0)] | None = None
    ignore: _Mark | None = None  # 1: the box is a crowd, as in a COCO json


class _Json(msgspec.Struct, gc=False):
    annotations: list[_Object]
    image_id: _Id | None = None
    file_name: str = ""
    width: _Side | None = None
    height: _Side | None = None


_decode = msgspec.json.Decoder(_Json).decode


def _add_json(sample: Sample, content: bytes) -> None:
    """Adds the content of a json to `sample`; raises Fault."""
    try:
        parsed = _decode(content)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        value = _value_at(content, place.removesuffix("`"))
        raise Fault("sample-value", f"json: {value}{reason[:1].lower()}{reason[1:]}") from error
    except (ValueError, RecursionError) as error:
        raise Fault("json-malformed", f"{error} ({len(content)} bytes)") from error
    sample.image_id = NONE if parsed.image_id is None else parsed.image_id
    sample.file_name = parsed.file_name.replace("\0", "\N{REPLACEMENT CHARACTER}") or sample.file_name
    if parsed.width and parsed.height:
        sample.image_size = (parsed.height, parsed.width)
    sample.objects = table_of(
        [
            CocoObject(0, o.category_id, o.bbox, None, bool(o.iscrowd or o.ignore), o.area)
            for o in parsed.annotations
        ]
    ).tobytes()


def _value_at(content: bytes, place: str) -> str:
    """Returns `PLACE is VALUE: ` for a place in a json such as `annotations[3].bbox[0]`, or ""."""
    try:
        value = json.loads(content)
        for key, number in re.findall(r"(\w+)|\[(\d+)\]", place):
            value = value[int(number)] if number else value[key]
    except (ValueError, LookupError, TypeError, RecursionError):  # the json is malformed after this place
        return f"{place}: "
    return f"{place} is {_REPR.repr(value)}: " if place else ""


# --- annotations as NumPy arrays ---

# For each ending: the kinds of its dtype, the number of its axes, and the rule that a message shows.
_ARRAYS = {
    "boxes.npy": ("f", 2, "float (N, 4)"),
    "labels.npy": ("iu", 1, "int (N,)"),
    "image_id.npy": ("iu", 0, "int ()"),
    "iscrowd.npy": ("iub", 1, "int (N,)"),
    "areas.npy": ("f", 1, "float (N,)"),
}


def _array(ending: str, content: bytes) -> np.ndarray:
    """Reads a .npy file; raises Fault."""
    kinds, num_axes, rule = _ARRAYS[ending]
    try:
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # damaged headers raise errors of many kinds, also of the tokenizer
        raise Fault("sample-value", f"{ending} is damaged: {error}") from error
    if array.dtype.kind not in kinds or array.ndim != num_axes or (num_axes == 2 and array.shape[1] != 4):
        raise Fault("sample-value", f"{ending} is {array.dtype} {array.shape}: {rule} is needed")
    return array


def _add_arrays(sample: Sample, arrays: Mapping[str, np.ndarray]) -> None:
    """Adds the content of .npy files to `sample`; raises Fault."""
    boxes, labels = arrays["boxes.npy"].astype(np.float64), arrays["labels.npy"]
    image_id = arrays.get("image_id.npy", np.array(NONE))
    is_crowd = arrays.get("iscrowd.npy", np.zeros(len(labels), np.int64))
    areas = arrays.get("areas.npy", np.full(len(labels), np.nan))
    lengths = {ending: len(array) for ending, array in arrays.items() if array.ndim}
    if len(set(lengths.values())) > 1:
        raise Fault("sample-value", f"its arrays have the lengths {lengths}: each needs one row per box")
    is_box = np.all((boxes <= _FARTHEST) & np.isfinite(boxes), axis=1)
    is_box &= np.all(boxes[:, 2:] >= boxes[:, :2], axis=1)
    for name, array, is_right, rule in (
        ("boxes", boxes, is_box, "left, top, right, bottom from 0 to 1 are needed"),
        ("labels", labels, (labels >= 0) & (labels <= _MAX_ID), "a category id is needed"),
        ("iscrowd", is_crowd, np.isin(is_crowd, (0, 1)), "0 or 1 is needed"),
        ("areas", areas, ~(areas < 0) & ~np.isinf(areas), "a number, 0 or more, is needed"),
        ("image_id", image_id[np.newaxis], image_id[np.newaxis] >= NONE, "a number, 0 or more, is needed"),
    ):
        if not is_right.all():
            row = int(np.argmin(is_right))
            raise Fault("sample-value", f"{name}.npy[{row}] is {array[row].tolist()}: {rule}")
    boxes_px = boxes * np.tile((sample.facts.width, sample.facts.height), 2)
    boxes_ltwh_px = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
    sample.image_id = int(image_id)
    table = np.zeros(len(labels), OBJECT)
    for field, column in (
        ("category_id", labels),
        ("bbox", boxes_ltwh_px),
        ("iscrowd", is_crowd),
        ("area", areas),
    ):
        table[field] = column
    sample.objects = table.tobytes()
