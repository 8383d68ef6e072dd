"""The operators of `--ops`: a table, each row one of DALI's operators or a few of them.

A row says how the operator is called here, which argument may be given without its name, and what shorter
names its arguments have; everything else, names, types, which may be random, is the schema of DALI itself.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nvidia.dali import types

from common import dali_ops, letterbox
from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
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
        required: the arguments without which it cannot be called.
        one_of: arguments of which exactly one is needed.
        any_of: arguments of which at least one is needed.
        excludes: argument -> those that cannot stand beside it.
        layout: the argument that says which layout comes out, "" where it stays.
        needs_color: whether it takes the channels for red, green and blue, whatever they are.
    """

    name: str
    about: str
    arguments: Mapping[str, Argument]
    apply: Apply
    first: str = ""
    aliases: Mapping[str, str] = {}
    required: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    excludes: Mapping[str, tuple[str, ...]] = {}
    layout: str = ""
    needs_color: bool = False


def _call(name: str, api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    return getattr(api.ops, name)(images, **arguments)


def _draw(name: str, api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    return api.draw(getattr(api.ops, name), images, **arguments)


def _dali(
    name: str,
    schema: str,
    about: str,
    *,
    apply: Apply | None = None,
    more: Mapping[str, Argument] = {},
    leave_out: tuple[str, ...] = (),
    **rest: Any,
) -> Operator:
    """A row for an operator of DALI; `more` are arguments of our own, `rest` the other fields of the row."""
    known = {
        k: v for k, v in of_schema(schema).items() if k not in leave_out and not k.endswith(("_z", "_d"))
    }
    return Operator(name, about, known | dict(more), apply or functools.partial(_call, name), **rest)


# --- rows that are more than one call ---


def _crop(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    return api.ops.crop(images, **_filled(arguments))


def _filled(arguments: dict[str, Any]) -> dict[str, Any]:
    """A crop with a colour for what is outside the image is meant to reach there."""
    return {"out_of_bounds_policy": "pad"} | arguments if "fill_values" in arguments else arguments


def _crop_mirror_normalize(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    arguments = {"output_layout": "HWC"} | _filled(arguments)
    if "p" in arguments:
        arguments["mirror"] = api.coin(arguments.pop("p"))
    return api.ops.crop_mirror_normalize(images, **arguments)


def _flip(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    """With probabilities, the axes without one stay; without any, DALI's default: left and right."""
    arguments = dict(arguments)
    random = {axis: arguments.pop(name) for axis, name in _FLIP_AXES.items() if name in arguments}
    if random:
        arguments = {"horizontal": 0} | arguments | {axis: api.coin(p) for axis, p in random.items()}
    return api.ops.flip(images, **arguments)


_FLIP_AXES = {"horizontal": "p", "vertical": "p_vertical"}


def _pad(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    arguments = dict(arguments)
    shape = arguments.pop("shape")
    shape = list(_whole(shape)) if isinstance(shape, list) else api.ops.cast(shape, dtype=types.INT32)
    return api.ops.pad(images, axis_names="HW", shape=shape, **arguments)


def _fit(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    return _fitted(api, images, arguments)[0]


def _fitted(api: Api, images: Data, arguments: dict[str, Any]) -> tuple[Data, Data]:
    """The image as large as fits; its (top, left) in the letterbox."""
    size = api.size(images)
    top, left, height, width = letterbox.geometry(
        api.part(size, 0),
        api.part(size, 1),
        _whole(arguments["size"]),
        arguments.get("centered", False),
        api.math.min,
        api.math.max,
    )
    images = dali_ops.resize(
        images,
        api.ops.stack(height, width),
        antialias=arguments.get("antialias", True),
        interpolation=arguments.get("interp_type", types.INTERP_LINEAR),
        api=api,
    )
    return images, api.ops.stack(top, left)


def _letterbox(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    images, top_left = _fitted(api, images, arguments)
    return dali_ops.place(images, top_left, _whole(arguments["size"]), arguments.get("fill", [0.0]), api)


def _whole(sides: list[float]) -> tuple[int, int]:
    height, width = sides
    return int(height), int(width)


def _warp_affine(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    """By a matrix, or by what it shall do: turned, sheared and scaled about the centre, then moved."""
    arguments = dict(arguments)
    moves = {name: arguments.pop(name) for name in _MOVES if name in arguments}
    if not moves:
        numbers = arguments.pop("matrix")
        if isinstance(numbers, list):
            numbers = api.ops.stack(*(api.constant(number) for number in numbers))
        matrix = api.ops.reshape(numbers, shape=[2, 3])
        return api.ops.warp_affine(images, matrix=matrix, **arguments)
    size = api.ops.cast(api.size(images), dtype=types.FLOAT)
    center = api.ops.stack(api.part(size, 1) * 0.5, api.part(size, 0) * 0.5)  # x, y
    matrix = None
    for name, value in moves.items():
        operator = getattr(api.ops.transforms, _MOVES[name][0])
        about = {} if name == "translate" else {"center": center}
        if name == "angle":
            value = -value  # as fn.rotate: counter-clockwise; the transform turns y downwards
        if name == "scale":
            value = api.ops.stack(value, value) if not isinstance(value, float) else [value, value]
        step = {_MOVES[name][1]: value, **about}
        matrix = operator(**step) if matrix is None else operator(matrix, **step)
    return api.ops.warp_affine(images, matrix=matrix, inverse_map=False, **arguments)


_MOVES = {  # in this order; names of DALI's transform and its argument
    "angle": ("rotation", "angle"),
    "shear": ("shear", "angles"),
    "scale": ("scale", "scale"),
    "translate": ("translation", "offset"),
}


def _layout(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    perm = [2, 0, 1] if arguments["to"] == "CHW" else [1, 2, 0]
    return api.ops.transpose(images, perm=perm)


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
        "Resize",
        "to HEIGHTxWIDTH, or by the shorter or the longer side; mode=not_larger, not_smaller or stretch",
        more={
            "size": _SIDES,
            "mode": _words("default", "stretch", "not_larger", "not_smaller"),
            **dict.fromkeys(("resize_shorter", "resize_longer"), _SIDE),
        },
        leave_out=("resize_x", "resize_y"),
        first="size",
        aliases={"short": "resize_shorter", "long": "resize_longer", **_INTERP},
        one_of=("size", "resize_shorter", "resize_longer"),
    ),
    Operator(
        "fit",
        "as large as fits in HEIGHTxWIDTH, keeping the aspect ratio: the letterbox without its borders",
        {"size": _FIXED_SIDES, **_ANTIALIAS},
        _fit,
        first="size",
        aliases=_INTERP,
        required=("size",),
    ),
    Operator(
        "letterbox",
        "fit, then fill up to HEIGHTxWIDTH: at the top left, or in the middle with centered=1",
        {"size": _FIXED_SIDES, **_ANTIALIAS, "fill": Argument("numbers"), "centered": Argument("flag")},
        _letterbox,
        first="size",
        aliases=_INTERP,
        required=("size",),
    ),
    _dali(
        "crop",
        "Crop",
        "HEIGHTxWIDTH, from the middle, or where x and y say (0..1: at random); fill pads smaller images",
        apply=_crop,
        more={"crop": _SIDES, **_PLACES, **_OUTSIDE},
        first="crop",
        aliases=_CROP_ALIASES,
        any_of=("crop", "crop_h", "crop_w"),
    ),
    _dali(
        "random_resized_crop",
        "RandomResizedCrop",
        "a random part of random_area and random_aspect_ratio, resized to HEIGHTxWIDTH",
        apply=functools.partial(_draw, "random_resized_crop"),
        more={"size": _FIXED_SIDES, **RANDOM_PART},
        first="size",
        aliases={"area": "random_area", "aspect": "random_aspect_ratio", **_INTERP},
        required=("size",),
    ),
    _dali(
        "pad",
        "Pad",
        "below and to the right, to at least HEIGHTxWIDTH",
        apply=_pad,
        more={"shape": _SIDES},
        leave_out=("axes", "axis_names"),
        first="shape",
        aliases={"size": "shape", "fill": "fill_value"},
        required=("shape",),
    ),
    _dali(
        "flip",
        "Flip",
        "left and right; p and p_vertical are probabilities",
        apply=_flip,
        more=dict.fromkeys(_FLIP_AXES.values(), _PROBABILITY),
        leave_out=("depthwise",),
        first="p",
        excludes={p: (axis,) for axis, p in _FLIP_AXES.items()},
    ),
    _dali(
        "rotate",
        "Rotate",
        "by degrees, counter-clockwise; the image grows unless keep_size=1",
        leave_out=("axis",),
        more={"size": _SIDES},
        first="angle",
        aliases={"fill": "fill_value", **_INTERP},
        required=("angle",),
    ),
    _dali(
        "warp_affine",
        "WarpAffine",
        "angle (degrees), shear (degrees, x/y), scale, translate (pixels, x/y); or a matrix of 6 numbers, "
        "from x, y of the result to x, y of the image, with inverse_map=0 the other way",
        apply=_warp_affine,
        more={
            "size": _SIDES,
            "matrix": Argument("numbers", True, count=6),
            "angle": _NUMBER,
            "shear": Argument("numbers", True, count=2),
            "scale": Argument("number", True, lowest=1e-3),
            "translate": Argument("numbers", True, count=2),
        },
        aliases={"fill": "fill_value", **_INTERP},
        any_of=("matrix", *_MOVES),
        excludes={"matrix": tuple(_MOVES), "inverse_map": tuple(_MOVES)},
    ),
    _dali(
        "color_twist",
        "ColorTwist",
        "brightness, contrast, saturation (factors) and hue (degrees) at once",
        needs_color=True,
    ),
    _dali("brightness", "Brightness", "times a factor", first="brightness"),
    _dali("contrast", "Contrast", "a factor about contrast_center", first="contrast"),
    _dali("saturation", "Saturation", "times a factor", first="saturation", needs_color=True),
    _dali("hue", "Hue", "turned by degrees", first="hue", needs_color=True),
    _dali("hsv", "Hsv", "hue (degrees), saturation and value (factors)", needs_color=True),
    _dali(
        "gaussian_blur",
        "GaussianBlur",
        "sigma and window_size in pixels",
        first="sigma",
        any_of=("sigma", "window_size"),
    ),
    _dali(
        "jpeg_compression_distortion",
        "JpegCompressionDistortion",
        "as saved with a JPEG quality of 1 to 100",
        more={"quality": Argument("whole", True, lowest=1, highest=100)},
        first="quality",
        needs_color=True,
    ),
    _dali(
        "crop_mirror_normalize",
        "CropMirrorNormalize",
        "crop, mirror with probability p, (pixels - mean) / std for pixels in 0..255; mean=imagenet brings "
        "std=imagenet; output_layout is HWC unless given",
        apply=_crop_mirror_normalize,
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
        layout="output_layout",
    ),
    _dali("cast", "Cast", "to another dtype; a fraction is rounded", first="dtype", required=("dtype",)),
    Operator(
        "layout",
        "CHW: channels first; HWC: channels last",
        {"to": Argument("word", names=_LAYOUTS)},
        _layout,
        first="to",
        required=("to",),
        layout="to",
    ),
)

OPERATORS: dict[str, Operator] = {row.name: row for row in _ROWS}
