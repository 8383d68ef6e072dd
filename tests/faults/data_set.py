"""A small sound data set to be spoilt: one thing in it goes wrong, chosen by a seed.

Each fault is a function under `@fault(kind)`: it spoils a `DataSet` and returns what the report must say, at
least: the id of the offender and the value or the file.
"""

import dataclasses
import io
import json
import pathlib
import zlib
from collections.abc import Callable

import numpy as np
import PIL.Image

from common.datacheck.issues import KINDS

NUM_IMAGES = 6
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 84977953\n"


class DataSet:
    """A sound COCO data set to be spoilt: six images, boxes within them, ids with gaps.

    Attributes:
        directory: it has images/ and, once written, instances.json.
        random: seeded; chooses the victims.
        document: the json to be.
        content: the bytes of the json where they are not those of `document`.
        image, annotation: the victims.
        options: of the check, `decode` and others.
    """

    def __init__(self, directory: pathlib.Path, seed: int):
        self.directory = directory
        self.random = np.random.default_rng(seed)
        self.content: bytes | None = None
        self.options: dict = {}
        (directory / "images").mkdir(parents=True)
        images, annotations = [], []
        for i in range(NUM_IMAGES):
            width, height = (40 + 8 * i, 72 - 5 * i)
            image_id = 11 + 7 * i
            images.append({"id": image_id, "file_name": f"{i:03d}.jpg", "width": width, "height": height})
            self._draw(width, height).save(directory / "images" / f"{i:03d}.jpg", quality=95)
            for _ in range(2):
                left, top = self.random.integers(0, 20, 2).tolist()
                annotations.append(
                    {
                        "id": 101 + 3 * len(annotations),
                        "image_id": image_id,
                        "category_id": int(self.random.choice([2, 5, 9])),
                        "bbox": [left, top, 10, 12],
                        "area": 120,
                        "iscrowd": 0,
                    }
                )
        categories = [{"id": i, "name": name} for i, name in ((2, "cat"), (5, "dog"), (9, "cow"))]
        self.document = {"images": images, "annotations": annotations, "categories": categories}
        self.image = images[int(self.random.integers(NUM_IMAGES))]
        self.annotation = annotations[int(self.random.integers(len(annotations)))]

    def _draw(self, width: int, height: int) -> PIL.Image.Image:
        return PIL.Image.fromarray(self.random.integers(0, 256, (height, width, 3), np.uint8))

    @property
    def images_dir(self) -> pathlib.Path:
        return self.directory / "images"

    @property
    def json_path(self) -> pathlib.Path:
        return self.directory / "instances.json"

    @property
    def file(self) -> pathlib.Path:
        """The victim's image file."""
        return self.images_dir / self.image["file_name"]

    @property
    def image_words(self) -> list[str]:
        """How a report must name the victim."""
        return [f"image {self.image['id']}", self.image["file_name"]]

    def name_of(self, annotation: dict) -> str:
        return f"annotation {annotation['id']}"

    def save_as(self, image_format: str, suffix: str | None = None, **options) -> bytes:
        """Writes the victim's image again in another format; returns the bytes."""
        picture = PIL.Image.open(self.file).convert("RGB")
        stream = io.BytesIO()
        picture.save(stream, image_format, **options)
        self.file.unlink()
        if suffix:
            self.image["file_name"] = f"{self.file.stem}{suffix}"
        self.file.write_bytes(stream.getvalue())
        return stream.getvalue()

    def write(self) -> None:
        """Writes the json, where no fault has put something else in its place."""
        if not self.json_path.exists() and not self.json_path.is_symlink() and self.content != b"absent":
            self.json_path.write_bytes(
                json.dumps(self.document).encode() if self.content is None else self.content
            )


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: its name, the kind that the report must give it, and how it is made."""

    name: str
    kind: str
    spoil: Callable[[DataSet], list[str]]

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())


def registry(faults: list[Fault]):
    """The decorator `@fault(kind)`, which adds what it decorates to a list."""

    def fault(kind: str):
        assert kind in KINDS, kind

        def register(spoil: Callable):
            faults.append(Fault(spoil.__name__, kind, spoil))
            return spoil

        return register

    return fault
