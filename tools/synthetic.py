"""Draws a small synthetic data set in COCO format, for demos and tests without a download.

    python tools/synthetic.py --output_dir=data/shapes --num_images=300 --seed=0

The command writes `images/*.jpg` and `instances.json`. Shapes of five classes lie on textured backgrounds.
They overlap and may exceed the image. Some images have no objects. The box of an object includes its hidden
parts, and is clipped to the image. `area` is the number of visible pixels.

Image i depends only on the seed and on i, so a shorter data set is the beginning of a longer one.
"""

import json
import math
import pathlib
import sys
from typing import NamedTuple

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
from absl import flags
from PIL import Image, ImageDraw, ImageFilter

from common import errors, progress
from common.errors import UserError
from common.files import user_errors, write_bytes

CATEGORIES = {2: "disk", 3: "ring", 5: "triangle", 8: "cross", 13: "star"}  # ids with gaps, as in COCO
MIN_OBJECT, MAX_OBJECT = 12, 250  # sides of an object, pixels
MAX_OBJECTS = 10
EMPTY_IMAGES = 0.05  # share of images without objects
MIN_VISIBLE = 0.4  # share of an object's pixels, else it is left out
JPEG_QUALITY = 90

_START = b'{"info": {"description": "drawn by tools/synthetic.py"}, '  # of an instances.json of this command
_MAX_ASPECT = 4 / 3
_ATTEMPTS = 20
_OVERSAMPLING = 4

_Shape = tuple[int, ...]
_Place = tuple[int, int]  # top, left
_Slices = tuple[slice, slice]


class Style(NamedTuple):
    heights: tuple[int, int]  # smallest and largest, pixels
    widths: tuple[int, int]
    noise: float  # standard deviation, in levels of 0..255
    objects: tuple[int, int] = (1, MAX_OBJECTS)  # smallest and largest number of an image that is not empty
    sides: tuple[int, int] = (MIN_OBJECT, MAX_OBJECT)  # of an object, pixels


Rng = np.random.Generator
STYLES = {
    "small": Style((240, 640), (240, 640), 2.0),
    # For benchmarks: images have about as many pixels and bytes as COCO's photographs.
    "photo": Style((480, 768), (640, 1024), 8.0),
    # Large images of objects that are about 12 pixels large, and tiles to train on.
    "aerial": Style((3000, 3000), (4000, 4000), 2.0, objects=(150, 250), sides=(10, 14)),
    "tile": Style((256, 256), (256, 256), 2.0, objects=(2, 12), sides=(10, 14)),
}


class Picture(NamedTuple):
    image: np.ndarray  # uint8 (H, W, 3) RGB
    boxes_ltwh_px: np.ndarray  # int32 (N, 4), inside the image
    category_ids: np.ndarray  # int32 (N,)
    areas: np.ndarray  # int32 (N,), visible pixels


def draw_dataset(
    output_dir: str | pathlib.Path, num_images: int, seed: int, style: str = "small"
) -> pathlib.Path:
    """Draws images into `output_dir`/images and writes their ground truth to `output_dir`/instances.json.

    Returns the path of instances.json, which is written last. Raises UserError.
    """
    output_dir = pathlib.Path(output_dir)
    images: list[dict] = []
    annotations: list[dict] = []
    with user_errors(f"--output_dir={output_dir}"):
        _check_replaceable(output_dir / "instances.json")
        (output_dir / "images").mkdir(parents=True, exist_ok=True)
        for index in range(num_images):
            picture = draw_picture(seed, index, STYLES[style])
            file_name = f"{index + 1:06d}.jpg"
            image = Image.fromarray(picture.image)
            image.save(output_dir / "images" / file_name, "JPEG", quality=JPEG_QUALITY)
            size = {"height": image.height, "width": image.width}
            images.append({"id": index + 1, "file_name": file_name, **size})
            columns = picture.boxes_ltwh_px, picture.category_ids, picture.areas
            for box, category_id, area in zip(*(column.tolist() for column in columns), strict=True):
                row = {"image_id": index + 1, "category_id": category_id, "bbox": box, "area": area}
                annotations.append({"id": len(annotations) + 1, **row, "iscrowd": 0})
        categories = [{"id": key, "name": name, "supercategory": "shape"} for key, name in CATEGORIES.items()]
        content = {"images": images, "annotations": annotations, "categories": categories}
        write_bytes(output_dir / "instances.json", _START + json.dumps(content).encode()[1:])
    return output_dir / "instances.json"


