"""Defines `Source`, an opened data set. The functions open the data sets that the flags name, without checks.

The apps import `common.data.check.datasets`, whose functions have the same names and also check the data.
If tools/copy_app.py copies an app without this check, the copy imports this file instead.
"""

import abc
import functools
import glob
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common.args import IMAGE_SUFFIXES, Args, ImagePolicy
from common.data.annotations import Annotations, read_coco, without_objects
from common.data.labels import LabelMap
from common.errors import UserError
from common.files import user_errors
from common.progress import log

if TYPE_CHECKING:
    from common.dali_ops import Nodes

_IN_SUMMARY = ("crowd", "image-without-boxes")  # kinds of issues that Annotations.summary counts


class Source(abc.ABC):
    """An opened data set.

    Attributes:
        name: "coco", "tfrecord", "images" or "video".
        annotations: annotations of the images in reading order; they have no boxes for unlabelled images.
        files: the paths of the images, if each image has its own file.
    """

    name: str
    annotations: Annotations
    files: Sequence[str]

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

    def image_name(self, row: int) -> str:
        """Returns an image's name for messages."""
        return self.annotations.image_name(row)

    def encoded(self, row: int) -> bytes:
        """Returns the bytes of the image file of row `row`; raises OSError."""
        return pathlib.Path(self.files[row]).read_bytes()

    @abc.abstractmethod
    def read(self, *, training: bool, **options: Any) -> "Nodes":
        """Adds a reader to a DALI graph; returns its nodes (jpegs, boxes, labels, image_ids).

        Args:
            training: if True, images are shuffled and repeat without end. If False, they are read in order.
                See readers.py.
            options: shard_id, num_shards, seed and name. The name must be unique in the graph.
        """


class CocoSource(Source):
    """A directory of images, and a COCO json with file names relative to it."""

    name = "coco"

    def __init__(self, images_dir: str, annotations: Annotations) -> None:
        self.images_dir, self.annotations = images_dir, annotations
        self.files = [os.path.join(images_dir, name) for name in annotations.file_names]

    def read(self, *, training: bool, **options: Any) -> "Nodes":
        from common import readers  # check_data.py needs no DALI

        return readers.coco_reader(self.images_dir, self.annotations, training=training, **options)


class ImageListSource(Source):
    """Image files without annotations; image ids are positions in `files`."""

    name = "images"

    def __init__(self, files: Sequence[str]) -> None:
        self.files, self.annotations = files, without_objects(files, "images")

    def image_name(self, row: int) -> str:
        return repr(self.files[row])

    def read(self, *, training: bool, seed: int = 0, **options: Any) -> "Nodes":
        if training:
            raise ValueError("images without annotations cannot be used for training")
        from common.data import readers

        return readers.file_reader(self.files, **options)


# --- opening ---


class DataFlags(NamedTuple):
    """The data flags of one split: a directory and a COCO json, or a glob of TFRecords."""

    images: str | None = None
    annotations: str | None = None
    file_pattern: str | None = None


