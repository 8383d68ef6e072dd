"""Data sets as apps open them: `Source`, and the functions that open one as the flags name it, unchecked.

`Source.read` reads a data set with DALI, `tf_readers.examples` without. Other code need not know its kind.
The apps import `common.datacheck.datasets`: the same functions, which check every annotation and image.
A copy without the data check imports this module in its place: tools/copy_app.py changes that line.
"""

import abc
import functools
import glob
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common.annotations import Annotations, read_coco, without_objects
from common.args import IMAGE_SUFFIXES, Args, ImagePolicy
from common.errors import UserError
from common.labels import LabelMap
from common.progress import log

if TYPE_CHECKING:
    from common.dali_ops import Nodes

_IN_SUMMARY = ("crowd", "image-without-boxes")  # which the summary counts


class Source(abc.ABC):
    """An opened data set.

    Attributes:
        name: "coco", "tfrecord", "images" or "video".
        annotations: of the images, in the order of reading; without objects where nothing is known of them.
        files: where each image has a file, the paths.
    """

    name: str
    annotations: Annotations
    files: Sequence[str]

    @property
    def size(self) -> int:
        """Number of images."""
        return self.annotations.num_images

    @property
    def label_map(self) -> LabelMap:
        return self.annotations.label_map

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of ids, annotations and reading order: a checkpoint must not resume on other data."""
        return self.annotations.fingerprint()

    def image_name(self, row: int) -> str:
        """An image in words, for messages."""
        return self.annotations.image_name(row)

    def encoded(self, row: int) -> bytes:
        """The image file of one row of the annotations, as it is; OSError where it fails."""
        return pathlib.Path(self.files[row]).read_bytes()

    @abc.abstractmethod
    def read(self, *, training: bool, **options: Any) -> "Nodes":
        """(jpegs, boxes, labels, image_ids) inside a DALI graph.

        Args:
            training: shuffled, endlessly; see readers.py.
            options: shard_id, num_shards, seed, and `name`, which is unique in the graph.
        """


class CocoSource(Source):
    """A directory of images and the annotations of a COCO json, whose file names refer to it."""

    name = "coco"

    def __init__(self, images_dir: str, annotations: Annotations) -> None:
        self.images_dir, self.annotations = images_dir, annotations
        self.files = [os.path.join(images_dir, name) for name in annotations.file_names]

    def read(self, *, training: bool, **options: Any) -> "Nodes":
        from common import readers  # imports DALI, which commands that only read annotations need not

        return readers.coco_reader(self.images_dir, self.annotations, training=training, **options)


class ImageListSource(Source):
    """Image files without annotations, for inference; image ids are positions in `files`, from 0."""

    name = "images"

    def __init__(self, files: Sequence[str]) -> None:
        self.files, self.annotations = files, without_objects(files, "images")

    def image_name(self, row: int) -> str:
        return repr(self.files[row])

    def read(self, *, training: bool, seed: int = 0, **options: Any) -> "Nodes":
        if training:
            raise ValueError("images without annotations are nothing to train on")
        from common import readers

        return readers.file_reader(self.files, **options)


# --- opening ---


class DataFlags(NamedTuple):
    """The data flags of one split: a directory and a COCO json, or a glob of TFRecords."""

    images: str | None = None
    annotations: str | None = None
    file_pattern: str | None = None


class Opener:
    """Opens data sets as they are; the data check replaces the methods of the first part."""

    # --- what the data check replaces ---

    def open_coco(self, images: str, annotations: str, policy: ImagePolicy = ImagePolicy()) -> CocoSource:
        """The images and annotations of a COCO json."""
        return CocoSource(images, read_coco(annotations))

    def open_tfrecords(
        self, pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
    ) -> Source:
        """UserError: only the data check reads TFRecords."""
        raise UserError(f"{pattern}: TFRecords need common/datacheck, which this program does not use")

    def open_images(self, images: str, policy: ImagePolicy = ImagePolicy()) -> ImageListSource:
        """The images that --images means, for inference; UserError where there are none."""
        return ImageListSource(list_images(images))

    def join(self, errors: Sequence[UserError]) -> UserError:
        """The error to raise where several data sets cannot be used."""
        return errors[0]

    def refuse(self, origin: str, kind: str, offenders: Sequence[str]) -> None:
        """UserError where there are offenders; `kind` is a row of datacheck/issues.py."""
        if offenders:
            raise UserError(f"{origin}: {kind.replace('-', ' ')}: {offenders[0]}")

    def check_sizes(self, source: Source, batch_size: int, num_replicas: int, max_instances: int) -> None:
        """UserError for fewer images than one batch of all ranks, which would repeat images."""
        if source.size < batch_size * num_replicas:
            ranks = f" x {num_replicas} ranks" if num_replicas > 1 else ""
            found = f"{source.size} images, --batch_size={batch_size}{ranks}"
            self.refuse(source.annotations.origin, "fewer-than-batch", [found])

    # --- flags -> sources ---

    def check_labels(self, label_map: LabelMap, source: Source) -> None:
        """UserError unless a trained network knows all categories of the data, under the same id and name."""
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
        """The source that the data flags of one split describe.

        Args:
            images, annotations, file_pattern: the flags of the split.
            input_type: "coco", "tfrecord" or None: by which of the flags are given.
            label_map: --label_map.
            policy: about images that cannot be used.
            split: "train", "eval" or "", for messages.

        Raises:
            UserError: flags missing or given too often, files missing; what a data check finds.
        """
        prefix = f"--{split}_" if split else "--"
        coco = {f"{prefix}images": images, f"{prefix}annotations": annotations}
        named = [flag for flag, value in coco.items() if value]
        if file_pattern and named and input_type is None:
            raise UserError(f"{prefix}file_pattern (TFRecords) and {named[0]} (COCO) are given: choose one")
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
        """The sources of training and of evaluation; None for no evaluation.

        Args:
            train, evaluation: the flags' values.
            names: `split` of each, as for `open_source`.
            options: as for `open_source`, of both.

        Raises:
            UserError: as `open_source`, or categories of the evaluation data that training does not know.
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
        """The training and evaluation data that the flags of train.py name; None for no evaluation.

        Args:
            a: the flags.
            num_replicas: devices that train.
            max_instances: boxes of an image that are kept.

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
        """The evaluation data that the flags of eval.py describe, opened and logged.

        Args:
            a: the flags, common.args.EvalArgs.
            label_map: of the classes that the network was trained on.

        Raises:
            UserError: as `open_source` and `check_labels`.
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
    """The files that --images means, sorted: one file, those of a directory (not deeper) that look like
    images, or a glob; UserError where there are none."""
    path = pathlib.Path(images)
    if path.is_file():
        return (images,)
    if not path.exists() and not glob.has_magic(images):
        raise UserError(f"--images={images}: no such file or directory")
    found = path.iterdir() if path.is_dir() else map(pathlib.Path, glob.glob(images, recursive=True))
    files = sorted(file for file in found if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if not files:
        raise UserError(f"--images={images}: no image there ({', '.join(IMAGE_SUFFIXES)})")
    return tuple(map(str, files))


def log_source(split: str, source: Source) -> None:
    """Logs what a source holds, and what a data check fixed, left out or found remarkable in it."""
    log(f"{split} data: {source.annotations.summary()}")
    for issue in source.annotations.issues:
        if issue.kind not in _IN_SUMMARY:
            log(f"  {issue.line(shown=3)}")


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """The error to raise where a loader (`pipeline_type`) raised `error`: its line that counts."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    words = next((line for line in lines if "Error" in line or "rror when" in line), lines[0])
    return UserError(f"the loader ({pipeline_type}) stopped: {words}")
