"""A small valid data set, and the class of the faults that damage it.

image_faults.py, json_faults.py and record_faults.py list the faults. A function with the decorator
`@fault(kind)` puts one fault into a `DataSet` or `RecordSet`, and returns the texts that the report must
contain. None stands for `data.damaged_name`.
"""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Callable

import numpy as np
import PIL.Image

CATEGORIES = [{"id": 2, "name": "cat"}, {"id": 5, "name": "dog"}, {"id": 9, "name": "cow"}]
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 84977953\n"


class DataSet:
    """Six images with boxes. A fault damages one image or one annotation.

    Attributes:
        document: content of the json.
        content: bytes of the damaged json file. None: `document` is written.
        image, annotation: the entries of the json that a fault damages.
        options: options of the check, for example `decode`.
    """

    def __init__(self, directory: pathlib.Path, seed: int):
        self.directory = directory
        self.images_dir = directory / "images"
        self.json_path = directory / "instances.json"
        self.random = np.random.default_rng(seed)
        self.content: bytes | None = None
        self.options: dict = {}
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

    @property
    def damaged_name(self) -> str:
        """The name of the damaged image in a report."""
        return f"image {self.image['id']} ('{self.image['file_name']}')"

    def write(self) -> None:
        """Writes the json, if no fault has put something else at its path."""
        if not self.json_path.exists() and not self.json_path.is_symlink():
            document = json.dumps(self.document).encode()
            self.json_path.write_bytes(document if self.content is None else self.content)


@dataclasses.dataclass(frozen=True)
class Fault:
    """`kind` is the kind in the report. `damage` damages the data."""

    name: str
    kind: str
    damage: Callable[..., list[str] | None]

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def apply(self, data) -> list[str]:
        """Damages the data; returns the texts that the report must contain."""
        texts = self.damage(data)
        return [data.damaged_name] if texts is None else texts


def registry(faults: list[Fault]):
    """Returns the decorator `@fault(kind)`, which appends a fault to the list."""

    def fault(kind: str, name: str | None = None):
        def register(damage: Callable):
            faults.append(Fault(name or damage.__name__, kind, damage))
            return damage

        return register

    return fault
