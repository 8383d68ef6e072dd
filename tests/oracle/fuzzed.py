"""Writes a hundred synthetic images of many sizes and file formats, with ground truth."""

import json
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from PIL import Image

from common.data.coco import CocoSource
from common.data.open import open_coco

NUM_IMAGES = 100
CATEGORY_IDS = (90, 3, 17)  # with gaps, not sorted; class 0 is category 3, the smallest id
SIZES = [(1, 1), (1, 37), (53, 1), (2, 2), (3, 5), (7, 300), (300, 7), (641, 427), (427, 641), (128, 192)]
COUNTS = [0, 1, 1, 2, 2, 3, 5, 8, 13, 21, 34, 60, 99, 100, 101, 150, 200]

# (file format, Pillow's mode)
FORMATS = [("jpeg", mode) for mode in ("RGB", "L", "RGB", "CMYK")]
FORMATS += [("png", mode) for mode in ("RGB", "RGBA", "P", "L")]
# {kind of box: probability}
BOX_KINDS = {"any": 0.6, "tiny": 0.15, "border": 0.12, "full": 0.02, "outside": 0.08, "empty": 0.03}
ROTATED_EXIF = Image.Exif()
ROTATED_EXIF[0x0112] = 6


class Annotated(NamedTuple):
    """Boxes are clipped. Crowds and boxes without area are left out."""

    image_id: int
    pixels: np.ndarray
    boxes_px: np.ndarray
    classes: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[:2]


class FuzzedSet(NamedTuple):
    """A source, and {image id: ground truth} in the order of the json."""

    source: CocoSource
    images: dict[int, Annotated]


def write_fuzzed_set(directory: pathlib.Path) -> FuzzedSet:
    random = np.random.default_rng(1)
    images, annotations = [], []
    for number in range(NUM_IMAGES):
        any_size = np.exp(random.uniform(np.log(8), np.log(500), 2)).astype(int).tolist()
        height, width = SIZES[number] if number < len(SIZES) else any_size
        count = random.choice(COUNTS)
        smallest = 0.5 if count <= 2 else 0.1  # few boxes are large, so that crops by IoU exist
        boxes_ltwh_px = [draw_box(random, height, width, smallest) for _ in range(count)]
        suffix, mode = FORMATS[number % len(FORMATS)]
        exif = ROTATED_EXIF if number % 3 == 0 and height != width else Image.Exif()
        name, image_id = f"{number}.{suffix}", 5 + 3 * number
        picture = Image.fromarray(draw_image(random, height, width, boxes_ltwh_px[:12]))
        picture.convert(mode).save(directory / name, quality=95, exif=exif)
        images.append({"id": image_id, "file_name": name, "height": height, "width": width})
        for box in boxes_ltwh_px:
            category_id, is_crowd = int(random.choice(CATEGORY_IDS)), int(random.random() < 0.02)
            annotation = {"image_id": image_id, "category_id": category_id, "bbox": box, "iscrowd": is_crowd}
            annotations.append(annotation)
    random.shuffle(annotations)
    document = {
        "images": images,
        # Different areas, because the data check drops boxes that repeat another one.
        "annotations": [{"id": i, "area": i, **annotation} for i, annotation in enumerate(annotations, 1)],
        "categories": [{"id": i, "name": f"thing {i}"} for i in CATEGORY_IDS],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    source = open_coco(str(directory), str(directory / "instances.json"))
    truth = [_ground_truth(image["id"], directory / image["file_name"], annotations) for image in images]
    return FuzzedSet(source, {image.image_id: image for image in truth})


def _ground_truth(image_id: int, path: pathlib.Path, annotations: list[dict]) -> Annotated:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    annotations = [a for a in annotations if a["image_id"] == image_id and not a["iscrowd"]]
    start, sides = np.reshape([a["bbox"] for a in annotations], (-1, 2, 2)).swapaxes(0, 1)
    boxes_px = np.clip(np.hstack([start, start + sides]), 0, np.array(pixels.shape)[[1, 0, 1, 0]])
    has_area = (boxes_px[:, 2:] > boxes_px[:, :2]).all(1)
    classes = np.searchsorted(sorted(CATEGORY_IDS), [a["category_id"] for a in annotations])
    return Annotated(image_id, pixels, boxes_px[has_area], classes[has_area])


def draw_image(random: np.random.Generator, height: int, width: int, boxes_ltwh_px: Iterable) -> np.ndarray:
    """Returns uint8 (height, width, 3): a smooth background, and a rectangle for each box."""
    coarse = random.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), np.uint8)
    image = np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    for left, top, box_width, box_height in boxes_ltwh_px:
        edges = [max(round(edge), 0) for edge in (top, top + box_height, left, left + box_width)]
        image[slice(*edges[:2]), slice(*edges[2:])] = random.integers(0, 256, 3)
    return image


def draw_box(random: np.random.Generator, height: int, width: int, smallest: float) -> list[float]:
    """Returns ltwh in pixels. The box may be tiny, outside the image or without area."""
    kind = random.choice(list(BOX_KINDS), p=list(BOX_KINDS.values()))
    limits = np.array([width, height], float)
    if kind == "full":
        return [0.0, 0.0, *limits.tolist()]
    sides = limits * random.uniform(smallest, 0.95, 2) ** 2
    if kind == "tiny":
        sides = np.minimum(random.uniform(0.2, 4, 2), limits)
    start = random.uniform(0, 1, 2) * (limits - sides)
    if kind == "border":
        axis = random.integers(2)
        start[axis] = random.choice([0.0, limits[axis] - sides[axis]])
    elif kind == "outside":
        start += random.choice([-1, 1], 2) * sides * random.uniform(0, 1.5, 2)
    elif kind == "empty":
        sides[random.integers(2)] = 0.0
    if random.random() < 0.3:
        start, sides = np.round(start), np.round(sides)
    return [*start.tolist(), *sides.tolist()]
