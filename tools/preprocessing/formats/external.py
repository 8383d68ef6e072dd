"""Images that a user's Python gives: encoded, or as arrays (H, W, C) of uint8 or float32.

--input names a sequence, a function that takes DALI's SampleInfo or BatchInfo, an iterable, or a function
without arguments that makes one. Each step gives a sample, `image` or `(image, label)`, or a batch: a list of
samples, `(images, labels)`, or an array (N, H, W, C). Samples are numbered through all steps.

Samples are asked for by number, so a pipeline over them resumes exactly, if the same number gives the same
sample. An iterable is run through again up to there.
"""

import functools
import importlib
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import types

from common.datacheck import images
from common.datacheck.images import ImageFacts, ImagePolicy
from common.errors import UserError, unknown
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Image, ImageSource, SourceFlags

_MOST = 1_000_000  # steps: what gives more is taken to have no end
_ENCODED = "encoded"
_WANTED = "an image is bytes, uint8 (bytes,), or uint8 or float32 (height, width, channels)"
_Sample = tuple[np.ndarray, int | None]


def open_external(flags: SourceFlags) -> ImageSource:
    """--source=external: `FILE.py:name` or `package.module:name`."""
    step_samples, in_any_order = _steps(flags.path)
    found: list[Image] = []
    for number in range(_MOST + 1):
        samples = step_samples(number)
        if samples is None:
            break
        for place, (image, label) in enumerate(samples):
            found.append(_check(f"sample-{len(found)}", image, label, (number, place), flags.policy))
    else:
        raise UserError(f"{flags.path} goes on after {_MOST} steps: raise StopIteration at the end")
    if not found:
        raise UserError(f"{flags.path} gives no sample")

    def load(image: Image) -> np.ndarray:
        step, place = image.place
        samples = step_samples(step) or []
        if place >= len(samples) or _form(samples[place][0]) != image.form:
            raise UserError(f"{flags.path}: {image.name} was {image.form} before, and is not any more")
        return samples[place][0]

    return base.make_source(
        "external",
        flags,
        found,
        load,
        lambda kept: None,
        is_decoded=any(image.form != _ENCODED for image in found if not image.fault),
        can_shuffle=in_any_order,
    )


def _steps(path: str) -> tuple[Callable[[int], list[_Sample] | None], bool]:
    """What the Python that --input names gives.

    Returns:
        number of a step -> its samples, None behind the last one, or a UserError where the user's code raised
        an error or gave what is no sample; whether any step costs no more than the next one.
    """
    step, in_any_order = _function_of(_imported(path), path)

    @functools.lru_cache(maxsize=1)  # the samples of a batch are asked for one by one
    def samples(number: int) -> list[_Sample] | None:
        owner = f"{path}: step {number}"
        try:
            item = step(number)
        except StopIteration:
            return None
        except Exception as error:
            raise UserError(f"{owner} raised {_one_line(error)}") from error
        return _samples(item, owner)

    return samples, in_any_order


def _imported(path: str) -> Any:
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise UserError(f"--input={path} names nothing in Python: FILE.py:name or package.module:name")
    try:
        if place.endswith(".py"):
            module_name = f"external_{os.path.basename(place).removesuffix('.py')}"
            spec = importlib.util.spec_from_file_location(module_name, place)
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module  # dataclasses look there
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except Exception as error:
        raise UserError(f"--input={path}: importing {place} raised {_one_line(error)}") from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        known = [known for known in vars(module) if known[0] != "_"]
        raise unknown(f"name in {place}", name, known) from error


def _function_of(found: Any, path: str) -> tuple[Callable[[int], Any], bool]:
    """(number -> step, raising StopIteration behind the last one; whether in any order)."""
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return _sequence(found), True
    if callable(found) and not isinstance(found, type):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(found).parameters.values()
        parameters = [p for p in parameters if p.default is p.empty and p.kind in kinds]
        if len(parameters) == 1:
            if parameters[0].annotation in (types.BatchInfo, "BatchInfo", "types.BatchInfo"):
                return lambda number: found(types.BatchInfo(number, 0)), True
            return lambda number: found(types.SampleInfo(number, 0, number, 0)), True
        if not parameters:
            return _iterable(found), False
    elif isinstance(found, Iterable) and not isinstance(found, Iterator | type):
        return _iterable(lambda: found), False
    raise UserError(
        f"--input={path} is {getattr(found, '__name__', type(found).__name__)!r}: name a sequence, an"
        " iterable that is not used up by one pass, or a function of SampleInfo, BatchInfo or no argument"
    )


def _sequence(found: Any) -> Callable[[int], Any]:
    def step(number: int) -> Any:
        if number >= len(found):
            raise StopIteration
        return found[number]

    return step


def _iterable(make: Callable[[], Iterable]) -> Callable[[int], Any]:
    """Asked for a step that has gone by, it runs the iterable through again."""
    iterator, following = iter(()), -1

    def step(number: int) -> Any:
        nonlocal iterator, following
        if not 0 <= following <= number:
            iterator, following = iter(make()), 0
        while True:
            item = next(iterator)
            following += 1
            if following > number:
                return item

    return step


def _check(
    name: str, array: np.ndarray, label: int | None, place: tuple[int, int], policy: ImagePolicy
) -> Image:
    image = Image(name, "", label, place, _form(array))
    if image.form == _ENCODED:
        return image.checked(array.tobytes(), name, policy)
    facts = images.limited(ImageFacts("array", array.shape[0], array.shape[1]), policy.max_megapixels)
    return image.judged(facts, name)


def _form(image: np.ndarray) -> str:
    return _ENCODED if image.ndim == 1 else image.dtype.name


def _samples(item: Any, owner: str) -> list[_Sample]:
    """What a step gave, as samples."""
    if isinstance(item, list):
        return [_sample(part, f"{owner}, place {place}") for place, part in enumerate(item)]
    batch, labels = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(batch, list) and not (isinstance(batch, np.ndarray) and batch.ndim == 4):
        return [_sample(item, owner)]
    if labels is None:
        labels = [None] * len(batch)
    if not hasattr(labels, "__len__") or len(labels) != len(batch):
        raise UserError(f"{owner} gave {len(batch)} images, and not as many labels")
    return [
        _sample(sample, f"{owner}, place {i}") for i, sample in enumerate(zip(batch, labels, strict=True))
    ]


def _sample(item: Any, owner: str) -> _Sample:
    image, label = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if isinstance(image, bytes | bytearray | memoryview):
        image = np.frombuffer(image, np.uint8)
    if not isinstance(image, np.ndarray):
        raise UserError(f"{owner} gave {type(image).__name__}: {_WANTED}")
    is_encoded = image.ndim == 1 and image.dtype == np.uint8
    is_array = image.ndim == 3 and image.dtype in (np.uint8, np.float32) and image.size
    if not is_encoded and not is_array:
        raise UserError(f"{owner} gave {image.dtype} of the shape {image.shape}: {_WANTED}")
    if label is not None:
        label = np.asarray(label)
        if label.size != 1 or label.dtype.kind not in "iuf":
            raise UserError(f"{owner} gave the label {label.tolist()!r}: a label is one whole number")
        label = base.check_label(label.item(), owner)
    return np.ascontiguousarray(image), label


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
