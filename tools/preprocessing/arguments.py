"""Arguments of the operators in `--ops`: allowed values, parsing of text, and random values.

Names and types come from DALI's schemas. RULES adds what the schemas lack. OWN has arguments that DALI does
not have.
"""

import math
import re
from typing import Any, NamedTuple

from nvidia.dali import backend, types

from common.dali_ops import Data
from common.errors import UserError, unknown
from tools.preprocessing.apis import Api

MAX_SIDE = 65_535  # pixels: the largest side of a JPEG
IMAGENET = "imagenet"  # in --ops: the mean or the standard deviation of ImageNet
_DTYPES = ("uint8", "int16", "int32", "int64", "float16", "float")
WORDS = {  # kind of argument -> word -> value
    "flag": {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False},
    "exif": {"turn": True, "ignore": False},
    "color": {"rgb": types.RGB, "bgr": types.BGR, "gray": types.GRAY},
    "layout": {"hwc": "HWC", "chw": "CHW"},
    "dtype": {name: getattr(types, name.upper()) for name in _DTYPES} | {"float32": types.FLOAT},
    "interpolation": {
        "nearest": types.INTERP_NN,
        "linear": types.INTERP_LINEAR,
        "cubic": types.INTERP_CUBIC,
        "lanczos": types.INTERP_LANCZOS3,
        "triangular": types.INTERP_TRIANGULAR,
        "gaussian": types.INTERP_GAUSSIAN,
    },
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


class Range(NamedTuple):
    """A random number from low to high for each image."""

    low: float
    high: float


class Argument(NamedTuple):
    """The values that an argument accepts.

    Attributes:
        kind: a key of WORDS, or one of these:
            "word": any word.
            "number", "numbers": one number, or several (`1/2/3`).
            "statistics": numbers, or `imagenet`.
            "sides": `HEIGHTxWIDTH` in pixels, or one number for both.
            "limits": `low..high`, for an operator that draws the random number itself.
        may_vary: whether a Range is allowed. Each image gets a random number from a Range.
        is_integer: whether DALI expects int32.
        low, high: the smallest and the largest allowed number.
    """

    kind: str
    may_vary: bool = False
    is_integer: bool = False
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_whole(self) -> bool:
        return self.is_integer or self.kind == "sides"

    def parse(self, text: str) -> Any:
        """Converts text to a number, a Range, a tuple of numbers and Ranges, or the value of a word.

        Raises UserError for any other text.
        """
        words = WORDS.get(self.kind, {})
        if words and text.lower() not in words:
            raise unknown("value", text, words)
        if words:
            return words[text.lower()]
        if self.kind == "word" or (self.kind, text) == ("statistics", IMAGENET):
            return text
        if self.kind == "number":
            return self._number(text)
        numbers = tuple(map(self._number, re.split(r"\.\." if self.kind == "limits" else "x|/", text)))
        is_for_both = self.kind in ("sides", "limits") and len(numbers) == 1
        return numbers * 2 if is_for_both and not isinstance(numbers[0], Range) else numbers

    def _number(self, text: str) -> float | Range:
        match = re.fullmatch(rf"({_NUMBER})(?:\.\.({_NUMBER}))?", text.strip())
        values = [float(part) for part in match.groups() if part is not None] if match else []
        is_right = all(self.low <= value <= self.high for value in values)
        if self.is_whole:
            is_right = is_right and all(map(float.is_integer, values))
        if not is_right or not values or (len(values) > 1 and not self.may_vary):
            limits = f" from {self.low:g} to {self.high:g}" if self.low > -math.inf else ""
            ranges = ", or a range such as 0.8..1.2" if self.may_vary else ""
            raise UserError(f"{text!r} is not a {'whole ' * self.is_whole}number{limits}{ranges}")
        return values[0] if len(set(values)) == 1 else Range(*values)

    def draw(self, api: Api, value: Any) -> Any:
        """Returns `value` with a random number per image in place of each Range."""
        if isinstance(value, Range):
            drawn = self._drawn(api, value)
        elif isinstance(value, tuple) and any(isinstance(part, Range) for part in value):
            parts = [self._drawn(api, part) if isinstance(part, Range) else part for part in value]
            drawn = api.ops.stack(*(parts * 2 if self.kind == "sides" and len(parts) == 1 else parts))
        elif isinstance(value, tuple):
            return [int(part) if self.is_integer else part for part in value]
        else:
            return int(value) if self.is_integer and isinstance(value, float) else value
        return api.ops.cast(drawn, dtype=types.INT32) if self.is_integer else drawn

    def _drawn(self, api: Api, limits: Range) -> Data:
        if not self.is_whole:
            return api.draw("random.uniform", range=tuple(limits))
        # In float32 a number may be rounded up to `high + 1`.
        drawn = api.math.floor(api.draw("random.uniform", range=(limits.low, limits.high + 1.0)))
        return api.math.min(drawn, limits.high)


_KINDS = {  # the schema's type -> (kind, is_integer)
    types.DALIDataType.FLOAT: ("number", False),
    types.DALIDataType.INT32: ("number", True),
    types.DALIDataType.BOOL: ("flag", False),
    types.DALIDataType.STRING: ("word", False),
    types.DALIDataType._FLOAT_VEC: ("numbers", False),
    types.DALIDataType._INT32_VEC: ("numbers", True),
    types.DALIDataType.DATA_TYPE: ("dtype", False),
    types.DALIDataType.INTERP_TYPE: ("interpolation", False),
    types.DALIDataType.TENSOR_LAYOUT: ("layout", False),
}
# DALI's arguments that `--ops` does not have.
_LEFT_OUT = re.compile(
    "seed|preserve|save_attrs|minibatch_size|affine|pad_output|depthwise|axis|axes|axis_names|resize_[xy]|"
    "end|rel_end|normalized_.*|adjust_orientation|cache_.*|.*_(hint|padding|jpeg2k|z|d)"
)
_SIDES = {"kind": "sides", "low": 1.0, "high": MAX_SIDE}
_SIDE = {"low": 1.0, "high": MAX_SIDE}
_SHARE: dict[str, Any] = {"low": 0.0, "high": 1.0}
RULES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("size", "crop", "shape"), _SIDES),
    **dict.fromkeys(("resize_shorter", "resize_longer"), _SIDE),
    **dict.fromkeys(("crop_pos_x", "crop_pos_y"), _SHARE),
    "random_area": {"kind": "limits", "low": 1e-6, "high": 1.0},
    "random_aspect_ratio": {"kind": "limits", "low": 1e-6},
    "quality": {"low": 1.0, "high": 100.0},
    "mean": {"kind": "statistics"},
    "std": {"kind": "statistics", "low": 1e-6},
}
OWN = {
    **dict.fromkeys(("p", "p_vertical"), Argument("number", **_SHARE)),
    "color": Argument("color"),
    "exif": Argument("exif"),
    "centered": Argument("flag"),
    "fill": Argument("numbers"),
    "angle": Argument("number", may_vary=True),
    "shear": Argument("numbers", may_vary=True),
    "scale": Argument("number", may_vary=True, low=1e-3),
    "translate": Argument("numbers", may_vary=True),
}
ALIASES = {
    "size": ("crop", "shape"),
    "fill": ("fill_values", "fill_value"),
    "short": ("resize_shorter",),
    "long": ("resize_longer",),
    "interp": ("interp_type",),
    "x": ("crop_pos_x",),
    "y": ("crop_pos_y",),
    "area": ("random_area",),
    "aspect": ("random_aspect_ratio",),
    "layout": ("output_layout",),
    "to": ("output_layout",),
}


def of_schema(schema_name: str) -> dict[str, Argument]:
    """Returns the arguments of a DALI operator, such as "CropMirrorNormalize"."""
    schema = backend.GetSchema(schema_name)
    found = {}
    for name in schema.GetArgumentNames():
        kind = _KINDS.get(schema.GetArgumentType(name))
        if kind and not schema.IsDeprecatedArg(name) and not _LEFT_OUT.fullmatch(name):
            found[name] = Argument(kind[0], schema.IsTensorArgument(name), kind[1])
            found[name] = found[name]._replace(**RULES.get(name, {}))
    return found
