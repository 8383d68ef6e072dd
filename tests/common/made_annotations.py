"""Makes Annotations without files."""

import numpy as np

from common.data.annotations import Annotations
from common.data.labels import LabelMap


def annotations(image_sizes, boxes, names=("cat", "dog", "cow"), crowds=(), areas=None):
    """Makes Annotations with the image ids 101, 102, ... and the class ids 10, 20, ...

    Args:
        image_sizes: (height, width) of each image.
        boxes: (image, class, left, top, width, height) of each box. Image and class are indices from 0, the
            other values are pixels.
        crowds: indices of the boxes that mark a crowd.
        areas: `area` of each box. By default, it is width * height.
    """
    rows = np.array(boxes, np.float64).reshape(-1, 6)
    order = np.argsort(rows[:, 0], kind="stable")
    rows = rows[order]
    label_map = LabelMap(tuple(range(10, 10 * len(names) + 10, 10)), tuple(names))
    return Annotations(
        label_map=label_map,
        image_ids=np.arange(len(image_sizes), dtype=np.int64) + 101,
        file_names=[f"{i + 1}.jpg" for i in range(len(image_sizes))],
        image_sizes=np.array(image_sizes, np.int32).reshape(-1, 2),
        box_image=rows[:, 0].astype(np.int64),
        boxes_ltwh_px=rows[:, 2:],
        category_ids=rows[:, 1].astype(np.int64) * 10 + 10,
        is_crowd=np.isin(order, list(crowds)),
        areas=rows[:, 4] * rows[:, 5] if areas is None else np.array(areas, np.float64)[order],
        origin="made.json",
    )


def random_annotations(rng, num_images, most_boxes, num_classes=3, smallest=0.02, largest=0.6):
    """Makes random Annotations. `smallest` and `largest` limit the sides of boxes, relative to the image."""
    sizes, rows = [], []
    for image in range(num_images):
        height, width = rng.integers(80, 700, 2).tolist()
        sizes.append((height, width))
        for _ in range(int(rng.integers(0, most_boxes + 1))):
            w, h = np.exp(rng.uniform(np.log(smallest), np.log(largest), 2))
            x, y = rng.uniform(0, 1 - w), rng.uniform(0, 1 - h)
            label = int(rng.integers(num_classes))
            rows.append((image, label, x * width, y * height, w * width, h * height))
    return annotations(sizes, rows, [f"class {i}" for i in range(num_classes)])
