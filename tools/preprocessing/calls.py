"""Operators of `--ops` that are more than one call of DALI: (api, images, drawn arguments) -> images."""

from typing import Any

from nvidia.dali import types

from common import dali_ops
from common import letterbox as letterbox_geometry
from tools.preprocessing.apis import Api, Data


def call(name: str, api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    """The operator of DALI of this name, as it is."""
    return getattr(api.ops, name)(images, **arguments)


def random_resized_crop(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    return api.draw(api.ops.random_resized_crop, images, **arguments)


def crop(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    return api.ops.crop(images, **_filled(arguments))


def _filled(arguments: dict[str, Any]) -> dict[str, Any]:
    """A crop with a colour for what is outside the image is meant to reach there."""
    return {"out_of_bounds_policy": "pad"} | arguments if "fill_values" in arguments else arguments


def crop_mirror_normalize(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    arguments = {"output_layout": "HWC"} | _filled(arguments)
    if "p" in arguments:
        arguments["mirror"] = api.coin(arguments.pop("p"))
    return api.ops.crop_mirror_normalize(images, **arguments)


def flip(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    """With probabilities, the axes without one stay; without any, DALI's default: left and right."""
    arguments = dict(arguments)
    random = {axis: arguments.pop(name) for axis, name in FLIP_AXES.items() if name in arguments}
    if random:
        arguments = {"horizontal": 0} | arguments | {axis: api.coin(p) for axis, p in random.items()}
    return api.ops.flip(images, **arguments)


FLIP_AXES = {"horizontal": "p", "vertical": "p_vertical"}


def pad(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    arguments = dict(arguments)
    shape = arguments.pop("shape")
    shape = list(_whole(shape)) if isinstance(shape, list) else api.ops.cast(shape, dtype=types.INT32)
    return api.ops.pad(images, axis_names="HW", shape=shape, **arguments)


def fit(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    return _fitted(api, images, arguments)[0]


def _fitted(api: Api, images: Data, arguments: dict[str, Any]) -> tuple[Data, Data]:
    """The image as large as fits; its (top, left) in the letterbox."""
    size = api.size(images)
    top, left, height, width = letterbox_geometry.geometry(
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


def letterbox(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    images, top_left = _fitted(api, images, arguments)
    return dali_ops.place(images, top_left, _whole(arguments["size"]), arguments.get("fill", [0.0]), api)


def _whole(sides: list[float]) -> tuple[int, int]:
    height, width = sides
    return int(height), int(width)


def warp_affine(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    """By a matrix, or by what it shall do: turned, sheared and scaled about the centre, then moved."""
    arguments = dict(arguments)
    moves = {name: arguments.pop(name) for name in MOVES if name in arguments}
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
        operator = getattr(api.ops.transforms, MOVES[name][0])
        about = {} if name == "translate" else {"center": center}
        if name == "angle":
            value = -value  # as fn.rotate: counter-clockwise; the transform turns y downwards
        if name == "scale":
            value = api.ops.stack(value, value) if not isinstance(value, float) else [value, value]
        step = {MOVES[name][1]: value, **about}
        matrix = operator(**step) if matrix is None else operator(matrix, **step)
    return api.ops.warp_affine(images, matrix=matrix, inverse_map=False, **arguments)


MOVES = {  # in this order; names of DALI's transform and its argument
    "angle": ("rotation", "angle"),
    "shear": ("shear", "angles"),
    "scale": ("scale", "scale"),
    "translate": ("translation", "offset"),
}


def layout(api: Api, images: Data, arguments: dict[str, Any]) -> Data:
    perm = [2, 0, 1] if arguments["output_layout"] == "CHW" else [1, 2, 0]
    return api.ops.transpose(images, perm=perm)
