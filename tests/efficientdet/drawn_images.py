"""Drawn pictures whose only object is a red rectangle, so that a test finds it again in the pixels."""

import json
import pathlib

import numpy as np
from PIL import Image

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.datasets import open_source

SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), (192, 256), (50, 700)]  # height, width
RED, GREY = (230, 20, 30), (90, 110, 100)

Picture = tuple[np.ndarray, tuple[int, int, int, int]]  # uint8 image, its only box in ltwh px


def draw_rectangle(random: np.random.Generator, height: int, width: int) -> Picture:
    w, h = random.integers(width // 4, width // 2), random.integers(height // 4, height // 2)
    x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
    image = np.full((height, width, 3), GREY, np.uint8)
    image[y : y + h, x : x + w] = RED
    return image, (x, y, w, h)


def write_coco(directory: pathlib.Path, pictures: list[Picture], formats=("jpg", "png")):
    """Writes images of these formats in turn and returns their source; image ids are 10, 17, 24, ..."""
    images, annotations = [], []
    for number, (image, box) in enumerate(pictures):
        image_id, name = 10 + 7 * number, f"{number}.{formats[number % len(formats)]}"
        Image.fromarray(image).save(directory / name, quality=95, subsampling=0)
        images.append({"id": image_id, "file_name": name, "height": image.shape[0], "width": image.shape[1]})
        box = [float(side) for side in box]
        annotations.append({"id": number + 1, "image_id": image_id, "category_id": 17, "bbox": box})
    categories = [{"id": 3, "name": "thing"}, {"id": 17, "name": "other"}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (directory / "instances.json").write_text(json.dumps(document))
    return open_source(images=str(directory), annotations=str(directory / "instances.json"))


def find_rectangle(normalized: np.ndarray) -> np.ndarray | None:
    """ltrb in pixels of what is nearer to red than to grey and to the padding; None for a few pixels."""
    colors = np.array([RED, GREY, IMAGENET_MEAN])
    pixels = normalized * IMAGENET_STD + IMAGENET_MEAN
    nearest = np.abs(pixels[:, :, np.newaxis] - colors).sum(-1).argmin(-1)
    ys, xs = np.nonzero(nearest == 0)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) if len(ys) >= 12 else None
