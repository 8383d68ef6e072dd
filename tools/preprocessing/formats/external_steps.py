"""What a user's Python gives, one step at a time, by number.

What may be named: a sequence, a function that takes DALI's SampleInfo or BatchInfo, or an iterable, or a
function without arguments that makes one.
"""

import abc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nvidia.dali import types

from common.errors import UserError, unknown


class Steps(abc.ABC):
    """Steps, each a sample or a batch, that can be asked for again.

    Attributes:
        in_any_order: asking for one costs no more than asking for the next.
    """

    in_any_order = True

    @abc.abstractmethod
    def step(self, number: int) -> Any:
        """What there is; StopIteration behind the last one."""


class _SequenceSteps(Steps):
    def __init__(self, sequence: Sequence):
        self._sequence = sequence

    def step(self, number: int) -> Any:
        if number >= len(self._sequence):
            raise StopIteration
        return self._sequence[number]


class _FunctionSteps(Steps):
    def __init__(self, function: Callable[[Any], Any], of_batches: bool):
        self._function, self._of_batches = function, of_batches

    def step(self, number: int) -> Any:
        if self._of_batches:
            return self._function(types.BatchInfo(number, 0))
        return self._function(types.SampleInfo(number, 0, number, 0))


class _IterableSteps(Steps):
    """Whoever asks for a step that has gone by has the iterable run through again."""

    in_any_order = False

    def __init__(self, make: Callable[[], Iterable]):
        self._make = make
        self._iterator: Iterator | None = None
        self._next = 0

    def step(self, number: int) -> Any:
        if self._iterator is None or number < self._next:
            self._iterator, self._next = iter(self._make()), 0
        while True:
            item = next(self._iterator)
            self._next += 1
            if self._next > number:
                return item


def load(path: str) -> Steps:
    """The steps of what --input names: `FILE.py:name` or `package.module:name`.

    Raises:
        UserError: it cannot be imported, or is nothing that gives samples.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"--input={path} names nothing in Python: FILE.py:name or package.module:name")
    module = _module(place, path)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise unknown(f"name in {place}", name, [known for known in vars(module) if known[0] != "_"])
        found = getattr(found, part)
    return _steps_of(found, path)


def _module(place: str, path: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not os.path.isfile(place):
            raise UserError(f"--input={path}: there is no file {place}")
        name = f"external_{os.path.basename(place).removesuffix('.py')}"
        spec = importlib.util.spec_from_file_location(name, place)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look there
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--input={path}: importing {place} raised {said(error)}") from error
    return module


def _steps_of(found: Any, path: str) -> Steps:
    if isinstance(found, type):
        raise UserError(f"--input={path} is a class: name an instance of it, or a function that makes one")
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return _SequenceSteps(found)
    if callable(found):
        parameters = [
            parameter
            for parameter in inspect.signature(found).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if len(parameters) == 1:
            of_batches = parameters[0].annotation in (types.BatchInfo, "BatchInfo", "types.BatchInfo")
            return _FunctionSteps(found, of_batches)
        if not parameters:
            return _IterableSteps(found)
        raise UserError(f"--input={path} takes {len(parameters)} arguments: SampleInfo, BatchInfo or none")
    if isinstance(found, Iterator):
        raise UserError(f"--input={path} is used up by one pass: name the function that makes it")
    if isinstance(found, Iterable):
        return _IterableSteps(lambda: found)
    raise UserError(f"--input={path} is {type(found).__name__}: name a function, a sequence or an iterable")


def said(error: BaseException) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
