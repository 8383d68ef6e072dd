"""Images with a label file each, as Pascal VOC and YOLO have them, made into Annotations.

The two formats name no image ids. An image's id is the number that the digits of its name make
(2007_000027.jpg: 2007000027), so that it is the same in every split; unless two images would share one or a
name has no digits, or too many: then images are numbered from 1 in their order.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Sequence

import numpy as np

from common.annotations import Annotations
from common.datacheck.images import ImageFacts, ImagePolicy, check_files
from common.datacheck.issues import Issues
from common.errors import UserError
from common.labels import LabelMap

_MAX_IMAGE_ID = 2**31 - 1  # DALI takes these as they are


@dataclasses.dataclass
class LabelledImage:
    """An image and its objects.

    Attributes:
        file_name: relative to the directory of images.
        label_file: where its objects were read, for messages.
        size: (height, width) in pixels as the label file says; None: the image's header says it.
        boxes_ltwh_px: left, top, width, height of each object.
        category_ids: of each object.
        is_crowd: of each object.
    """

    file_name: str
    label_file: str
    size: tuple[int, int] | None = None
    boxes_ltwh_px: list[Sequence[float]] = dataclasses.field(default_factory=list)
    category_ids: list[int] = dataclasses.field(default_factory=list)
    is_crowd: list[bool] = dataclasses.field(default_factory=list)

    def add(self, box_ltwh_px: Sequence[float], category_id: int, *, is_crowd: bool = False) -> None:
        """Adds an object."""
        self.boxes_ltwh_px.append(box_ltwh_px)
        self.category_ids.append(category_id)
        self.is_crowd.append(is_crowd)

    def __str__(self) -> str:
        return f"image {self.file_name!r} ({self.label_file})"


def image_ids(file_names: Sequence[str]) -> list[int]:
    """An id for each image; the module says which."""
    digits = [re.sub(r"[^0-9]", "", pathlib.PurePath(name).stem) for name in file_names]
    ids = [int(number) if 0 < len(number) < 19 else _MAX_IMAGE_ID + 1 for number in digits]
    if len(set(ids)) == len(ids) and max(ids, default=0) <= _MAX_IMAGE_ID:
        return ids
    return list(range(1, len(file_names) + 1))


def read_label_file(path: str | os.PathLike, issues: Issues) -> bytes | None:
    """The content of a label file; None, with an issue, where it cannot be read."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            issues.add("label-file", f"{os.fspath(path)} is no regular file")  # reading a pipe never ends
            return None
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        issues.add("label-file", f"{os.fspath(path)}: {error.strerror}")
        return None


def read_text(path: str | os.PathLike) -> str:
    """The text of a file; UserError where it cannot be read or is not UTF-8."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{os.fspath(path)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{os.fspath(path)} is no UTF-8 text: {error}") from error


def read_list(path: str | os.PathLike) -> list[tuple[int, str]]:
    """The lines of a list of names that are not blank, with their numbers from 1.

    Raises:
        UserError: the file cannot be read or is no text.
    """
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), 1)]
    return [(number, line) for number, line in lines if line]


def find_listed(
    path: str | os.PathLike, find: Callable[[str], str | None], missing: str, issues: Issues
) -> list[str]:
    """What the lines of a list name, each once, in their order.

    Args:
        path: of the list.
        find: what a line names; None where there is no such thing.
        missing: kind of issue for these lines.
        issues: gets them, and lines that name the same again.
    """
    found: dict[str, int] = {}
    for number, line in read_list(path):
        item = find(line)
        if item is None:
            issues.add(missing, f"{path} line {number}: there is no {line!r}")
        elif item in found:
            first = found[item]
            issues.add("label-line", f"{path} line {number}: {line!r} stands in line {first} already")
        else:
            found[item] = number
    return list(found)


def inspect_images(
    images: Sequence[LabelledImage], images_dir: str, policy: ImagePolicy, issues: Issues
) -> tuple[list[LabelledImage], list[ImageFacts]]:
    """Inspects the image files and adds what is wrong with them to `issues`.

    Returns:
        The images that can be used, with the size of the header where the label file gives none, and what
        is known of each.
    """
    names = []
    for image in images:
        is_utf_8 = not any("\ud800" <= letter <= "\udfff" for letter in image.file_name)
        names.append(image.file_name if is_utf_8 else "")
        if not is_utf_8:
            issues.add("image-unreadable", f"{image}: its name is no UTF-8, which json requires")
    sizes = np.array([image.size or (0, 0) for image in images], np.int32).reshape(-1, 2)
    usable, facts = check_files(images_dir, names, sizes, lambda row: str(images[row]), policy, issues)
    for image, fact in zip(images, facts, strict=True):
        if image.size is None and not fact.fault:
            image.size = (fact.height, fact.width)
    kept = np.flatnonzero(usable).tolist()
    return [images[row] for row in kept], [facts[row] for row in kept]


def as_annotations(
    images: Sequence[LabelledImage], label_map: LabelMap, policy: ImagePolicy, issues: Issues
) -> Annotations:
    """The annotations of images that were inspected.

    Raises:
        DataError: everything in `issues` that stops, by `policy`; or that there is no image or no box.
    """
    if policy.on_bad_image == "skip":
        issues.skip_images()
    if not issues.stopping and not images:
        issues.add("no-images", "there is none left")
    if not issues.stopping and not any(image.category_ids for image in images):
        issues.add("no-boxes", f"{len(images)} images, none with an object")
    issues.raise_if_stopping()
    boxes = [box for image in images for box in image.boxes_ltwh_px]
    boxes_ltwh_px = np.array(boxes, np.float64).reshape(-1, 4)
    counts = [len(image.category_ids) for image in images]
    file_names = [image.file_name for image in images]
    return Annotations(
        label_map=label_map,
        image_ids=np.array(image_ids(file_names), np.int64),
        file_names=file_names,
        image_sizes=np.array([image.size for image in images], np.int32),
        box_image=np.repeat(np.arange(len(images)), counts),
        boxes_ltwh_px=boxes_ltwh_px,
        category_ids=np.array([i for image in images for i in image.category_ids], np.int64),
        is_crowd=np.array([crowd for image in images for crowd in image.is_crowd], np.bool_),
        areas=boxes_ltwh_px[:, 2] * boxes_ltwh_px[:, 3],
        origin=issues.origin,
        issues=issues,
    )
