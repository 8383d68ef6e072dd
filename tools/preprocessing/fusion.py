"""Decode, resize and crop made into one step, where they stand next to each other at the head of a chain:

    resize:short=256 | crop:224x224
    resize:short=256..320 | crop_mirror_normalize:crop=224x224,x=0..1,y=0..1,mean=imagenet

Of each image no more is decoded than the crop will show, and no more is resized. The arithmetic is DALI's
own (AdjustOutputSize and CalculateSampleParams in dali/operators/image/resize/resize_attr_base.cc,
CalculateAnchor in dali/operators/image/crop/crop_attr.h), so that the pixels are those of the separate steps,
but for levels that rounding moves by one.
"""

from typing import Any

from nvidia.dali import types

from tools.preprocessing.apis import Api, Data
from tools.preprocessing.arguments import Range
from tools.preprocessing.chain import Chain, Step
from tools.preprocessing.decoding import DECODERS
from tools.preprocessing.operators import OPERATORS, Operator

# Output pixels that an interpolation looks at to either side; nearest is left out, for its pixels jump.
_RADIUS = {
    types.INTERP_LINEAR: 1,
    types.INTERP_TRIANGULAR: 1,
    types.INTERP_CUBIC: 2,
    types.INTERP_LANCZOS3: 3,
}
_MARGIN = 3.0  # source pixels more: chroma is interpolated, too
_RESIZE = ("resize_shorter", "antialias", "interp_type")
_CROP = ("crop", "crop_pos_x", "crop_pos_y")
_OTHERS_OF_CROP = {"out_of_bounds_policy", "fill_values", "rounding"}


def fuse(chain: Chain, *, device: str = "cpu") -> Chain:
    """The same chain in fewer steps; the chain itself where nothing can be made one.

    Args:
        chain: what `chain.parse` returns.
        device: "gpu": left as it is, for there is no measurement that says otherwise.
    """
    if device != "cpu" or len(chain.steps) < 2:
        return chain
    resize, crop, *rest = chain.steps
    if not _fits(chain.decoder, resize, crop):
        return chain
    window = {name: value for name, value in crop.arguments.items() if name in _CROP}
    if crop.operator.name == "crop_mirror_normalize":
        left = {name: value for name, value in crop.arguments.items() if name not in _CROP}
        rest = [Step(crop.operator, left), *rest]
    decoder = Step(_DECODE_RESIZE_CROP, chain.decoder.arguments | resize.arguments | window)
    return Chain(decoder, tuple(rest))


def _fits(decoder: Step, resize: Step, crop: Step) -> bool:
    """Whether these can be one step: the window lies within any image so resized."""
    size, short = crop.arguments.get("crop"), resize.arguments.get("resize_shorter")
    allowed = set(_CROP)
    if crop.operator.name == "crop_mirror_normalize":
        allowed = crop.operator.arguments.keys() - _OTHERS_OF_CROP
    return (
        (decoder.operator.name, resize.operator.name) == ("decode", "resize")
        and crop.operator.name in ("crop", "crop_mirror_normalize")
        and short is not None
        and resize.arguments.keys() <= set(_RESIZE)
        and resize.arguments.get("interp_type", types.INTERP_LINEAR) in _RADIUS
        and size is not None
        and len(size) == 2
        and not any(isinstance(side, Range) for side in size)
        and crop.arguments.keys() <= allowed
        and max(size) <= (short.low if isinstance(short, Range) else short)
    )


def _decode_resize_crop(api: Api, encoded: Data, arguments: dict[str, Any]) -> Data:
    """uint8 (bytes,) -> uint8 (height, width, C) of the window."""
    how = {name: value for name, value in arguments.items() if name not in (*_RESIZE, *_CROP)}
    shape = api.ops.peek_image_shape(encoded, adjust_orientation=how.get("exif", True))
    size = api.ops.cast(api.part(shape, slice(0, 2)), dtype=types.FLOAT)
    start, end, pixel = _window(api, size, arguments)
    radius = _RADIUS[arguments.get("interp_type", types.INTERP_LINEAR)]
    margin = pixel * radius + (radius + _MARGIN)  # where it is enlarged, a pixel of the image counts
    low = api.ops.cast(api.math.max(start - margin, 0.0), dtype=types.INT32)
    high = api.ops.cast(api.math.min(end + margin, size), dtype=types.INT32)
    images = DECODERS["decode_region"].apply(api, encoded, how | {"start": low, "end": high})
    options = {name: arguments[name] for name in ("antialias", "interp_type") if name in arguments}
    return api.ops.resize(images, roi_start=start - low, roi_end=end - low, size=arguments["crop"], **options)


def _window(api: Api, size: Data, arguments: dict[str, Any]) -> tuple[Data, Data, Data]:
    """The part of an image that will show.

    Args:
        api: of `size`.
        size: float32 (2,), height and width of the image.
        arguments: of resize and crop.

    Returns:
        Its first and last corner, float32 (2,), row and column in the image's pixels; how many of these an
        output pixel spans, float32 ().
    """
    height, width = arguments["crop"]
    crop = height if height == width else api.ops.stack(api.constant(height), api.constant(width))
    top, left = (arguments.get(name, 0.5) for name in ("crop_pos_y", "crop_pos_x"))
    place = top
    if not (isinstance(top, float) and top == left):
        both = [api.constant(each) if isinstance(each, float) else each for each in (top, left)]
        place = api.ops.stack(*both)
    shorter = api.math.min(api.part(size, 0), api.part(size, 1))
    scale = arguments["resize_shorter"] / shorter
    resized = api.math.floor(size * scale + 0.5)
    pixel = 1.0 / scale
    # Where a side came out as a fraction, resize keeps the scale and the centre, and moves both ends.
    outer = (size - resized * pixel) * 0.5
    room = api.ops.cast(resized - crop, dtype=types.FLOAT64)  # as crop does; of float32 a half may come out
    corner = api.ops.cast(api.math.floor(room * place + 0.5), dtype=types.FLOAT)
    start = outer + corner * pixel
    return start, start + crop * pixel, pixel


_DECODE_RESIZE_CROP = Operator(
    "decode | resize | crop",
    "decodes and resizes no more than the crop shows",
    {
        **DECODERS["decode"].arguments,
        **{name: OPERATORS["resize"].arguments[name] for name in _RESIZE},
        **{name: OPERATORS["crop"].arguments[name] for name in _CROP},
    },
    _decode_resize_crop,
)
