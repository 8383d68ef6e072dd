"""Values of arguments in `--ops`: their kinds, how text becomes a value, and random draws.

The kinds of DALI's own arguments come from the operators' schemas, so that what is accepted is what DALI
accepts. A value may be a range, `0.8..1.2`, where the schema takes a value for each image: then one is drawn
for each.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nvidia.dali import backend, types

from common.errors import UserError, unknown
from tools.preprocessing.apis import Api, Data

DTYPES = {
    "uint8": types.UINT8,
    "int16": types.INT16,
    "int32": types.INT32,
    "int64": types.INT64,
    "float16": types.FLOAT16,
    "float": types.FLOAT,
    "float32": types.FLOAT,
}
INTERPOLATIONS = {
    "nearest": types.INTERP_NN,
    "linear": types.INTERP_LINEAR,
    "cubic": types.INTERP_CUBIC,
    "lanczos": types.INTERP_LANCZOS3,
    "triangular": types.INTERP_TRIANGULAR,
    "gaussian": types.INTERP_GAUSSIAN,
}
COLORS = {"rgb": types.RGB, "bgr": types.BGR, "gray": types.GRAY}
MAX_SIDE = 65_535  # pixels; what JPEG can hold, and more of both sides than memory can
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_WORDS = {"dtype": DTYPES, "interpolation": INTERPOLATIONS, "color": COLORS, "flag": FLAGS}
_KINDS = {  # by the schema's type
    types.DALIDataType.FLOAT: "number",
    types.DALIDataType.INT32: "whole",
    types.DALIDataType.BOOL: "flag",
    types.DALIDataType.STRING: "word",
    types.DALIDataType._FLOAT_VEC: "numbers",
    types.DALIDataType._INT32_VEC: "wholes",
    types.DALIDataType.DATA_TYPE: "dtype",
    types.DALIDataType.INTERP_TYPE: "interpolation",
    types.DALIDataType.IMAGE_TYPE: "color",
    types.DALIDataType.TENSOR_LAYOUT: "word",
}
# Arguments of any operator that are no business of who describes pixels.
_INTERNAL = {
    "bytes_per_sample_hint",
    "preserve",
    "seed",
    "temp_buffer_hint",
    "minibatch_size",
    "save_attrs",
    "image_type",  # follows from the decoding
    "device",
}


class Range(NamedTuple):
    """A number drawn for each image, from low to high."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Argument:
    """What an argument may be.

    Attributes:
        kind: "number", "whole" (number), "numbers" or "wholes" (`1/2/3`), "sides" (`HEIGHTxWIDTH` in pixels,
            or one number for both), "limits" (`low..high`, for operators that draw themselves), "flag",
            "word", "dtype", "interpolation" or "color".
        may_vary: whether it may be drawn for each image.
        names: words that stand for a value.
        count: how many numbers there must be; 0: any.
        lowest, highest: of each number.
    """

    kind: str
    may_vary: bool = False
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 0
    lowest: float = -math.inf
    highest: float = math.inf

    def parse(self, text: str) -> Any:
        """Text -> a number, a Range, a tuple of them, a bool, a word or a value of DALI's.

        Raises:
            UserError: without the argument's name, which the caller puts before it.
        """
        words = self.names or _WORDS.get(self.kind, {})
        if text.lower() in words:
            return words[text.lower()]
        if self.kind in _WORDS or (self.kind == "word" and words):
            raise unknown("value", text, words)
        if self.kind == "word":
            return text
        if self.kind in ("number", "whole"):
            return self._number(text)
        if self.kind == "limits":
            limits = dataclasses.replace(self, may_vary=True)._number(text)
            return tuple(limits) if isinstance(limits, Range) else (limits, limits)
        numbers = tuple(self._number(part) for part in re.split("x|/", text))
        if self.count and len(numbers) != self.count:
            raise UserError(f"{text!r} has {len(numbers)} numbers, and {self.count} are needed")
        if self.kind == "sides":
            if len(numbers) > 2:
                raise UserError(f"{text!r} is not HEIGHTxWIDTH in pixels, as 224x224")
            return numbers * 2 if len(numbers) == 1 and not isinstance(numbers[0], Range) else numbers
        return numbers

    def _number(self, text: str) -> float | Range:
        match = re.fullmatch(rf"({_NUMBER})(?:\.\.({_NUMBER}))?", text.strip())
        whole = self.kind in ("whole", "wholes", "sides")
        values = [float(part) for part in match.groups() if part is not None] if match else []
        if not values or (whole and not all(value.is_integer() for value in values)):
            wanted = "whole number" if whole else "number"
            example = " or a range of them, as 0.8..1.2" if self.may_vary and not whole else ""
            names = f" nor one of {', '.join(self.names)}" if self.names else ""
            raise UserError(f"{text!r} is no {wanted}{example}{names}")
        lowest, highest = (1, MAX_SIDE) if self.kind == "sides" else (self.lowest, self.highest)
        for value in values:
            if not lowest <= value <= highest:
                limits = f"{lowest:g} or more" if highest == math.inf else f"{lowest:g} to {highest:g}"
                raise UserError(f"{text} is out of range: it must be {limits}")
        if whole:
            values = [int(value) for value in values]
        if len(values) == 1:
            return values[0]
        if not self.may_vary:
            raise UserError(f"{text} is a range, and this cannot be drawn at random: give one number")
        return Range(*values) if values[0] != values[1] else values[0]


def of_schema(schema_name: str) -> dict[str, Argument]:
    """The arguments of one of DALI's operators, by its schema ("CropMirrorNormalize")."""
    schema = backend.GetSchema(schema_name)
    names = [name for name in schema.GetArgumentNames() if not schema.IsDeprecatedArg(name)]
    return {
        name: Argument(_KINDS[schema.GetArgumentType(name)], schema.IsTensorArgument(name))
        for name in names
        if name not in _INTERNAL and schema.GetArgumentType(name) in _KINDS
    }


def draw(api: Api, argument: Argument, value: Any) -> Any:
    """What is given to the operator: `value`, or numbers drawn for each image where it holds a Range."""
    whole = argument.kind in ("whole", "wholes", "sides")
    if isinstance(value, Range):
        drawn = _drawn(api, value, whole)
        return api.ops.cast(drawn, dtype=types.INT32) if argument.kind == "whole" else drawn
    if not isinstance(value, tuple):
        return float(value) if argument.kind == "number" else value
    if not any(isinstance(part, Range) for part in value):
        return [int(part) if argument.kind == "wholes" else float(part) for part in value]
    parts = [_drawn(api, part, whole) if isinstance(part, Range) else api.constant(part) for part in value]
    if argument.kind == "sides" and len(parts) == 1:
        parts *= 2  # one draw for both
    drawn = api.ops.stack(*parts)
    return api.ops.cast(drawn, dtype=types.INT32) if argument.kind == "wholes" else drawn


def _drawn(api: Api, limits: Range, whole: bool) -> Data:
    if whole:  # both ends included
        # float32 may round the upper end up to itself
        return api.math.min(api.math.floor(api.uniform(limits.low, limits.high + 1.0)), float(limits.high))
    return api.uniform(limits.low, limits.high)
