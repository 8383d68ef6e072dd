"""Draws images in all file formats that decoders treat differently, and compares decoded batches."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from PIL import Image

from tools import synthetic

_ROTATED = Image.Exif()
_ROTATED[0x0112] = 6  # Orientation: a quarter turn
# File format -> suffix, mode of the Pillow image, options of its `save`.
KINDS: dict[str, tuple[str, str, dict]] = {
    "4:2:0": (".jpg", "RGB", {"subsampling": 2}),
    "4:4:4": (".jpg", "RGB", {"subsampling": 0}),
    "grey": (".jpg", "L", {}),
    "CMYK": (".jpg", "CMYK", {}),
    "progressive": (".jpg", "RGB", {"progressive": True}),
    "EXIF": (".jpg", "RGB", {"exif": _ROTATED}),
    "PNG": (".png", "RGB", {}),
    "grey PNG": (".png", "L", {}),
}
BATCH = 32  # nvImageCodec uses other code for fewer than 13 JPEGs
SIZE = 2 * BATCH  # number of images; those of the second batch have no boxes
# Largest mean pixel difference that passes, in levels from 0 to 255.
LEVELS = {"PNG": 0.5, "grey PNG": 0.5, "CMYK": 3.0}
OTHER_LEVELS = 1.5  # for all other file formats, and for training batches
ATOL = 1e-5  # largest difference that passes in all other tensors, such as boxes


def kind_of(image_id: int) -> str:
    return list(KINDS)[(image_id - 1) % len(KINDS)]


def draw(directory: pathlib.Path) -> None:
    """Writes images/ and instances.json. The kinds alternate."""
    drawn = json.loads(synthetic.draw_dataset(directory / "drawn", SIZE, seed=3).read_bytes())
    (directory / "images").mkdir()
    for row in drawn["images"]:
        suffix, mode, options = KINDS[kind_of(row["id"])]
        picture = Image.open(directory / "drawn" / "images" / row["file_name"]).convert(mode)
        row["file_name"] = pathlib.Path(row["file_name"]).with_suffix(suffix).name
        picture.save(directory / "images" / row["file_name"], **options)
    drawn["annotations"] = [row for row in drawn["annotations"] if row["image_id"] <= BATCH]
    (directory / "instances.json").write_text(json.dumps(drawn))


def pixel_faults(
    cpu: Iterable[np.ndarray], gpu: Iterable[np.ndarray], kinds: Sequence[str], unit: float | np.ndarray = 1.0
) -> list[str]:
    """Compares images, and returns a line for each kind whose mean difference is too large.

    Args:
        cpu, gpu: the images, (h, w, 3) each.
        kinds: the kind of each image.
        unit: levels per unit of the pixels.
    """
    levels: dict[str, list[float]] = {}
    for a, b, kind in zip(cpu, gpu, kinds, strict=True):
        difference = np.abs(np.subtract(a, b, dtype=np.float32)) if a.shape == b.shape else np.nan
        levels.setdefault(kind, []).append(float(np.mean(difference * unit)))
    means = {kind: float(np.mean(each)) for kind, each in levels.items()}
    return [
        f"{kind} is {mean:.3g} levels off, more than {LEVELS.get(kind, OTHER_LEVELS)}"
        for kind, mean in means.items()
        if not mean <= LEVELS.get(kind, OTHER_LEVELS)
    ]


def tensor_faults(cpu: Mapping[str, np.ndarray], gpu: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a line for each tensor that differs by more than ATOL."""
    faults = []
    for name, expected in cpu.items():
        largest = np.abs(np.subtract(expected, gpu[name], dtype=np.float64)).max(initial=0)
        if not largest <= ATOL:
            faults.append(f"{name} differs by up to {largest:.3g}")
    return faults
