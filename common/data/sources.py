"""Defines `Source`, an opened data set. open.py opens the sources that the flags name."""

import abc
import functools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common.data import storage
from common.data.annotations import Annotations, without_objects
from common.data.labels import LabelMap
from common.data.storage import Stat, StoreError
from common.errors import UserError
from common.progress import log

if TYPE_CHECKING:
    from common.dali_ops import Nodes


SHOWN_IMAGES = 3  # images that `summary` names
FIRST_IMAGES = "first images"  # a key of `summary`


class Source(abc.ABC):
    """An opened data set.

    Attributes:
        name: "coco", "tfrecord", "webdataset", "images" or "video".
        annotations: annotations of the images in reading order; they have no boxes for unlabelled images.
        files: the paths of the images, if each image has its own file.
        objects: the files of the data set that are in a bucket, as they were checked.
    """

    name: str
    annotations: Annotations
    files: Sequence[str]
    objects: Sequence[Stat] = ()

    @property
    def size(self) -> int:
        return self.annotations.num_images

    @property
    def label_map(self) -> LabelMap:
        return self.annotations.label_map

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the annotations and their order. A run does not resume if it has changed."""
        return self.annotations.fingerprint()

    def summary(self) -> dict[str, Any]:
        """Returns what a message can say if the data of a run have changed: JSON values."""
        names = [self.annotations.image_name(row) for row in range(min(self.size, SHOWN_IMAGES))]
        return {"images": self.size, "boxes": self.annotations.num_boxes, FIRST_IMAGES: names}

    def image_name(self, row: int) -> str:
        """Returns an image's name for messages."""
        return self.annotations.image_name(row)

    def encoded(self, row: int) -> bytes:
        """Returns the bytes of the image file of row `row`; raises OSError."""
        return pathlib.Path(self.files[row]).read_bytes()

    def check_unchanged(self, *, strict: bool = False) -> None:
        """Raises UserError if an object in a bucket has changed since the check: DALI may read it as noise.

        Args:
            strict: also raise StoreError if the store does not answer. Otherwise, only warn.
        """
        try:
            stats = storage.stat([each.path for each in self.objects])
        except StoreError as error:
            if strict:
                raise
            log(f"warning: unknown whether the data have changed: {error}")
            return
        for each in self.objects:
            if stats.get(each.path) != each:
                change = "has changed" if each.path in stats else "is no longer there"
                raise UserError(f"{each.path} {change} since the check: restore it, or start a new run")

    @abc.abstractmethod
    def read(self, *, training: bool, **options: Any) -> "Nodes":
        """Adds a reader to a DALI graph; returns its nodes (jpegs, boxes, labels, image_ids).

        Args:
            training: if True, images are shuffled and repeat without end. If False, they are read in order.
                See readers.py.
            options: shard_id, num_shards, seed, shuffle and name. The name must be unique in the graph.
        """


class ImageListSource(Source):
    """Image files without annotations; image ids are positions in `files`.

    Args:
        sizes: (height, width) of each image in pixels; default: unknown.
    """

    name = "images"

    def __init__(self, files: Sequence[str], sizes: Sequence[tuple[int, int]] | None = None) -> None:
        self.files, self.annotations = files, without_objects(files, "images", sizes)

    def image_name(self, row: int) -> str:
        return repr(self.files[row])

    def read(self, *, training: bool, seed: int = 0, shuffle: str = "global", **options: Any) -> "Nodes":
        if training:
            raise ValueError("images without annotations cannot be used for training")
        from common.data import readers

        return readers.file_reader(self.files, **options)


class Data(NamedTuple):
    """The data of a run.

    Attributes:
        train, evaluation: the sources of both data sets; None if the data are synthetic or not given.
        label_map: the classes of the training data.
        num_classes: number of classes of the model; --num_classes may be larger than the label map.
    """

    train: Source | None
    evaluation: Source | None
    label_map: LabelMap
    num_classes: int
