"""A LabelMap relates category ids, classes and names. Every data set and every checkpoint has a LabelMap.

COCO's category ids have gaps: 80 of the ids 1..90 are used. The network's classes are 0..num_classes-1.
"""

import dataclasses
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from common.data import storage
from common.errors import UserError
from common.files import write_bytes

MAX_CATEGORY_ID = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class LabelMap:
    """Categories in ascending order of their ids; a class is an index into this order.

    Attributes:
        category_ids: one id per class, ascending.
        names: one name per class.
        aliases: one more name per class, with which TFRecords may name it; not saved. A .pbtxt can have it.
    """

    category_ids: tuple[int, ...]
    names: tuple[str, ...]
    aliases: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @classmethod
    def from_categories(cls, categories: Iterable[Mapping[str, Any]]) -> "LabelMap":
        """Builds the map from a list like COCO's `categories`: dicts with an int "id" and a string "name".

        Raises:
            UserError: the first fault that `category_faults` finds.
        """
        categories = list(categories)
        for fault in category_faults(categories):
            raise UserError(fault)
        ordered = sorted((category["id"], category["name"]) for category in categories)
        return cls(tuple(i for i, _ in ordered), tuple(name for _, name in ordered))

    @classmethod
    def numbered(cls, num_classes: int) -> "LabelMap":
        """Makes a map for runs without data: categories 1 .. num_classes, named by their ids."""
        ids = tuple(range(1, num_classes + 1))
        return cls(ids, tuple(map(str, ids)))

    @property
    def num_classes(self) -> int:
        return len(self.category_ids)

    def classes_of(self, category_ids: ArrayLike) -> np.ndarray:
        """Converts category ids (N,) to classes, int32 (N,). Raises KeyError for an unknown id."""
        class_of = {category_id: index for index, category_id in enumerate(self.category_ids)}
        return np.array([class_of[i] for i in np.asarray(category_ids).tolist()], np.int32)

    def differences(self, other: "LabelMap", here: str = "in training") -> list[str]:
        """Returns a message for each category of `other` that this map lacks or names differently."""
        names = {i: repr(name) for i, name in zip(self.category_ids, self.names, strict=True)}
        return [
            f"category {category_id} is {name!r}, {here} it is {names.get(category_id, 'absent')}"
            for category_id, name in zip(other.category_ids, other.names, strict=True)
            if names.get(category_id) != repr(name)
        ]

    def categories(self) -> list[dict[str, Any]]:
        """Returns COCO's `categories` list, [{"id": ..., "name": ...}, ...]."""
        return [{"id": i, "name": name} for i, name in zip(self.category_ids, self.names, strict=True)]

    def to_json(self) -> str:
        """Returns the map as JSON text."""
        return json.dumps({"categories": self.categories()}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "LabelMap":
        """Reads a JSON object with a COCO `categories` list. Raises UserError for any other text."""
        try:
            categories = list(json.loads(text)["categories"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError('not a label map like {"categories": [{"id": 1, "name": "..."}, ...]}') from error
        return cls.from_categories(categories)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the text of `to_json` to a file."""
        write_bytes(path, (self.to_json() + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "LabelMap":
        """Reads a label map: JSON, or TensorFlow Object Detection's text format (.pbtxt).

        Raises:
            UserError: the file is missing or is not a label map.
        """
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise UserError("it is not a regular file")  # reading a pipe would never end
            text = storage.read(path).decode("utf-8-sig")
            if text.lstrip().startswith("{"):
                return cls.from_json(text)
            categories = _parse_pbtxt(text)
            aliases = {category["id"]: category["alias"] for category in categories}
            label_map = cls.from_categories(categories)
            return dataclasses.replace(label_map, aliases=tuple(aliases[i] for i in label_map.category_ids))
        except storage.StoreError:
            raise
        except UnicodeDecodeError as error:
            raise UserError(f"label map {path}: it is not text in UTF-8: save it as UTF-8") from error
        except (OSError, UserError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"label map {path}: {reason}") from error


def category_faults(categories: Sequence[Any]) -> Iterator[str]:
    """Yields a message for each fault in a list like COCO's `categories`."""
    ids: dict[int, str] = {}
    names: dict[str, int] = {}
    if not categories:
        yield "no categories: at least one class is needed"
    for number, category in enumerate(categories):
        if not isinstance(category, Mapping):
            yield f'categories[{number}] is {category!r}: it needs {{"id": 1, "name": "..."}}'
            continue
        category_id, name = category.get("id"), category.get("name")
        if type(category_id) is not int or not 0 <= category_id <= MAX_CATEGORY_ID:
            yield f"category {name!r} has id {category_id!r}: ids are integers from 0 to {MAX_CATEGORY_ID}"
        elif not isinstance(name, str) or not name or not is_text(name) or "\0" in name:
            yield (
                f"category {category_id} has the name {name!r}: names are non-empty strings in UTF-8 "
                "without a NUL character"
            )
        elif category_id in ids:
            yield f"category id {category_id} is given twice: {ids[category_id]!r} and {name!r}"
        elif name in names:
            yield f"categories {names[name]} and {category_id} have the same name {name!r}"
        else:
            ids[category_id], names[name] = name, category_id


def is_text(name: str) -> bool:
    """Returns whether UTF-8 can encode `name`."""
    return name.encode(errors="ignore").decode() == name


def _parse_pbtxt(text: str) -> list[dict[str, Any]]:
    """Parses `item { id: 1 name: 'x' display_name: "X" }` ... into categories. Display names are preferred,
    and the other names become aliases.

    Source: object_detection/protos/string_int_label_map.proto of tensorflow/models.
    """
    lexer = shlex.shlex(text, posix=True)  # handles quotes and comments
    lexer.whitespace += ":,;"
    lexer.wordchars += "-."
    lexer.escapedquotes += "'"
    categories = []
    try:
        tokens = list(lexer)
        while tokens:
            if tokens[:2] != ["item", "{"]:
                raise ValueError
            end = tokens.index("}")
            fields = dict(zip(tokens[2:end:2], tokens[3:end:2], strict=True))
            category_id, alias = fields.get("id", ""), fields.get("name", "")
            key = int(category_id) if category_id.isdecimal() else category_id
            categories.append({"id": key, "name": fields.get("display_name", alias), "alias": alias})
            del tokens[: end + 1]
    except ValueError as error:
        number = len(categories) + 1
        raise UserError(f"item {number} cannot be parsed: write item {{ id: 1 name: '...' }}") from error
    return categories
