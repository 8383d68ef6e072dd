"""The first operator of `--ops`: what is decoded, and to what. Without one, all of the image, to RGB."""

import functools
from collections.abc import Mapping
from typing import Any

from nvidia.dali import types

from tools.preprocessing.apis import Api, Data
from tools.preprocessing.arguments import Argument, of_schema
from tools.preprocessing.operators import RANDOM_PART, Operator

_LEFT_OUT = {  # what changes no pixel, or is said in other words
    *("affine", "cache_batch_copy", "cache_debug", "cache_size", "cache_threshold", "cache_type"),
    *("device_memory_padding", "device_memory_padding_jpeg2k", "host_memory_padding", "dtype"),
    *("host_memory_padding_jpeg2k", "preallocate_height_hint", "preallocate_width_hint"),
    *("adjust_orientation", "output_type", "axes", "axis_names", "end", "rel_end"),
    *("normalized_anchor", "normalized_shape"),
}
_OURS = {
    "color": Argument("color"),
    "exif": Argument("flag", names={"turn": True, "ignore": False}),
}


def _decode(operator: str, api: Api, encoded: Data, arguments: dict[str, Any]) -> Data:
    """uint8 (bytes,) -> uint8 (H, W, 3), or (H, W, 1) for gray, on `arguments["device"]`."""
    arguments = dict(arguments)
    arguments["output_type"] = arguments.pop("color", types.RGB)
    arguments["adjust_orientation"] = arguments.pop("exif", True)
    arguments["device"] = api.decoder_device(arguments["device"])
    decoder = getattr(api.ops.decoders, operator)
    if operator == "image_slice":
        arguments["axes"] = [0, 1]
    if operator == "image_random_crop":
        return api.draw(decoder, encoded, **arguments)
    return decoder(encoded, **arguments)


def _row(name: str, operator: str, about: str, more: Mapping[str, Argument] = {}, **rest: Any) -> Operator:
    schema = of_schema(f"decoders__{operator.title().replace('_', '')}")
    known = {k: v for k, v in schema.items() if k not in _LEFT_OUT}
    return Operator(name, about, known | _OURS | dict(more), functools.partial(_decode, operator), **rest)


_ROWS = (
    _row("decode", "image", "all of the image; color=rgb, bgr or gray; exif=turn or ignore", first="color"),
    _row(
        "decode_random_crop",
        "image_random_crop",
        "a random part of random_area and random_aspect_ratio, and no more of the file than that needs",
        more=RANDOM_PART,
        aliases={"area": "random_area", "aspect": "random_aspect_ratio"},
    ),
    _row(
        "decode_region",
        "image_slice",
        "the part that start and shape (row/column and height/width in pixels), or rel_start and rel_shape, "
        "say",
        needs=("start", "shape", "rel_start", "rel_shape"),
    ),
)

DECODERS: dict[str, Operator] = {row.name: row for row in _ROWS}