class Opener:
    """Opens data sets without checking them; common/data/check overrides some methods."""

    def open_coco(self, images: str, annotations: str, policy: ImagePolicy = ImagePolicy()) -> CocoSource:
        """Opens the images and annotations of a COCO json."""
        return CocoSource(images, read_coco(annotations))

    def open_tfrecords(
        self, pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
    ) -> Source:
        """Always raises UserError: only common/data/check can open TFRecords."""
        raise UserError(f"{pattern}: this copy of the app cannot read TFRecords: give images and a COCO json")

    def open_images(self, images: str, policy: ImagePolicy = ImagePolicy()) -> ImageListSource:
        """Opens the images of --images; UserError if there are none."""
        return ImageListSource(list_images(images))

    def join(self, errors: Sequence[UserError]) -> UserError:
        """Returns the one error to raise for the errors of several data sets."""
        return errors[0]

    def refuse(self, origin: str, kind: str, offenders: Sequence[str]) -> None:
        """Raises UserError if `offenders` is not empty; `kind` is a key of KINDS in check/issues.py."""
        if offenders:
            raise UserError(f"{origin}: {kind.replace('-', ' ')}: {offenders[0]}")

    def check_sizes(self, source: Source, batch_size: int, num_replicas: int, max_instances: int) -> None:
        """Raises UserError if `source` has fewer images than the ranks need for one batch each."""
        if source.size < batch_size * num_replicas:
            ranks = f" x {num_replicas} ranks" if num_replicas > 1 else ""
            found = f"{source.size} images, --batch_size={batch_size}{ranks}"
            self.refuse(source.annotations.origin, "fewer-than-batch", [found])

    # --- flags -> sources ---

    def check_labels(self, label_map: LabelMap, source: Source) -> None:
        """Raises UserError if `source` has a category that `label_map` lacks. Compares ids and names."""
        differences = label_map.differences(source.label_map)
        self.refuse(source.annotations.origin, "eval-categories", differences)

    def open_source(
        self,
        images: str | None = None,
        annotations: str | None = None,
        file_pattern: str | None = None,
        *,
        input_type: str | None = None,
        label_map: str | None = None,
        policy: ImagePolicy = ImagePolicy(),
        split: str = "train",
    ) -> Source:
        """Opens the data set that the data flags of one split describe.

        Args:
            images, annotations, file_pattern: values of the split's flags.
            input_type: "coco" or "tfrecord"; None: the format whose flags are given.
            split: "train", "eval" or "", the prefix of the flags in messages.

        Raises:
            UserError: flags or files are missing or contradict each other, or the data is faulty.
        """
        prefix = f"--{split}_" if split else "--"
        coco = {f"{prefix}images": images, f"{prefix}annotations": annotations}
        named = [flag for flag, value in coco.items() if value]
        if file_pattern and named and input_type is None:
            raise UserError(f"{prefix}file_pattern (TFRecords) and {named[0]} (COCO) are both given: use one")
        if input_type == "tfrecord" and not file_pattern:
            raise UserError(f"--input_type=tfrecord needs {prefix}file_pattern")
        if file_pattern and input_type != "coco":
            return self.open_tfrecords(file_pattern, label_map, policy=policy)
        if images and annotations:
            return self.open_coco(images, annotations, policy=policy)
        if named:
            (absent,) = set(coco) - set(named)
            raise UserError(f"{named[0]} is given without {absent}: COCO data needs both")
        raise UserError(f"no data: give {' and '.join(coco)} (COCO), or {prefix}file_pattern (TFRecords)")

    def open_pair(
        self,
        train: DataFlags,
        evaluation: DataFlags,
        *,
        names: tuple[str, str] = ("train", "eval"),
        **options: Any,
    ) -> tuple[Source, Source | None]:
        """Opens the training and the evaluation data. The latter is None if `evaluation` has no values.

        Args:
            names: the argument `split` of `open_source` for each of the two.
            options: other arguments of `open_source`.

        Raises:
            UserError: see `open_source`; or the evaluation data have a category that the training data lack.
        """
        sources, errors = [], []
        for split, flags in zip(names, (train, evaluation), strict=True):
            if flags is train or any(flags):
                try:
                    sources.append(self.open_source(*flags, split=split, **options))
                except UserError as error:
                    errors.append(error)
        if errors:
            raise self.join(errors)
        if len(sources) == 1:
            return sources[0], None
        self.check_labels(sources[0].label_map, sources[1])
        return sources[0], sources[1]

    def open_datasets(
        self, a: Args, *, num_replicas: int, max_instances: int
    ) -> tuple[Source, Source | None]:
        """Opens the training data and, if given, the evaluation data of train.py. Logs summaries.

        Args:
            max_instances: largest number of boxes that are kept per image.

        Raises:
            UserError: see `open_pair` and `check_sizes`.
        """
        train = DataFlags(a.train_images, a.train_annotations, file_pattern=a.train_file_pattern)
        sources = self.open_pair(train, _evaluation_flags(a), **_options(a))
        log_source("training", sources[0])
        self.check_sizes(sources[0], a.batch_size, num_replicas, max_instances)
        if sources[1]:
            log_source("evaluation", sources[1])
        return sources

    def open_evaluation(self, a: Any, label_map: LabelMap) -> Source:
        """Opens the evaluation data of eval.py and logs a summary.

        Args:
            label_map: the classes that the network was trained on.

        Raises:
            UserError: see `open_source` and `check_labels`.
        """
        source = self.open_source(*_evaluation_flags(a), split="eval", **_options(a))
        self.check_labels(label_map, source)
        log_source("evaluation", source)
        return source


def _evaluation_flags(a: Any) -> DataFlags:
    return DataFlags(a.eval_images, a.eval_annotations, file_pattern=a.eval_file_pattern)


def _options(a: Any) -> dict[str, Any]:
    policy = ImagePolicy(a.on_bad_image, a.max_megapixels)
    return {"input_type": a.input_type, "label_map": a.label_map, "policy": policy}


_PLAIN = Opener()
open_images, open_source, open_pair = _PLAIN.open_images, _PLAIN.open_source, _PLAIN.open_pair
open_datasets, open_evaluation = _PLAIN.open_datasets, _PLAIN.open_evaluation
check_labels = _PLAIN.check_labels


def list_images(images: str) -> tuple[str, ...]:
    """Returns the sorted image files that --images names: a file, a directory or a glob.

    Raises:
        UserError: there is no such image file.
    """
    path = pathlib.Path(images)
    with user_errors(f"--images={images}"):
        if path.is_file():
            return (images,)
        if not path.exists() and not glob.has_magic(images):
            raise UserError(f"--images={images}: no such file or directory")
        found = path.iterdir() if path.is_dir() else map(pathlib.Path, glob.glob(images, recursive=True))
        files = sorted(file for file in found if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if not files:
        raise UserError(f"--images={images}: no image files found ({', '.join(IMAGE_SUFFIXES)})")
    return tuple(map(str, files))


def log_source(split: str, source: Source) -> None:
    """Logs a summary of a source and the issues that the data check found."""
    log(f"{split} data: {source.annotations.summary()}")
    for issue in source.annotations.issues:
        if issue.kind not in _IN_SUMMARY:
            log(f"  {issue.line(shown=3)}")


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """Returns a UserError with the most helpful line of a loader's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    words = next((line for line in lines if "Error" in line or "rror when" in line), lines[0])
    return UserError(f"the loader ({pipeline_type}) stopped: {words}")
