"""Images with one rectangle in the colour of its class."""

import dataclasses

import numpy as np

from tests.common.drawn_sets import GREY, draw_rectangle, write_coco
from yolov4.config import get_config
from yolov4.loaders import make_loader
from yolov4.pipeline import FILL

INPUT = (128, 192)
OFF = {"jitter": 0.0, "flip_prob": 0.0, "hue": 0.0, "saturation": 1.0, "exposure": 1.0, "mosaic_prob": 0.0}
PLAIN = dataclasses.replace(get_config("yolov4"), image_size=INPUT, multi_scale=1.0, **OFF)
ALL = {"jitter": 0.3, "flip_prob": 0.5, "hue": 36.0, "saturation": 1.5, "exposure": 1.5}
SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), INPUT]
COLORS = [(230, 20, 30), (20, 200, 40), (30, 40, 240), (240, 230, 20), (230, 30, 240), (20, 220, 230)]
BATCH = 6


def write_rectangles(directory):
    """24 images of five shapes with the ids 1000, 1007, ..."""
    random = np.random.default_rng(0)
    pictures = []
    for i in range(24):
        label = i % len(COLORS)
        image, box = draw_rectangle(random, *SIZES[i % len(SIZES)], COLORS[label])
        pictures.append((1000 + 7 * i, image, [(label, box)]))
    return write_coco(directory, pictures)


def make(source, kind="dali_cpu", config=PLAIN, **options):
    options = {"batch_size": BATCH, "training": True, "num_threads": 1} | options
    return make_loader(kind, source=source, config=config, **options)


def batches(loader, count: int) -> list[dict[str, np.ndarray]]:
    """Each batch is {name: array}."""
    return [
        {"images": images.numpy(), **{name: tensor.numpy() for name, tensor in targets.items()}}
        for images, targets in loader.dataset().take(count)
    ]


def read(source, kind="dali_cpu", config=PLAIN, count=1, **options) -> list[dict[str, np.ndarray]]:
    return batches(make(source, kind, config, **options), count)


def assert_equal(one: list[dict], other: list[dict]) -> None:
    for batch, again in zip(one, other, strict=True):
        assert batch.keys() == again.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], again[name], err_msg=name)


def find_rectangle(mask: np.ndarray) -> np.ndarray:
    ys, xs = np.nonzero(mask)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def painted(shape: tuple[int, int], boxes: np.ndarray, classes: np.ndarray, grow: float) -> np.ndarray:
    """Returns bool (classes, H, W): pixels in boxes that are enlarged by `grow`."""
    height, width = shape
    y, x = np.mgrid[:height, :width] + 0.5
    masks = np.zeros((len(COLORS), height, width), bool)
    for (left, top, right, bottom), index in zip(boxes * ([width, height] * 2), classes, strict=True):
        masks[index] |= (x > left - grow) & (x < right + grow) & (y > top - grow) & (y < bottom + grow)
    return masks


def count_found(batch: dict[str, np.ndarray]) -> int:
    """Asserts that each box is filled with its class's colour, to 1.5 pixels. Returns the number of boxes."""
    rows = (batch[name] for name in ("images", "boxes", "classes", "num_boxes"))
    for image, boxes, classes, count in zip(*rows, strict=True):
        assert (classes[:count] >= 0).all() and (classes[count:] == -1).all() and (boxes[count:] == -1).all()
        assert (boxes[:count] >= 0).all() and (boxes[:count] <= 1).all()
        palette = np.array([*COLORS, GREY, (FILL,) * 3])
        nearest = np.abs(image[:, :, np.newaxis] * 255 - palette).sum(-1).argmin(-1)
        inner = painted(image.shape[:2], boxes[:count], classes[:count], -1.5)
        outer = painted(image.shape[:2], boxes[:count], classes[:count], 1.5)
        for index in range(len(COLORS)):
            assert not (nearest[~outer[index]] == index).any()
            assert (nearest[inner[index]] == index).all()
    return int(batch["num_boxes"].sum())
