"""Opens images from a user's Python code: encoded images, or arrays (H, W, C) of uint8 or float32.

--input names a sequence, an iterable, a function without arguments that returns an iterable, or a function
that takes DALI's SampleInfo or BatchInfo. Each step takes one element, or calls the function once, and gets a
sample or a batch. A sample is `image` or `(image, label)`. A batch is a list of samples, `(images, labels)`,
or an array (N, H, W, C).

A pipeline resumes exactly only if the same step always gets the same sample or batch.
"""

import functools
import importlib
import importlib.util
import inspect
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import types

from common.errors import UserError
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Content, Found, Image, Opening

_MOST = 1_000_000  # steps; more are considered endless
_WANTED = "an image must be bytes, or an array: uint8 (bytes,), or uint8 or float32 (height, width, channels)"
_Sample = tuple[np.ndarray, int | None]


def open_external(opening: Opening) -> Content:
    """Opens --source=external: `FILE.py:name` or `package.module:name`."""
    path = opening.path
    step, can_shuffle = _function_of(_imported(path), path)

    @functools.lru_cache(maxsize=1)
    def samples(number: int) -> list[_Sample] | None:
        owner = f"{path}: step {number}"
        try:
            item = step(number)
        except StopIteration:
            return None
        except Exception as error:
            raise UserError(f"{owner} raised {_one_line(error)}") from error
        return [_sample(each, owner) for each in _items(item, owner)]

    def images() -> Iterator[Found]:
        count = 0
        for number in range(_MOST + 1):
            found = samples(number)
            if found is None:
                return
            for place, (array, label) in enumerate(found):
                image = Image(f"sample-{count}", "", label, (number, place), _form(array))
                yield image, image.name, array
                count += 1
        raise UserError(f"{path} has more than {_MOST} steps: raise StopIteration at the end")

    def load(image: Image) -> np.ndarray:
        number, place = image.place
        found = samples(number) or []
        if place >= len(found) or _form(found[place][0]) != image.form:
            raise UserError(
                f"{path}: {image.name} was {image.form} when it was checked, but differs now: always return"
                " the same samples"
            )
        return found[place][0]

    return Content(images(), load, lambda *_: None, can_shuffle)


def _imported(path: str) -> Any:
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise UserError(f"--input={path} must be FILE.py:name or package.module:name")
    try:
        sys.path.append(os.path.dirname(os.path.abspath(place)) if place.endswith(".py") else os.getcwd())
        if place.endswith(".py"):
            module_name = f"external_{os.path.basename(place).removesuffix('.py')}"
            spec = importlib.util.spec_from_file_location(module_name, place)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module  # for dataclasses
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return operator.attrgetter(name)(module)
    except Exception as error:
        raise UserError(f"--input={path}: importing it raised {_one_line(error)}") from error


def _function_of(found: Any, path: str) -> tuple[Callable[[int], Any], bool]:
    """Returns a function (step number -> sample or batch), and whether steps can run in any order."""
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return lambda number: found[number] if number < len(found) else next(iter(())), True
    if isinstance(found, Iterable) and not isinstance(found, Iterator | type):
        return _Iterable(lambda: found), False
    if callable(found) and not isinstance(found, type):
        parameters = inspect.signature(found).parameters.values()
        given = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        needed = [p for p in given if p.default is p.empty]
        if not needed:
            return _Iterable(found), False
        if len(needed) == 1 and "BatchInfo" in str(needed[0].annotation):
            return lambda number: found(types.BatchInfo(number, 0)), True
        if len(needed) == 1:
            return lambda number: found(types.SampleInfo(number, 0, number, 0)), True
    raise UserError(
        f"--input={path} is {getattr(found, '__name__', type(found).__name__)!r}: use a sequence, an"
        " iterable that can be iterated repeatedly, or a function of SampleInfo, BatchInfo or no argument"
    )


class _Iterable:
    """Returns elements of an iterable by number. An earlier element starts a new iteration."""

    def __init__(self, make: Callable[[], Iterable]) -> None:
        self._make, self._next, self._left = make, 0, iter(())

    def __call__(self, number: int) -> Any:
        if not 0 < self._next <= number:
            self._next, self._left = 0, iter(self._make())
        skipped, self._next = number - self._next, number + 1
        return next(itertools.islice(self._left, skipped, None))


def _form(image: np.ndarray) -> str:
    return "encoded" if image.ndim == 1 else image.dtype.name


def _items(item: Any, owner: str) -> list[Any]:
    if isinstance(item, list):
        return item
    images, labels = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(images, list) and not (isinstance(images, np.ndarray) and images.ndim == 4):
        return [item]
    if labels is None:
        return list(images)
    labels = np.ravel(labels)
    if len(labels) != len(images):
        raise UserError(f"{owner} returned {len(images)} images, but a different number of labels")
    return list(zip(images, labels, strict=True))


def _sample(item: Any, owner: str) -> _Sample:
    image, label = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if isinstance(image, bytes | bytearray | memoryview):
        image = np.frombuffer(image, np.uint8)
    kind = (image.ndim, image.dtype.name) if isinstance(image, np.ndarray) else ()
    if kind not in ((1, "uint8"), (3, "uint8"), (3, "float32")) or (image.ndim == 3 and not image.size):
        what = f"{image.dtype} of the shape {image.shape}" if kind else type(image).__name__
        raise UserError(f"{owner} returned {what}: {_WANTED}")
    if label is not None:
        label = np.asarray(label)
        if label.size != 1 or label.dtype.kind not in "iuf":
            raise UserError(f"{owner} returned the label {label.tolist()!r}: use one whole number")
        label = base.check_label(label.item(), owner)
    return np.ascontiguousarray(image), label


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
