"""The operators of `--ops`: DALI's operators with the arguments of their schemas, and a few combinations.

_ROWS has a row for each operator. A row without `call` runs DALI's operator of the same name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nvidia.dali import backend, types

from common import dali_ops
from common import letterbox as letterbox_geometry
from common.dali_ops import Data
from common.errors import UserError, unknown
from tools.preprocessing.apis import Api
from tools.preprocessing.arguments import ALIASES, OWN, Argument, of_schema

Arguments = dict[str, Any]


class Operator(NamedTuple):
    """An operator of `--ops`.

    Attributes:
        first: the argument whose name may be left out; "" for none.
        needs: at least one of these arguments must be given; () for none.
        about: one line for --list_ops.
        apply: function (api, images, drawn arguments) -> images.
    """

    name: str
    first: str
    needs: tuple[str, ...]
    arguments: Mapping[str, Argument]
    about: str
    apply: Callable[[Api, Data, Arguments], Data]

    def full_name(self, name: str) -> str:
        """Returns the argument that a name or alias means, or raises UserError."""
        full = [each for each in (name, *ALIASES.get(name, ())) if each in self.arguments]
        if not full:
            aliases = [
                alias for alias, names in ALIASES.items() if not self.arguments.keys().isdisjoint(names)
            ]
            raise unknown("argument", name, [*aliases, *self.arguments])
        return full[0]


# --- functions for operators that differ from DALI's; --list_ops prints their docstrings ---


def decode(api: Api, encoded: Data, arguments: Arguments) -> Data:
    """Decodes whole images to uint8, 3 channels (gray: 1). Rotates them as EXIF says, unless exif=ignore."""
    # Interpolates chroma on a GPU as on a CPU.
    return api.ops.decoders.image(encoded, **{"jpeg_fancy_upsampling": True} | _decoding(api, arguments))


def decode_random_crop(api: Api, encoded: Data, arguments: Arguments) -> Data:
    """Decodes only a part of the image, with a random area and aspect ratio."""
    return api.draw("decoders.image_random_crop", encoded, **_decoding(api, arguments))


def decode_region(api: Api, encoded: Data, arguments: Arguments) -> Data:
    """Decodes a part: start=TOP/LEFT and shape=HEIGHT/WIDTH in pixels, or rel_start and rel_shape in 0..1."""
    if arguments["device"] == "gpu":  # decoding a part can crash: see `roi` of Decoder in common/dali_ops.py
        place = {name: value for name, value in arguments.items() if name in (*_REGION, "end")}
        how = {name: value for name, value in arguments.items() if name not in place}
        return api.ops.slice(decode(api, encoded, how), axes=[0, 1], **place)
    return api.ops.decoders.image_slice(encoded, axes=[0, 1], **_decoding(api, arguments))


def _decoding(api: Api, arguments: Arguments) -> Arguments:
    names = {"color": "output_type", "exif": "adjust_orientation"}
    options = {names.get(name, name): value for name, value in arguments.items()}
    return options | {"device": api.decoder_device(arguments["device"])}


def crop(api: Api, images: Data, arguments: Arguments) -> Data:
    """Crops to HEIGHTxWIDTH. x and y: position from 0 to 1, default 0.5. fill: colour to pad small images."""
    return api.ops.crop(images, **_filled(arguments))


def _filled(arguments: Arguments) -> Arguments:
    return {"out_of_bounds_policy": "pad"} | arguments if "fill_values" in arguments else arguments


def crop_mirror_normalize(api: Api, images: Data, arguments: Arguments) -> Data:
    """Crops, mirrors with probability p, normalises by mean and std (for 0 to 255). Default layout: HWC."""
    arguments = {"output_layout": "HWC", **_filled(arguments)}
    if "p" in arguments:
        arguments["mirror"] = _coin(api, arguments.pop("p"))
    return api.ops.crop_mirror_normalize(images, **arguments)


def flip(api: Api, images: Data, arguments: Arguments) -> Data:
    """Swaps left and right with probability p, and top and bottom with probability p_vertical."""
    chances = {"p": "horizontal", "p_vertical": "vertical"}
    drawn = {chances[name]: _coin(api, p) for name, p in arguments.items() if name in chances}
    fixed = {name: value for name, value in arguments.items() if name not in chances}
    return api.ops.flip(images, **({"horizontal": 0} if drawn else {}) | fixed | drawn)


def _coin(api: Api, probability: float) -> Data:
    return api.draw("random.coin_flip", probability=probability)


def pad(api: Api, images: Data, arguments: Arguments) -> Data:
    """Pads below and to the right, to at least HEIGHTxWIDTH."""
    return api.ops.pad(images, axis_names="HW", **arguments)


def random_resized_crop(api: Api, images: Data, arguments: Arguments) -> Data:
    """Crops a part with a random area and aspect ratio, and resizes it to HEIGHTxWIDTH."""
    return api.draw("random_resized_crop", images, **arguments)


def fit(api: Api, images: Data, arguments: Arguments) -> Data:
    """Resizes to the largest size that fits in HEIGHTxWIDTH. Keeps the aspect ratio."""
    return _fitted(api, images, **arguments)[0]


def letterbox(api: Api, images: Data, arguments: Arguments) -> Data:
    """Resizes as fit does, then pads to HEIGHTxWIDTH: bottom and right, or all sides if centered=1."""
    fill = arguments.pop("fill", [0.0])
    images, top_left = _fitted(api, images, **arguments)
    return dali_ops.place(images, top_left, arguments["size"], fill, api)


def _fitted(
    api: Api,
    images: Data,
    size: list[int],
    centered: bool = False,
    antialias: bool = True,
    interp_type: types.DALIInterpType = types.INTERP_LINEAR,
) -> tuple[Data, Data]:
    found = api.size(images)
    sides = api.part(found, 0), api.part(found, 1)
    limits = api.math.min, api.math.max
    height, width = letterbox_geometry.fit(*sides, (size[0], size[1]), *limits)
    new_size = api.ops.stack(height, width)
    images = dali_ops.resize(images, new_size, antialias=antialias, interpolation=interp_type, api=api)
    top_left = api.ops.stack((size[0] - height) // 2, (size[1] - width) // 2)
    return images, top_left if centered else 0 * new_size


MOVES = {  # in the order of their use: argument -> DALI's transform, its argument
    "angle": ("rotation", "angle"),
    "shear": ("shear", "angles"),
    "scale": ("scale", "scale"),
    "translate": ("translation", "offset"),
}


def warp_affine(api: Api, images: Data, arguments: Arguments) -> Data:
    """Rotates, shears (degrees) and scales about the centre, then translates (pixels). Or give a matrix."""
    moves = {name: arguments.pop(name) for name in MOVES if name in arguments}
    matrix = arguments.pop("matrix", None)
    if matrix is not None and moves:
        raise UserError(f"--ops: warp_affine: matrix and {min(moves)} exclude each other: remove one")
    size = api.ops.cast(api.size(images), dtype=types.FLOAT)
    if not moves:
        if isinstance(matrix, list):
            matrix = api.ops.stack(*(api.part(size, 0) * 0.0 + number for number in matrix))
        return api.ops.warp_affine(images, matrix=api.ops.reshape(matrix, shape=[2, 3]), **arguments)
    center = api.ops.stack(api.part(size, 1) * 0.5, api.part(size, 0) * 0.5)  # x, y
    for name, value in moves.items():
        transform, argument = MOVES[name]
        about = {} if name == "translate" else {"center": center}
        if name == "angle":
            value = -value  # counter-clockwise, as fn.rotate; the transform is clockwise
        if name == "scale":
            value = [value, value] if isinstance(value, float) else api.ops.stack(value, value)
        before = () if matrix is None else (matrix,)
        matrix = getattr(api.ops.transforms, transform)(*before, **{argument: value}, **about)
    return api.ops.warp_affine(images, matrix=matrix, **arguments | {"inverse_map": False})


def layout(api: Api, images: Data, arguments: Arguments) -> Data:
    """Changes the layout. CHW: channels first; HWC: channels last."""
    perm = [2, 0, 1] if arguments["output_layout"] == "CHW" else [1, 2, 0]
    return api.ops.transpose(images, perm=perm)


# --- the table ---


def _row(
    name: str,
    first: str = "",
    needs: tuple[str, ...] = (),
    *,
    own: Mapping[str, Argument] = {},
    schema: str | None = None,
    call: Callable[[Api, Data, Arguments], Data] | None = None,
) -> Operator:
    """Makes an operator.

    Args:
        own: arguments that DALI's schema does not have.
        schema: name of DALI's schema. None: derived from the operator's name. "": no schema.
        call: function that applies the operator. None: DALI's operator of the same name.
    """
    schema = name.title().replace("_", "") if schema is None else schema
    arguments = {**(of_schema(schema) if schema else {}), **own}
    about = call.__doc__ or name if call else backend.GetSchema(schema).Dox()
    apply = call or (lambda api, images, arguments: getattr(api.ops, name)(images, **arguments))
    return Operator(name, first, needs, arguments, about.strip().splitlines()[0], apply)


_DECODED = {"color": OWN["color"], "exif": OWN["exif"]}
_REGION = ("start", "shape", "rel_start", "rel_shape")
_FIT = {name: of_schema("RandomResizedCrop")[name] for name in ("size", "antialias", "interp_type")}
_LETTERBOX = _FIT | {"fill": OWN["fill"], "centered": OWN["centered"]}
_CHANCES = {"p": OWN["p"], "p_vertical": OWN["p_vertical"]}
_MOVES = {name: OWN[name] for name in MOVES}
_LAYOUT = {"output_layout": Argument("layout")}
_ROWS = (
    _row("decode", "color", own=_DECODED, schema="decoders__Image", call=decode),
    _row("decode_random_crop", own=_DECODED, schema="decoders__ImageRandomCrop", call=decode_random_crop),
    _row("decode_region", "", _REGION, own=_DECODED, schema="decoders__ImageSlice", call=decode_region),
    _row("resize", "size", ("size", "resize_shorter", "resize_longer")),
    _row("fit", "size", ("size",), own=_FIT, schema="", call=fit),
    _row("letterbox", "size", ("size",), own=_LETTERBOX, schema="", call=letterbox),
    _row("crop", "crop", ("crop", "crop_h", "crop_w"), call=crop),
    _row("random_resized_crop", "size", ("size",), call=random_resized_crop),
    _row("pad", "shape", ("shape",), call=pad),
    _row("flip", "p", own=_CHANCES, call=flip),
    _row("rotate", "angle", ("angle",)),
    _row("warp_affine", "", ("matrix", *MOVES), own=_MOVES, call=warp_affine),
    _row("color_twist"),
    _row("brightness", "brightness"),
    _row("contrast", "contrast"),
    _row("saturation", "saturation"),
    _row("hue", "hue"),
    _row("hsv"),
    _row("gaussian_blur", "sigma", ("sigma", "window_size")),
    _row("jpeg_compression_distortion", "quality"),
    _row("crop_mirror_normalize", "crop", own={"p": OWN["p"]}, call=crop_mirror_normalize),
    _row("cast", "dtype", ("dtype",)),
    _row("layout", "output_layout", ("output_layout",), own=_LAYOUT, schema="", call=layout),
)
OPERATORS = {row.name: row for row in _ROWS}
DECODERS = ("decode", "decode_random_crop", "decode_region")
# These operators are correct only for RGB images, not for BGR (DALI 2.4 on a CPU).
NEED_RGB = ("color_twist", "saturation", "hue", "hsv", "jpeg_compression_distortion")