def _check_replaceable(path: pathlib.Path) -> None:
    """Raises UserError if `path` is a json that this command did not write."""
    if path.exists() and not path.read_bytes().startswith(_START):
        raise UserError(f"{path} is another data set: choose another --output_dir")


def draw_picture(seed: int, index: int, style: Style = STYLES["small"]) -> Picture:
    """Draws image number `index`; equal arguments result in equal pictures."""
    rng = np.random.default_rng((seed, index))
    height, width = (int(rng.integers(low, high + 1)) for low, high in (style.heights, style.widths))
    canvas = _background(rng, height, width)
    owner = np.full((height, width), -1, np.int16)  # index of the object that each pixel shows, or -1
    full_areas: list[int] = []
    boxes: list[tuple] = []
    category_ids: list[int] = []

    fewest, most = style.objects
    num_objects = 0 if rng.random() < EMPTY_IMAGES else int(rng.integers(fewest, most + 1))
    for _ in range(num_objects):
        category_id = int(rng.choice(list(CATEGORIES)))
        mask = _shape_mask(rng, CATEGORIES[category_id], style.sides, min(height, width))
        solid = mask > 127
        place = _find_place(rng, solid, owner, full_areas)
        if place is None:
            continue
        view, part = _overlap(canvas.shape, mask.shape, *place)
        fill = _fill(rng, mask, canvas[view].mean(axis=(0, 1)))
        _cast_shadow(canvas, mask, *place)
        alpha = mask[part].astype(np.float32)[..., None] / 255
        canvas[view] += alpha * (fill[part] - canvas[view])
        owner[view][solid[part]] = len(boxes)
        full_areas.append(int(solid.sum()))
        boxes.append(_clipped_box(solid, *place, height, width))
        category_ids.append(category_id)

    canvas += rng.normal(0, style.noise, canvas.shape[:2])[..., None]
    return Picture(
        image=np.clip(canvas, 0, 255).astype(np.uint8),
        boxes_ltwh_px=np.array(boxes, np.int32).reshape(-1, 4),
        category_ids=np.array(category_ids, np.int32),
        areas=_visible_areas(owner, len(boxes)).astype(np.int32),
    )


# --- shapes ---


def _on_circle(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def _rotation(angle: float) -> np.ndarray:
    return np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])


_CIRCLE = _on_circle(np.linspace(0, 2 * math.pi, 96, endpoint=False))
_ARM = np.array([[0.3, -1], [0.3, -0.3], [1, -0.3]])
# The outline of each shape, then its hole if it has one. Each is a polygon, (points, 2): x and y. The y
# axis points down.
_OUTLINES = {
    "disk": [_CIRCLE],
    "ring": [_CIRCLE, 0.55 * _CIRCLE],
    "triangle": [_on_circle(2 * math.pi * (np.arange(3) / 3 - 0.25))],
    "cross": [np.concatenate([_ARM @ _rotation(turn * math.pi / 2) for turn in range(4)])],
    "star": [np.tile([1.0, 0.42], 5)[:, None] * _on_circle(2 * math.pi * (np.arange(10) / 10 - 0.25))],
}


