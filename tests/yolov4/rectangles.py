"""Images with one flat rectangle in the colour of its class; where these are found again in a batch."""

import dataclasses
import json

import numpy as np
from PIL import Image

from common.datasets import open_source
from yolov4.config import get_config
from yolov4.loaders import make_loader
from yolov4.pipeline import FILL

INPUT = (128, 192)  # height, width: not square, so that a swapped axis shows
OFF = {"jitter": 0.0, "flip_prob": 0.0, "hue": 0.0, "saturation": 1.0, "exposure": 1.0, "mosaic_prob": 0.0}
PLAIN = dataclasses.replace(get_config("yolov4"), image_size=INPUT, multi_scale=1.0, **OFF)
ALL = {"jitter": 0.3, "flip_prob": 0.5, "hue": 36.0, "saturation": 1.5, "exposure": 1.5}
SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), INPUT]
GREY = (90, 110, 100)
COLORS = [(230, 20, 30), (20, 200, 40), (30, 40, 240), (240, 230, 20), (230, 30, 240), (20, 220, 230)]
BATCH = 6


def write_rectangles(directory):
    """24 images of five shapes, with ids 1000, 1007, ..."""
    random = np.random.default_rng(0)
    pictures = []
    for i in range(24):
        height, width = SIZES[i % len(SIZES)]
        w, h = random.integers(width // 4, width // 2), random.integers(height // 4, height // 2)
        x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
        image = np.full((height, width, 3), GREY, np.uint8)
        image[y : y + h, x : x + w] = COLORS[i % len(COLORS)]
        pictures.append((1000 + 7 * i, image, [(i % len(COLORS), (x, y, w, h))]))
    return write_coco(directory, pictures)


def write_coco(directory, pictures, crowds=()):
    """[(id, uint8 image, [(class, ltwh px)])] -> a source; `crowds` are numbers of boxes."""
    images, annotations = [], []
    for image_id, image, objects in pictures:
        Image.fromarray(image).save(directory / f"{image_id}.png")
        height, width, _ = image.shape
        images.append({"id": image_id, "file_name": f"{image_id}.png", "height": height, "width": width})
        for label, ltwh in objects:
            box = {"image_id": image_id, "category_id": 3 + 7 * label, "bbox": [float(x) for x in ltwh]}
            number = len(annotations)
            annotations.append(box | {"id": number + 1, "iscrowd": int(number in crowds)})
    categories = [{"id": 3 + 7 * i, "name": f"thing {i}"} for i in range(len(COLORS))]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (directory / "instances.json").write_text(json.dumps(document))
    return open_source(images=str(directory), annotations=str(directory / "instances.json"))


def make(source, kind="dali_cpu", config=PLAIN, **options):
    options = {"batch_size": BATCH, "training": True, "num_threads": 1} | options
    return make_loader(kind, source=source, config=config, **options)


def batches(loader, count: int) -> list[dict[str, np.ndarray]]:
    """Batches by name."""
    return [
        {"images": images.numpy(), **{name: tensor.numpy() for name, tensor in targets.items()}}
        for images, targets in loader.dataset().take(count)
    ]


def read(source, kind="dali_cpu", config=PLAIN, count=1, **options) -> list[dict[str, np.ndarray]]:
    return batches(make(source, kind, config, **options), count)


def assert_equal(one: list[dict], other: list[dict]) -> None:
    """Batches, bit by bit."""
    for batch, again in zip(one, other, strict=True):
        assert batch.keys() == again.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], again[name], err_msg=name)


def nearest_color(image: np.ndarray) -> np.ndarray:
    """int (H, W): which of COLORS; more for what is nearer to the background or the padding."""
    palette = np.array([*COLORS, GREY, (FILL,) * 3])
    return np.abs(image[:, :, np.newaxis] * 255 - palette).sum(-1).argmin(-1)


def find_rectangle(mask: np.ndarray) -> np.ndarray:
    """ltrb in pixels."""
    ys, xs = np.nonzero(mask)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def painted(shape: tuple[int, int], boxes: np.ndarray, classes: np.ndarray, grow: float) -> np.ndarray:
    """bool (classes, H, W): the pixels whose centres lie in boxes that grew by `grow` pixels on each side."""
    height, width = shape
    y, x = np.mgrid[:height, :width] + 0.5
    masks = np.zeros((len(COLORS), height, width), bool)
    for (left, top, right, bottom), index in zip(boxes * ([width, height] * 2), classes, strict=True):
        masks[index] |= (x > left - grow) & (x < right + grow) & (y > top - grow) & (y < bottom + grow)
    return masks


def count_found(batch: dict[str, np.ndarray]) -> int:
    """Asserts that every colour fills the boxes of its class, to 1.5 pixels, and shows nowhere else."""
    rows = (batch[name] for name in ("images", "boxes", "classes", "num_boxes"))
    for image, boxes, classes, count in zip(*rows, strict=True):
        assert (classes[:count] >= 0).all() and (classes[count:] == -1).all() and (boxes[count:] == -1).all()
        assert (boxes[:count] >= 0).all() and (boxes[:count] <= 1).all()
        nearest = nearest_color(image)
        inner = painted(image.shape[:2], boxes[:count], classes[:count], -1.5)
        outer = painted(image.shape[:2], boxes[:count], classes[:count], 1.5)
        for index in range(len(COLORS)):
            assert not (nearest[~outer[index]] == index).any()
            assert (nearest[inner[index]] == index).all()
    return int(batch["num_boxes"].sum())
