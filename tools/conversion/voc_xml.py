"""One annotation of Pascal VOC: an xml file, parsed without trusting it."""

import dataclasses
import math
import xml.parsers.expat
from collections.abc import Mapping

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_OBJECT = "/annotation/object"
# Path of an element -> how its text is kept.
_OBJECT_FIELDS = {f"{_OBJECT}/{of}": of for of in ("name", "difficult", *(f"bndbox/{s}" for s in _SIDES))}
_FIELDS = {f"/annotation/{of}": of for of in ("filename", "size/width", "size/height")}
_MAX_SIDE = 2**31 - 1


@dataclasses.dataclass
class VocObject:
    """An object: the line of its tag, and the texts of those of its fields that are used."""

    line: int
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    repeated: str = ""  # a field that it has twice

    @property
    def name(self) -> str:
        return self.fields.get("name", "")

    def box(self, first: int) -> tuple[float, float, float, float]:
        """Left, top, width, height in pixels, from coordinates whose first pixel is `first`: 1 (and they
        include the last pixel) or 0 (and they are edges).

        Raises:
            ValueError: what is wrong with the object.
        """
        if not self.name:
            raise ValueError("has no name")
        if self.repeated:
            raise ValueError(f"has more than one {self.repeated}")
        edges = []
        for side in _SIDES:
            text = self.fields.get(f"bndbox/{side}")
            if text is None:
                raise ValueError(f"has no bndbox/{side}")
            try:
                edges.append(float(text))
            except ValueError:
                raise ValueError(f"has {side} {text!r}, which is no number") from None
            if not math.isfinite(edges[-1]):
                raise ValueError(f"has {side} {text!r}")
        left, top, right, bottom = edges
        if right < left or bottom < top:
            raise ValueError(f"has xmin, ymin, xmax, ymax = {left:g}, {top:g}, {right:g}, {bottom:g}")
        return left - first, top - first, right - left + first, bottom - top + first


@dataclasses.dataclass
class VocDocument:
    """An xml file: its path, and what is used of it."""

    path: str
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    objects: list[VocObject] = dataclasses.field(default_factory=list)

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) in pixels; None where it is not given or 0; ValueError for what is no size."""
        sides = [float(self.fields.get(f"size/{side}") or 0) for side in ("height", "width")]
        if 0 in sides:
            return None
        if not all(side.is_integer() and 0 < side <= _MAX_SIDE for side in sides):
            raise ValueError
        return int(sides[0]), int(sides[1])


def parse_xml(path: str, content: bytes) -> VocDocument:
    """Reads an annotation. Its `part`s (head, hand, foot) are left out.

    Raises:
        ValueError: no xml, another kind of xml, or one with a document type: its entities could expand to
            gigabytes or name other files.
    """
    document = VocDocument(path)
    parser = xml.parsers.expat.ParserCreate()
    parser.buffer_text = True
    paths = [""]  # of the elements that are open
    text: list[str] = []

    def start(tag: str, _: Mapping[str, str]) -> None:
        path = f"{paths[-1]}/{tag}"
        paths.append(path)
        text.clear()
        if path == _OBJECT:
            document.objects.append(VocObject(parser.CurrentLineNumber))
        elif len(paths) == 2 and tag != "annotation":
            raise ValueError(f"is no annotation of Pascal VOC: it begins with <{tag}>")

    def end(_: str) -> None:
        path = paths.pop()
        if path in _OBJECT_FIELDS:
            an_object, field = document.objects[-1], _OBJECT_FIELDS[path]
            if field in an_object.fields:
                an_object.repeated = field
            an_object.fields[field] = "".join(text).strip()
        elif path in _FIELDS:
            document.fields[_FIELDS[path]] = "".join(text).strip()

    def refuse(name: str, *_: object) -> None:
        raise ValueError(f"declares a document type ({name}), which is refused: its entities are not safe")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text.append
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except xml.parsers.expat.ExpatError as error:
        what = xml.parsers.expat.ErrorString(error.code)
        raise ValueError(f"line {error.lineno}: is no valid xml: {what}") from error
    except LookupError as error:
        raise ValueError(f"is in an encoding that is not known: {error}") from error
    return document
