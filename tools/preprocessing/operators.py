"""The operators of `--ops`: a table, each row one of DALI's operators or a few of them.

A row says how the operator is called here, which argument may be given without its name, and what shorter
names its arguments have; everything else, names, types, which may be random, is the schema of DALI itself.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from tools.preprocessing import calls
from tools.preprocessing.apis import Api, Data
from tools.preprocessing.arguments import MAX_SIDE, Argument, of_schema

Apply = Callable[[Api, Data, dict[str, Any]], Data]


class Operator(NamedTuple):
    """A row of the table.

    Attributes:
        name: in `--ops`.
        about: one line for --list_ops.
        arguments: by their names in DALI, or here where there is no such argument there.
        apply: (api, images, drawn arguments) -> images.
        first: the argument whose name may be left out; "" for none.
        aliases: shorter names of arguments.
        needs: arguments of which at least one must be given.
        excludes: argument -> those that cannot stand beside it.
        needs_color: whether it takes the channels for red, green and blue, whatever they are.
    """

    name: str
    about: str
    arguments: Mapping[str, Argument]
    apply: Apply
    first: str = ""
    aliases: Mapping[str, str] = {}
    needs: tuple[str, ...] = ()
    excludes: Mapping[str, tuple[str, ...]] = {}
    needs_color: bool = False


def _dali(
    name: str,
    about: str,
    *,
    apply: Apply | None = None,
    more: Mapping[str, Argument] = {},
    leave_out: tuple[str, ...] = (),
    **rest: Any,
) -> Operator:
    """A row for the operator of DALI of this name; `more` are arguments of our own, `rest` other fields."""
    schema = of_schema(name.title().replace("_", ""))
    known = {k: v for k, v in schema.items() if k not in leave_out and not k.endswith(("_z", "_d"))}
    return Operator(name, about, known | dict(more), apply or functools.partial(calls.call, name), **rest)


# --- the table ---


def _words(*words: str) -> Argument:
    return Argument("word", names={word: word for word in words})


_NUMBER = Argument("number", may_vary=True)
_SIDES = Argument("sides", may_vary=True)
_SIDE = Argument("number", may_vary=True, lowest=1.0, highest=MAX_SIDE)
_PROBABILITY = Argument("number", lowest=0.0, highest=1.0)
_FIXED_SIDES = Argument("sides")
RANDOM_PART = {
    "random_area": Argument("limits", lowest=1e-6, highest=1.0),
    "random_aspect_ratio": Argument("limits", lowest=1e-6),
}
_ANTIALIAS = {"antialias": Argument("flag"), "interp_type": Argument("interpolation")}
_INTERP = {"interp": "interp_type"}
_CROP_ALIASES = {"size": "crop", "x": "crop_pos_x", "y": "crop_pos_y", "fill": "fill_values"}
_PLACES = {name: Argument("number", True, lowest=0.0, highest=1.0) for name in ("crop_pos_x", "crop_pos_y")}
_OUTSIDE = {
    "out_of_bounds_policy": _words("error", "pad", "trim_to_shape"),
    "rounding": _words("round", "truncate"),
}
_LAYOUTS = {"hwc": "HWC", "chw": "CHW"}

_ROWS = (
    _dali(
        "resize",
        "to HEIGHTxWIDTH, or by the shorter or the longer side; mode=not_larger, not_smaller or stretch",
        more={
            "size": _SIDES,
            "mode": _words("default", "stretch", "not_larger", "not_smaller"),
            **dict.fromkeys(("resize_shorter", "resize_longer"), _SIDE),
        },
        leave_out=("resize_x", "resize_y"),
        first="size",
        aliases={"short": "resize_shorter", "long": "resize_longer", **_INTERP},
        needs=("size", "resize_shorter", "resize_longer"),
        excludes={"size": ("resize_shorter", "resize_longer"), "resize_shorter": ("resize_longer",)},
    ),
    Operator(
        "fit",
        "as large as fits in HEIGHTxWIDTH, keeping the aspect ratio: the letterbox without its borders",
        {"size": _FIXED_SIDES, **_ANTIALIAS},
        calls.fit,
        first="size",
        aliases=_INTERP,
        needs=("size",),
    ),
    Operator(
        "letterbox",
        "fit, then fill up to HEIGHTxWIDTH: at the top left, or in the middle with centered=1",
        {"size": _FIXED_SIDES, **_ANTIALIAS, "fill": Argument("numbers"), "centered": Argument("flag")},
        calls.letterbox,
        first="size",
        aliases=_INTERP,
        needs=("size",),
    ),
    _dali(
        "crop",
        "HEIGHTxWIDTH, from the middle, or where x and y say (0..1: at random); fill pads smaller images",
        apply=calls.crop,
        more={"crop": _SIDES, **_PLACES, **_OUTSIDE},
        first="crop",
        aliases=_CROP_ALIASES,
        needs=("crop", "crop_h", "crop_w"),
    ),
    _dali(
        "random_resized_crop",
        "a random part of random_area and random_aspect_ratio, resized to HEIGHTxWIDTH",
        apply=calls.random_resized_crop,
        more={"size": _FIXED_SIDES, **RANDOM_PART},
        first="size",
        aliases={"area": "random_area", "aspect": "random_aspect_ratio", **_INTERP},
        needs=("size",),
    ),
    _dali(
        "pad",
        "below and to the right, to at least HEIGHTxWIDTH",
        apply=calls.pad,
        more={"shape": _SIDES},
        leave_out=("axes", "axis_names"),
        first="shape",
        aliases={"size": "shape", "fill": "fill_value"},
        needs=("shape",),
    ),
    _dali(
        "flip",
        "left and right; p and p_vertical are probabilities",
        apply=calls.flip,
        more=dict.fromkeys(calls.FLIP_AXES.values(), _PROBABILITY),
        leave_out=("depthwise",),
        first="p",
        excludes={p: (axis,) for axis, p in calls.FLIP_AXES.items()},
    ),
    _dali(
        "rotate",
        "by degrees, counter-clockwise; the image grows unless keep_size=1",
        leave_out=("axis",),
        more={"size": _SIDES},
        first="angle",
        aliases={"fill": "fill_value", **_INTERP},
        needs=("angle",),
    ),
    _dali(
        "warp_affine",
        "angle (degrees), shear (degrees, x/y), scale, translate (pixels, x/y); or a matrix of 6 numbers, "
        "from x, y of the result to x, y of the image, with inverse_map=0 the other way",
        apply=calls.warp_affine,
        more={
            "size": _SIDES,
            "matrix": Argument("numbers", True, count=6),
            "angle": _NUMBER,
            "shear": Argument("numbers", True, count=2),
            "scale": Argument("number", True, lowest=1e-3),
            "translate": Argument("numbers", True, count=2),
        },
        aliases={"fill": "fill_value", **_INTERP},
        needs=("matrix", *calls.MOVES),
        excludes={"matrix": tuple(calls.MOVES), "inverse_map": tuple(calls.MOVES)},
    ),
    _dali(
        "color_twist",
        "brightness, contrast, saturation (factors) and hue (degrees) at once",
        needs_color=True,
    ),
    _dali("brightness", "times a factor", first="brightness"),
    _dali("contrast", "a factor about contrast_center", first="contrast"),
    _dali("saturation", "times a factor", first="saturation", needs_color=True),
    _dali("hue", "turned by degrees", first="hue", needs_color=True),
    _dali("hsv", "hue (degrees), saturation and value (factors)", needs_color=True),
    _dali("gaussian_blur", "sigma and window_size in pixels", first="sigma", needs=("sigma", "window_size")),
    _dali(
        "jpeg_compression_distortion",
        "as saved with a JPEG quality of 1 to 100",
        more={"quality": Argument("whole", True, lowest=1, highest=100)},
        first="quality",
        needs_color=True,
    ),
    _dali(
        "crop_mirror_normalize",
        "crop, mirror with probability p, (pixels - mean) / std for pixels in 0..255; mean=imagenet brings "
        "std=imagenet; output_layout is HWC unless given",
        apply=calls.crop_mirror_normalize,
        more={
            "crop": _SIDES,
            **_PLACES,
            **_OUTSIDE,
            "mean": Argument("numbers", True, {"imagenet": IMAGENET_MEAN}),
            "std": Argument("numbers", True, {"imagenet": IMAGENET_STD}, lowest=1e-6),
            "output_layout": Argument("word", names=_LAYOUTS),
            "p": _PROBABILITY,
        },
        leave_out=("pad_output",),
        first="crop",
        aliases={**_CROP_ALIASES, "layout": "output_layout"},
        excludes={"p": ("mirror",)},
    ),
    _dali("cast", "to another dtype; a fraction is rounded", first="dtype", needs=("dtype",)),
    Operator(
        "layout",
        "CHW: channels first; HWC: channels last",
        {"output_layout": Argument("word", names=_LAYOUTS)},
        calls.layout,
        first="output_layout",
        aliases={"to": "output_layout"},
        needs=("output_layout",),
    ),
)

OPERATORS: dict[str, Operator] = {row.name: row for row in _ROWS}