def _shape_mask(rng: Rng, name: str, sides: tuple[int, int], shorter_side: int) -> np.ndarray:
    """Returns the mask of one shape, uint8 (h, w), tight around the shape."""
    largest = min(sides[1], 0.7 * shorter_side) / math.sqrt(_MAX_ASPECT)
    size = _log_uniform(rng, sides[0] * math.sqrt(_MAX_ASPECT), largest)
    aspect = _log_uniform(rng, 1 / _MAX_ASPECT, _MAX_ASPECT)
    extent = np.round([size * math.sqrt(aspect), size / math.sqrt(aspect)])
    turn = _rotation(math.radians(rng.uniform(-20, 20)))
    outlines = [outline @ turn for outline in _OUTLINES[name]]
    low, high = outlines[0].min(axis=0), outlines[0].max(axis=0)
    mask = Image.new("L", tuple((extent * _OVERSAMPLING).astype(int).tolist()))
    draw = ImageDraw.Draw(mask)
    for outline, ink in zip(outlines, (255, 0), strict=False):
        points = (outline - low) / (high - low) * extent * _OVERSAMPLING
        draw.polygon([tuple(point) for point in points.tolist()], fill=ink)
    return np.asarray(mask.reduce(_OVERSAMPLING))


def _find_place(rng: Rng, solid: np.ndarray, owner: np.ndarray, full_areas: list[int]) -> _Place | None:
    for _ in range(_ATTEMPTS):
        # Up to a third of the object's height and width may lie outside the image.
        top, left = (
            int(rng.integers(-(side // 3), space - side + side // 3 + 1))
            for side, space in zip(solid.shape, owner.shape, strict=True)
        )
        view, part = _overlap(owner.shape, solid.shape, top, left)
        if solid[part].sum() < MIN_VISIBLE * solid.sum():
            continue
        remaining = owner.copy()
        remaining[view][solid[part]] = -1
        visible = _visible_areas(remaining, len(full_areas))
        if np.all(visible >= MIN_VISIBLE * np.array(full_areas)):
            return top, left
    return None


def _visible_areas(owner: np.ndarray, num_objects: int) -> np.ndarray:
    return np.bincount(owner.ravel() + 1, minlength=num_objects + 1)[1:]


def _overlap(image_shape: _Shape, patch_shape: _Shape, top: int, left: int) -> tuple[_Slices, _Slices]:
    """Returns where an image and a patch overlap: slices of the image, and slices of the patch."""
    bottom = min(top + patch_shape[0], image_shape[0])
    right = min(left + patch_shape[1], image_shape[1])
    view = slice(max(top, 0), bottom), slice(max(left, 0), right)
    part = slice(max(-top, 0), bottom - top), slice(max(-left, 0), right - left)
    return view, part


def _clipped_box(solid: np.ndarray, top: int, left: int, height: int, width: int) -> tuple[int, ...]:
    rows, columns = np.flatnonzero(solid.any(axis=1)), np.flatnonzero(solid.any(axis=0))
    y0, y1 = max(top + rows[0], 0), min(top + rows[-1] + 1, height)
    x0, x1 = max(left + columns[0], 0), min(left + columns[-1] + 1, width)
    return x0, y0, x1 - x0, y1 - y0


# --- colours and textures ---


def _background(rng: Rng, height: int, width: int) -> np.ndarray:
    """Returns a colour gradient with noise and sometimes stripes; float32 (H, W, 3)."""
    first, second = (_colour(rng, saturation=(0.05, 0.45), value=(0.25, 0.9)) for _ in range(2))
    canvas = _gradient(rng, height, width, first, second)
    strength = rng.uniform(10, 35)
    for octave in range(rng.integers(2, 6)):
        cells = 3 * 2**octave
        canvas += (strength / 2**octave) * _smooth_noise(rng, height, width, cells)[..., None]
    if rng.random() < 0.3:
        canvas += rng.uniform(5, 20) * _stripes(rng, height, width, period=rng.uniform(8, 60))[..., None]
    canvas += rng.uniform(0, 6) * rng.standard_normal((height, width), dtype=np.float32)[..., None]
    return canvas


def _fill(rng: Rng, mask: np.ndarray, surroundings: np.ndarray) -> np.ndarray:
    """Returns the colours of one object, float32 (h, w, 3)."""
    height, width = mask.shape
    candidates = [_colour(rng, saturation=(0.45, 1), value=(0.45, 1)) for _ in range(4)]
    colour = max(candidates, key=lambda candidate: np.abs(candidate - surroundings).sum())
    paint = _gradient(rng, height, width, colour, colour * rng.uniform(0.5, 0.95))
    kind = rng.choice(["plain", "stripes", "noise", "checks"], p=[0.4, 0.25, 0.2, 0.15])
    contrast = rng.uniform(15, 45)
    period = rng.uniform(5, 8) + min(height, width) / 10
    if kind == "stripes":
        paint += contrast * _stripes(rng, height, width, period)[..., None]
    elif kind == "noise":
        paint += 1.5 * contrast * _smooth_noise(rng, height, width, 8)[..., None]
    elif kind == "checks":
        crossing = _stripes(rng, height, width, period) + _stripes(rng, height, width, period)
        paint += contrast * np.sign(crossing)[..., None]
    rim = 3 if min(height, width) < 48 else 5
    padded = Image.fromarray(np.pad(mask, rim))  # so that the mask's border gets a rim, too
    inside = np.asarray(padded.filter(ImageFilter.MinFilter(rim)))[rim:-rim, rim:-rim, None] / np.float32(255)
    return np.clip(paint * (0.45 + 0.55 * inside), 0, 255)


def _cast_shadow(canvas: np.ndarray, mask: np.ndarray, top: int, left: int) -> None:
    blur = 1 + min(mask.shape) // 25
    margin = 3 * blur
    soft = Image.fromarray(np.pad(mask, margin)).filter(ImageFilter.GaussianBlur(blur))
    view, part = _overlap(canvas.shape, (soft.height, soft.width), top - margin + blur, left - margin + blur)
    canvas[view] *= 1 - 0.4 * np.asarray(soft, np.float32)[part][..., None] / 255


def _gradient(rng: Rng, height: int, width: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    position = _ramp(height, width, rng.uniform(0, 2 * math.pi))
    position -= position.min()
    position /= max(float(position.max()), 1e-6)
    return first + position[..., None] * (second - first)


def _stripes(rng: Rng, height: int, width: int, period: float) -> np.ndarray:
    ramp = _ramp(height, width, rng.uniform(0, math.pi))
    return np.sin(ramp * np.float32(2 * math.pi / period) + np.float32(rng.uniform(0, 2 * math.pi)))


def _ramp(height: int, width: int, angle: float) -> np.ndarray:
    """Returns each pixel's distance in pixels along the direction `angle`, float32 (height, width)."""
    y = np.arange(height, dtype=np.float32)[:, None] * np.float32(math.sin(angle))
    return y + np.arange(width, dtype=np.float32) * np.float32(math.cos(angle))


def _smooth_noise(rng: Rng, height: int, width: int, cells: int) -> np.ndarray:
    """Returns normal noise on a grid, interpolated to float32 (height, width)."""
    grid = Image.fromarray(rng.standard_normal((cells, cells), dtype=np.float32))
    return np.asarray(grid.resize((width, height), Image.Resampling.BILINEAR))


def _colour(rng: Rng, saturation: tuple[float, float], value: tuple[float, float]) -> np.ndarray:
    """Returns a random colour of any hue, float32 (3,) RGB in 0..255."""
    hue = np.clip(np.abs((rng.random() + np.array([0, 2 / 3, 1 / 3])) % 1 * 6 - 3) - 1, 0, 1)
    mixed = 1 - rng.uniform(*saturation) * (1 - hue)
    return (255 * rng.uniform(*value) * mixed).astype(np.float32)


def _log_uniform(rng: Rng, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


# --- the command ---


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string("output_dir", None, "Directory for images/ and instances.json.", flag_values=fv)
    flags.DEFINE_integer("num_images", 300, "Number of images to draw.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer("seed", 0, "Seed; equal seeds draw equal images.", lower_bound=0, flag_values=fv)
    flags.DEFINE_enum(
        "style",
        "small",
        STYLES,
        "Sizes of images and objects: small, photo (as in COCO), aerial or tile.",
        flag_values=fv,
    )
    flags.mark_flag_as_required("output_dir", flag_values=fv)


def main() -> None:
    fv = flags.FLAGS
    path = draw_dataset(fv.output_dir, fv.num_images, fv.seed, fv.style)
    print(f"drew {progress.counted(fv.num_images, 'image')}: {path}")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    errors.run(main)
