"""Combines decode, resize and crop into one step if a chain begins with `resize:short=... | crop:...`.

This step decodes and resizes only the part of an image that the crop shows. It computes sizes as DALI does
(dali/operators/image/resize/resize_attr_base.cc, dali/operators/image/crop/crop_attr.h). Rounding may change
a pixel by one level.
"""

from nvidia.dali import types

from common.dali_ops import Data
from tools.preprocessing.apis import Api
from tools.preprocessing.arguments import Range
from tools.preprocessing.chain import Chain, Step
from tools.preprocessing.operators import OPERATORS, Arguments, decode_region

# Interpolation -> radius in output pixels. Nearest-neighbour resizing is not combined with other operators.
_RADIUS = dict.fromkeys((types.INTERP_LINEAR, types.INTERP_TRIANGULAR), 1)
_RADIUS |= {types.INTERP_CUBIC: 2, types.INTERP_LANCZOS3: 3}
_MARGIN = 3.0  # source pixels, for chroma
_RESIZE = {"resize_shorter", "antialias", "interp_type"}
_CROP = {"crop", "crop_pos_x", "crop_pos_y"}


def fuse(chain: Chain) -> Chain:
    """Returns the chain with its decoder, resize and crop combined into one step.

    The chain stays unchanged if it has other operators, or if the crop may reach beyond the image.
    """
    names = [step.operator.name for step in (chain.decoder, *chain.steps[:2])]
    if names != ["decode", "resize", "crop"]:
        return chain
    resize, crop = (step.arguments for step in chain.steps[:2])
    short, size = resize.get("resize_shorter"), crop.get("crop", (Range(0, 0),))
    if not (resize.keys() <= _RESIZE and crop.keys() <= _CROP and short) or Range in map(type, size):
        return chain
    is_inside = max(size) <= (short.low if isinstance(short, Range) else short)
    if not is_inside or resize.get("interp_type", types.INTERP_LINEAR) not in _RADIUS:
        return chain
    known = {name: argument for step in names for name, argument in OPERATORS[step].arguments.items()}
    operator = OPERATORS["decode"]._replace(arguments=known, apply=_decode_resize_crop)
    decoder = Step(operator, chain.decoder.arguments | resize | crop)
    return chain._replace(decoder=decoder, steps=chain.steps[2:])


def _decode_resize_crop(api: Api, encoded: Data, arguments: Arguments) -> Data:
    """Decodes images, uint8 (bytes,), and returns crops of the resized images, uint8 (height, width, C)."""
    how = {name: value for name, value in arguments.items() if name not in _RESIZE | _CROP}
    shape = api.ops.peek_image_shape(encoded, adjust_orientation=how.get("exif", True))
    size = api.ops.cast(api.part(shape, slice(0, 2)), dtype=types.FLOAT)  # height, width
    scale = arguments["resize_shorter"] / api.math.min(api.part(size, 0), api.part(size, 1))
    resized, pixel = api.math.floor(size * scale + 0.5), 1.0 / scale  # `pixel`: image pixels per output pixel
    crop = api.ops.stack(*(scale * 0 + side for side in arguments["crop"]))
    place = api.ops.stack(*(scale * 0 + arguments.get(name, 0.5) for name in ("crop_pos_y", "crop_pos_x")))
    room = api.ops.cast(resized - crop, dtype=types.FLOAT64)
    corner = api.ops.cast(api.math.floor(room * place + 0.5), dtype=types.FLOAT)
    # DALI rounds `resized` to whole pixels, but keeps scale and centre. This moves the edges slightly.
    start = (size - resized * pixel) * 0.5 + corner * pixel
    end = start + crop * pixel
    radius = _RADIUS[arguments.get("interp_type", types.INTERP_LINEAR)]
    margin = pixel * radius + (radius + _MARGIN)  # the second term is for enlarged images
    low = api.ops.cast(api.math.max(start - margin, 0.0), dtype=types.INT32)
    high = api.ops.cast(api.math.min(end + margin, size), dtype=types.INT32)
    images = decode_region(api, encoded, how | {"start": low, "end": high})
    options = {name: arguments[name] for name in ("antialias", "interp_type") if name in arguments}
    return api.ops.resize(images, roi_start=start - low, roi_end=end - low, size=arguments["crop"], **options)
