"""Draws the images of tools/gpu_check.py, in all file formats that decoders treat differently."""

import json
import pathlib

from PIL import Image

from tools import synthetic

_TURNED = Image.Exif()
_TURNED[0x0112] = 6  # Orientation: a quarter turn
# File format -> suffix, mode of the Pillow image, options of its `save`.
KINDS: dict[str, tuple[str, str, dict]] = {
    "4:2:0": (".jpg", "RGB", {"subsampling": 2}),
    "4:4:4": (".jpg", "RGB", {"subsampling": 0}),
    "grey": (".jpg", "L", {}),
    "CMYK": (".jpg", "CMYK", {}),
    "progressive": (".jpg", "RGB", {"progressive": True}),
    "EXIF": (".jpg", "RGB", {"exif": _TURNED}),
    "PNG": (".png", "RGB", {}),
    "grey PNG": (".png", "L", {}),
}
BATCHES = 3  # images of the last batch have no boxes


def kind_of(image_id: int) -> str:
    return list(KINDS)[(image_id - 1) % len(KINDS)]


def draw(directory: pathlib.Path, num_images: int, seed: int, style: str = "small") -> None:
    """Writes images/ and instances.json, unless they exist."""
    if not (directory / "instances.json").exists():
        synthetic.draw_dataset(directory, num_images, seed, style)


def draw_kinds(directory: pathlib.Path) -> None:
    """Writes BATCHES times one image of each format, unless they exist."""
    if (directory / "instances.json").exists():
        return
    drawn = json.loads(synthetic.draw_dataset(directory / "drawn", BATCHES * len(KINDS), seed=3).read_bytes())
    (directory / "images").mkdir(exist_ok=True)
    for row in drawn["images"]:
        suffix, mode, options = KINDS[kind_of(row["id"])]
        picture = Image.open(directory / "drawn" / "images" / row["file_name"]).convert(mode)
        row["file_name"] = pathlib.Path(row["file_name"]).with_suffix(suffix).name
        picture.save(directory / "images" / row["file_name"], **options)
    last = (BATCHES - 1) * len(KINDS)
    drawn["annotations"] = [row for row in drawn["annotations"] if row["image_id"] <= last]
    (directory / "instances.json").write_text(json.dumps(drawn))
