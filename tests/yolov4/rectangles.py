"""Images with one rectangle in the colour of its class, and loaders that read them."""

import dataclasses

import numpy as np

from tests.common.drawn_sets import draw_rectangle, write_coco
from yolov4.config import get_config
from yolov4.loaders import make_loader

INPUT = (128, 192)
NOTHING_RANDOM = {"jitter": 0.0, "flip_prob": 0.0, "hue": 0.0, "saturation": 1.0, "exposure": 1.0}
NOTHING_RANDOM |= {"mosaic_prob": 0.0, "multi_scale": 1.0}
PLAIN = dataclasses.replace(get_config("yolov4"), image_size=INPUT, **NOTHING_RANDOM)
AUGMENTATIONS = {"jitter": 0.3, "flip_prob": 0.5, "hue": 36.0, "saturation": 1.5, "exposure": 1.5}
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


def training_loader(source, kind="dali_cpu", config=PLAIN, **options):
    options = {"batch_size": BATCH, "training": True, "num_threads": 1} | options
    return make_loader(kind, source=source, config=config, **options)


def take_batches(loader, count: int) -> list[dict[str, np.ndarray]]:
    """Each batch is {name: array}."""
    return [
        {"images": images.numpy(), **{name: tensor.numpy() for name, tensor in targets.items()}}
        for images, targets in loader.dataset().take(count)
    ]


def read_batches(source, kind="dali_cpu", config=PLAIN, count=1, **options) -> list[dict[str, np.ndarray]]:
    return take_batches(training_loader(source, kind, config, **options), count)


def assert_batches_equal(batches: list[dict], expected: list[dict]) -> None:
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.keys() == expected_batch.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], expected_batch[name], err_msg=name)
