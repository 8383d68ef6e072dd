"""A hundred drawn images of all shapes and formats with boxes of all kinds, and what is known of them."""

import json
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from PIL import Image

from common.datacheck.datasets import open_coco
from common.datasets import CocoSource

NUM_IMAGES = 100
CATEGORY_IDS = (90, 3, 17)  # with gaps and in no order: class 0 is the 3
SIZES = [(1, 1), (1, 37), (53, 1), (2, 2), (3, 5), (7, 300), (300, 7), (641, 427), (427, 641), (128, 192)]
COUNTS = [0, 1, 1, 2, 2, 3, 5, 8, 13, 21, 34, 60, 99, 100, 101, 150, 200]  # boxes of an image
FEW = 2  # boxes of an image that are mostly large, so that it can be cropped by their IoU with the crop
MOST_DRAWN = 12  # boxes of an image that are seen in it

# How a file is made: the mode of its pixels, the format, and what Pillow is told.
FORMATS = [
    ("RGB", "JPEG", {"quality": 95, "subsampling": 2}),
    ("RGB", "PNG", {"compress_level": 1}),
    ("RGB", "JPEG", {"quality": 95, "subsampling": 0}),
    ("RGB", "PNG", {"compress_level": 1}),
    ("RGB", "JPEG", {"quality": 95, "progressive": True}),
    ("L", "PNG", {"compress_level": 1}),
    ("RGBA", "PNG", {"compress_level": 1}),
    ("L", "JPEG", {"quality": 95}),
    ("P", "PNG", {"compress_level": 1}),
    ("CMYK", "JPEG", {"quality": 95}),
]
LIES_ON_ITS_SIDE = Image.Exif()
LIES_ON_ITS_SIDE[0x0112] = 6


class Annotated(NamedTuple):
    """One image as training should see it: boxes clipped to the image, none without area, no crowds."""

    image_id: int
    pixels: np.ndarray  # uint8 (height, width, 3) RGB, as stored
    boxes_px: np.ndarray  # float64 (N, 4) ltrb in pixels of the stored image
    classes: np.ndarray  # int (N,), 0-based

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[:2]


class FuzzedSet(NamedTuple):
    """A source for loaders, and what is known of its images, by id in the order of the file."""

    source: CocoSource
    images: dict[int, Annotated]


def write_fuzzed_set(directory: pathlib.Path) -> FuzzedSet:
    """Draws and writes the set as image files and instances.json."""
    random = np.random.default_rng(0)
    images, annotations = [], []
    for number in range(NUM_IMAGES):
        if number < len(SIZES):
            height, width = SIZES[number]
        else:
            height, width = np.exp(random.uniform(np.log(8), np.log(500), 2)).astype(int).tolist()
        count = random.choice(COUNTS)
        boxes_ltwh_px = [draw_box(random, height, width, 0.5 if count <= FEW else 0.1) for _ in range(count)]
        mode, suffix, options = FORMATS[number % len(FORMATS)]
        if suffix == "JPEG" and number % 7 == 0 and height != width:
            options = options | {"exif": LIES_ON_ITS_SIDE}
        path = directory / f"{number}.{suffix.lower()}"
        picture = Image.fromarray(draw_image(random, height, width, boxes_ltwh_px[:MOST_DRAWN]))
        picture.convert(mode).save(path, suffix, **options)

        image_id = 5 + 3 * number
        images.append({"id": image_id, "file_name": path.name, "height": height, "width": width})
        annotations += [
            {
                "image_id": image_id,
                "category_id": int(random.choice(CATEGORY_IDS)),
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": int(random.random() < 0.02),
            }
            for box in boxes_ltwh_px
        ]
    random.shuffle(annotations)  # they need not be grouped by image
    document = {
        "images": images,
        "annotations": [{"id": i, **annotation} for i, annotation in enumerate(annotations, 1)],
        "categories": [{"id": i, "name": f"thing {i}"} for i in CATEGORY_IDS],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    known = [_as_trained(entry["id"], directory / entry["file_name"], annotations) for entry in images]
    source = open_coco(str(directory), str(directory / "instances.json"))
    return FuzzedSet(source, {image.image_id: image for image in known})


def _as_trained(image_id: int, path: pathlib.Path, annotations: list[dict]) -> Annotated:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    annotations = [a for a in annotations if a["image_id"] == image_id and not a["iscrowd"]]
    boxes_ltwh_px = np.array([annotation["bbox"] for annotation in annotations]).reshape(-1, 4)
    ltrb_px = np.concatenate([boxes_ltwh_px[:, :2], boxes_ltwh_px[:, :2] + boxes_ltwh_px[:, 2:]], axis=1)
    boxes_px = np.clip(ltrb_px, 0, np.array(pixels.shape)[[1, 0, 1, 0]])
    has_area = (boxes_px[:, 2:] > boxes_px[:, :2]).all(1)
    classes = [sorted(CATEGORY_IDS).index(annotation["category_id"]) for annotation in annotations]
    return Annotated(image_id, pixels, boxes_px[has_area], np.array(classes, int)[has_area])


def draw_image(random: np.random.Generator, height: int, width: int, boxes_ltwh_px: Iterable) -> np.ndarray:
    """uint8 (height, width, 3): a smooth background, and a flat rectangle for each box."""
    coarse = random.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), np.uint8)
    image = np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    for left, top, box_width, box_height in boxes_ltwh_px:
        rows = slice(max(round(top), 0), max(round(top + box_height), 0))
        columns = slice(max(round(left), 0), max(round(left + box_width), 0))
        image[rows, columns] = random.integers(0, 256, 3)
    return image


def draw_box(
    random: np.random.Generator, height: int, width: int, smallest: float
) -> tuple[float, float, float, float]:
    """ltwh in pixels: of any size, tiny, at a border, the whole image, reaching outside, without area.

    Those of any size are at least the square of `smallest` times as large as the image, in both directions.
    """
    kind = random.choice(
        ["any", "tiny", "border", "whole", "outside", "empty"], p=[0.6, 0.15, 0.12, 0.02, 0.08, 0.03]
    )
    limits = np.array([width, height], float)
    if kind == "whole":
        return 0.0, 0.0, *limits.tolist()
    if kind == "tiny":
        sides = np.minimum(random.uniform(0.2, 4, 2), limits)
    else:
        sides = limits * random.uniform(smallest, 0.95, 2) ** 2
    start = random.uniform(0, 1, 2) * (limits - sides)
    if kind == "border":
        axis = random.integers(2)
        start[axis] = random.choice([0.0, limits[axis] - sides[axis]])
    elif kind == "outside":
        start += random.choice([-1, 1], 2) * sides * random.uniform(0, 1.5, 2)
    elif kind == "empty":
        sides[random.integers(2)] = 0.0
    if random.random() < 0.3:  # as people draw them
        start, sides = np.round(start), np.round(sides)
    return *start.tolist(), *sides.tolist()
