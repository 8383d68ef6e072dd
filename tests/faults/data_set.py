"""A small valid data set that a test damages."""

import json
import pathlib

import numpy as np
import PIL.Image

CATEGORIES = [{"id": 2, "name": "cat"}, {"id": 5, "name": "dog"}, {"id": 9, "name": "cow"}]
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 84977953\n"


class DataSet:
    """Six images with two boxes each.

    Attributes:
        document: content of the json.
        image, annotation: the entries of the json that a test damages.
    """

    def __init__(self, directory: pathlib.Path, seed: int):
        self.directory = directory
        self.images_dir = directory / "images"
        self.json_path = directory / "instances.json"
        self.random = np.random.default_rng(seed)
        self.images_dir.mkdir(parents=True)
        images, annotations = [], []
        for i in range(6):
            width, height = 40 + 8 * i, 72 - 5 * i
            images.append({"id": 11 + 7 * i, "file_name": f"{i:03d}.jpg", "width": width, "height": height})
            pixels = self.random.integers(0, 256, (height, width, 3), np.uint8)
            PIL.Image.fromarray(pixels).save(self.images_dir / f"{i:03d}.jpg", quality=95)
            for _ in range(2):
                left, top = self.random.integers(0, 20, 2).tolist()
                annotation = {"id": 101 + 3 * len(annotations), "image_id": 11 + 7 * i}
                annotation |= {"category_id": int(self.random.choice([2, 5, 9])), "iscrowd": 0}
                annotations.append(annotation | {"bbox": [left, top, 10, 12], "area": 120})
        categories = [dict(category) for category in CATEGORIES]
        self.document = {"images": images, "annotations": annotations, "categories": categories}
        self.image = images[int(self.random.integers(1, len(images)))]
        self.annotation = annotations[int(self.random.integers(1, len(annotations)))]

    @property
    def file(self) -> pathlib.Path:
        """The damaged image."""
        return self.images_dir / self.image["file_name"]

    def write(self) -> None:
        self.json_path.write_text(json.dumps(self.document))
