"""Writes COCO data sets whose true boxes are known."""

import json
import pathlib

import numpy as np
import PIL.Image

from common.data.coco import CocoSource
from common.data.open import open_source

GREY = (90, 110, 100)


def draw_rectangle(random: np.random.Generator, height: int, width: int, color) -> tuple[np.ndarray, tuple]:
    """Returns an image, uint8 (height, width, 3), and the box of its rectangle, ltwh in pixels."""
    w, h = random.integers(width // 4, width // 2), random.integers(height // 4, height // 2)
    x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
    image = np.full((height, width, 3), GREY, np.uint8)
    image[y : y + h, x : x + w] = color
    return image, (x, y, w, h)


def write_coco(directory: pathlib.Path, pictures, suffixes=("png",), crowds=()) -> CocoSource:
    """Writes image files and a COCO json.

    Args:
        pictures: list of (image id, uint8 image, [(class, ltwh px), ...]). Class k, 0 to 5, has id 3 + 7 k.
        suffixes: suffixes of the image files, used in turn.
        crowds: indices of the boxes that mark crowds. The boxes of all images are counted from 0.
    """
    images, annotations = [], []
    for row, (image_id, image, objects) in enumerate(pictures):
        name = f"{image_id}.{suffixes[row % len(suffixes)]}"
        PIL.Image.fromarray(image).save(directory / name, quality=95, subsampling=0)
        images.append({"id": image_id, "file_name": name, "height": image.shape[0], "width": image.shape[1]})
        for label, ltwh in objects:
            box = {"image_id": image_id, "category_id": 3 + 7 * label, "bbox": [float(x) for x in ltwh]}
            number = len(annotations)
            annotations.append(box | {"id": number + 1, "iscrowd": int(number in crowds)})
    categories = [{"id": 3 + 7 * i, "name": f"thing {i}"} for i in range(6)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (directory / "instances.json").write_text(json.dumps(document))
    source = open_source(images=str(directory), annotations=str(directory / "instances.json"))
    assert isinstance(source, CocoSource)
    return source
