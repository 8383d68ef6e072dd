"""Opens and checks the data that the flags name. All faults of all data sets are reported together.

    data = open_data(a, ranks, max_instances=100)                       # train.py
    source = open_evaluation(a, label_map)                              # eval.py
    source = open_images("photos/")                                     # infer.py
    source = open_coco("val2017", "instances_val2017.json")             # anywhere else

No DALI reader sees a file before this check, because DALI misreads many faulty files silently.
"""

import dataclasses
import functools
import glob
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common.args import IMAGE_SUFFIXES, Args, EvalArgs, ImagePolicy
from common.data.check.image_headers import ImageFacts
from common.data.check.images import add_fault, inspect_files
from common.data.check.issues import DataError, Issue, Issues
from common.data.check.repeated_images import report_shared_images
from common.data.coco import CocoSource, load_coco
from common.data.image_files import Tree, is_hidden, list_tree
from common.data.labels import LabelMap, is_text
from common.data.sharding import check_shards
from common.data.sources import Data, ImageListSource, Source
from common.data.storage import refuse_remote
from common.errors import UserError
from common.files import user_errors
from common.progress import import_tensorflow, log

if TYPE_CHECKING:
    from common.data.check.tfrecord import TFRecordSource
    from common.data.check.webdataset import WebDatasetSource
    from common.distributed.ranks import Ranks

_TO_BUCKET = (
    "only TFRecords and WebDataset are read from there: convert a copy on a disk with tools/convert.py "
    "--from=coco --to=tfrecord --output=s3://BUCKET/PREFIX"
)
# Kinds of issues that Annotations.summary counts, or that the log of an evaluation has.
_NOT_LOGGED = ("crowd", "image-without-boxes", "many-objects")


# --- train.py and eval.py: flags -> data ---


def open_data(a: Args, ranks: "Ranks", max_instances: int, *, synthetic_classes: int = 80) -> Data:
    """Opens and checks the data of train.py. One rank per host goes first, so that the others use its caches.

    Args:
        max_instances: largest number of boxes of an image in a batch. For a message: none is dropped here.
        synthetic_classes: number of classes of synthetic data.

    Raises:
        UserError: on every rank, if any rank cannot use its flags or data. The message names every fault.
    """
    train: Source | None = None
    evaluation: Source | None = None
    label_map = LabelMap.numbered(a.num_classes or synthetic_classes)
    with ranks.raise_on_any_rank():
        if a.pipeline_type != "synthetic":
            train, evaluation = ranks.first_on_host(
                lambda: open_splits(a, num_replicas=ranks.num_replicas, max_instances=max_instances)
            )
            label_map = train.label_map
            if evaluation:
                check_shards(evaluation.size, ranks.world_size)  # fails now, not after the first epoch
            elif idle := [name for name in ("patience", "eval_every_steps") if getattr(a, name)]:
                log(f"no evaluation data: --{' and --'.join(idle)} {'have' if idle[1:] else 'has'} no effect")
        num_classes = a.num_classes or label_map.num_classes
        if num_classes < label_map.num_classes:
            raise UserError(f"omit --num_classes={num_classes}: data have {label_map.num_classes} classes")
    return Data(train, evaluation, label_map, num_classes)


def open_splits(a: Args, *, num_replicas: int, max_instances: int) -> tuple[Source, Source | None]:
    """Opens the training data and, if given, the evaluation data of train.py. Logs summaries.

    Raises:
        UserError: see `open_pair` and `check_sizes`.
    """
    train = DataFlags(a.train_images, a.train_annotations, file_pattern=a.train_file_pattern)
    sources = open_pair(train, _evaluation_flags(a), **_options(a))
    log_source("training", sources[0])
    check_sizes(sources[0], a.batch_size, num_replicas, max_instances)
    check_shuffle(a, sources[0], num_replicas)
    if sources[1]:
        _set_areas(sources[1], a.box_areas)
        log_source("evaluation", sources[1])
    return sources


def open_evaluation(a: EvalArgs, label_map: LabelMap) -> Source:
    """Opens the evaluation data of eval.py and logs a summary.

    Args:
        label_map: the classes that the network was trained on.

    Raises:
        UserError: see `open_source` and `check_labels`.
    """
    source = open_source(*_evaluation_flags(a), split="eval", **_options(a))
    check_labels(label_map, source)
    _set_areas(source, a.box_areas)
    log_source("evaluation", source)
    return source


def _set_areas(source: Source, box_areas: bool) -> None:
    """Sets the areas of the objects to those of their boxes if --box_areas is given."""
    if box_areas:
        annotations = source.annotations
        issues = Issues(annotations.origin)
        issues.extend(issue for issue in annotations.issues if issue.kind != "area-differs")
        source.annotations = dataclasses.replace(annotations, areas=annotations.box_areas, issues=issues)


class DataFlags(NamedTuple):
    """The data flags of one split: a directory and a COCO json, or a glob of record files or shards."""

    images: str | None = None
    annotations: str | None = None
    file_pattern: str | None = None


def _evaluation_flags(a: Args | EvalArgs) -> DataFlags:
    return DataFlags(a.eval_images, a.eval_annotations, file_pattern=a.eval_file_pattern)


def _options(a: Args | EvalArgs) -> dict[str, Any]:
    policy = ImagePolicy(a.on_bad_image, a.max_megapixels, coco_pixels=a.coco_pixels, check=a.check)
    if a.label_map and not (a.eval_file_pattern or getattr(a, "train_file_pattern", None)):
        raise UserError(f"--label_map={a.label_map} has no effect: a COCO json has its own class names")
    if not (a.eval_annotations or getattr(a, "train_annotations", None)):
        if a.coco_pixels:
            raise UserError(f"--coco_pixels={a.coco_pixels} has no effect without a COCO json: omit the flag")
        if a.check != "all":
            raise UserError(f"--check={a.check} has no effect without a COCO json: omit the flag")
    return {"input_type": a.input_type, "label_map": a.label_map, "policy": policy}


def open_pair(
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
                sources.append(open_source(*flags, split=split, **options))
            except UserError as error:
                errors.append(error)
    if errors:
        raise _joined(errors)
    if len(sources) == 1:
        return sources[0], None
    check_labels(sources[0].label_map, sources[1])
    _check_overlap(*sources)
    return sources[0], sources[1]


def _check_overlap(train: Source, evaluation: Source) -> None:
    """Adds a warning to the issues of the evaluation data if images are also in the training data."""
    issues = Issues(evaluation.annotations.origin)
    issues.extend(evaluation.annotations.issues)
    report_shared_images(train, evaluation, issues)
    evaluation.annotations = dataclasses.replace(evaluation.annotations, issues=issues)


def _joined(errors: Sequence[UserError]) -> UserError:
    """Returns the first error in the flags. If there is none, returns one error with all data issues."""
    flag_errors = [error for error in errors if not isinstance(error, DataError)]
    data_issues = [issues for error in errors if isinstance(error, DataError) for issues in error.issues]
    return flag_errors[0] if flag_errors else DataError(*data_issues)


def open_source(
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
        input_type: "coco", "tfrecord" or "webdataset"; None: the format of the files that the flags name.
        split: "train", "eval" or "", the prefix of the flags in messages.

    Raises:
        UserError: flags or files are missing or contradict each other, or the data is faulty.
    """
    prefix = f"--{split}_" if split else "--"
    coco_flags = {f"{prefix}images": images, f"{prefix}annotations": annotations}
    named = [flag for flag, value in coco_flags.items() if value]
    for flag in named:
        refuse_remote(flag, coco_flags[flag], _TO_BUCKET)
    if file_pattern and named and input_type is None:
        raise UserError(
            f"{prefix}file_pattern (records or shards) and {named[0]} (COCO) are both given: use one"
        )
    if input_type in ("tfrecord", "webdataset") and not file_pattern:
        raise UserError(f"--input_type={input_type} needs {prefix}file_pattern")
    if file_pattern and input_type != "coco":
        return open_file_pattern(file_pattern, label_map, policy, input_type)
    if images and annotations:
        return open_coco(images, annotations, policy=policy)
    if named:
        (absent,) = set(coco_flags) - set(named)
        raise UserError(f"{named[0]} is given without {absent}: COCO data needs both")
    coco = " and ".join(coco_flags)
    raise UserError(f"no data: give {coco} (COCO), or {prefix}file_pattern (TFRecords or WebDataset)")


# --- one data set ---


def open_coco(
    images: str | os.PathLike, annotations: str | os.PathLike, policy: ImagePolicy = ImagePolicy()
) -> CocoSource:
    """Opens and checks a COCO json and its images; raises DataError like `load_coco`."""
    return CocoSource(os.fspath(images), load_coco(annotations, images, policy=policy))


def open_file_pattern(
    pattern: str,
    label_map: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
    input_type: str | None = None,
) -> "TFRecordSource | WebDatasetSource":
    """Opens and checks TFRecords or WebDataset shards.

    Args:
        pattern: glob of the files.
        label_map: file with the categories; default: the `<prefix>.label_map.json` of tools/convert.py.
        input_type: "tfrecord" or "webdataset"; None: a file is WebDataset if it is a tar file.

    Raises:
        DataError: the data are faulty, see `tfrecord.open_records` and `webdataset.open_shards`.
        UserError: the pattern matches files of both formats, or there is no label map.
    """
    import_tensorflow()  # takes seconds
    from common.data.check import tfrecord, webdataset
    from common.data.webdataset import is_tar

    policy = dataclasses.replace(policy, coco_pixels=None)  # boxes in them are those of the stored pixels
    files = tfrecord.expand_pattern(pattern)
    for file in filter(os.path.isdir, files):
        example = f"'{file}/*.tar' or '{file}/*.tfrecord'"
        raise UserError(f"{file} is a directory: give a pattern of its files, such as {example}")
    tar_files = [file for file in files if input_type is None and is_tar(file)]
    if tar_files and len(tar_files) < len(files):
        other = min(set(files) - set(tar_files))
        raise UserError(f"{tar_files[0]} is WebDataset, but {other} is not: give a pattern of one format")
    labels = LabelMap.load(label_map or tfrecord.find_label_map(files))
    if tar_files or input_type == "webdataset":
        return webdataset.open_shards(files, labels, policy=policy)
    return tfrecord.open_records(files, labels, policy=policy)


def open_tfrecords(
    pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
) -> "TFRecordSource":
    """Opens and checks record files, see `open_file_pattern`."""
    return open_file_pattern(pattern, label_map, policy, "tfrecord")  # type: ignore[return-value]


def open_webdataset(
    pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
) -> "WebDatasetSource":
    """Opens and checks WebDataset shards, see `open_file_pattern`."""
    return open_file_pattern(pattern, label_map, policy, "webdataset")  # type: ignore[return-value]


def open_images(images: str, policy: ImagePolicy = ImagePolicy(), flag: str = "--images") -> ImageListSource:
    """Opens and checks the images that a flag names. Raises UserError if no image is usable."""
    issues = Issues(f"{flag}={images}", policy)
    files = list_images(images, issues)
    facts = inspect_files(os.curdir, files, policy)
    misnamed = ImageFacts(fault="image-unreadable", detail="DALI needs a file name in UTF-8")
    pairs = [(file, fact if is_text(file) else misnamed) for file, fact in zip(files, facts, strict=True)]
    usable = {file: fact for file, fact in pairs if not add_fault(fact, repr(file), issues)}
    if not usable and not issues.stopping:
        issues.add("no-images", f"none of the {len(facts)} images can be read")
    issues.raise_if_stopping()
    log_issues(issues.origin, issues)
    return ImageListSource([*usable], [(fact.height, fact.width) for fact in usable.values()])


def list_images(images: str, issues: Issues) -> tuple[str, ...]:
    """Returns the sorted image files that a flag names: a file, a directory or a glob.

    Args:
        images: the value of the flag.
        issues: receives what is skipped: hidden files, folders of a directory, and images in other formats.
            Its origin names the flag.

    Raises:
        UserError: there is no such image file.
    """
    refuse_remote("--images", images, "copy the images to a disk")
    path = pathlib.Path(images)
    with user_errors(issues.origin):
        if path.is_file():
            return (images,)
        if path.is_dir():
            tree = list_tree(str(path), recursive=False)
        elif glob.has_magic(images):
            tree = _match(images)
        else:
            raise UserError(f"{issues.origin}: no such file or directory")
    tree.report(issues)
    issues.add_each("format-skipped", tree.unsupported_images, repr)
    issues.add_each("video-skipped", tree.videos, repr)
    if not tree.images:
        skipped = [issue.line(shown=3) for issue in issues]
        reason = f"no image files found ({', '.join(IMAGE_SUFFIXES)})"
        raise UserError(f"{issues.origin}: {'. '.join([reason, *skipped])}")
    return tuple(tree.images)


def _match(pattern: str) -> Tree:
    """Returns the files that match a glob. A file that links give several paths is listed once."""
    tree, places, files = Tree(), set(), []
    resolve = functools.cache(pathlib.Path.resolve)  # many files have one folder
    parts = pathlib.PurePath(pattern).parts
    num_fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))  # the user wrote these names
    for path in sorted(
        map(pathlib.Path, glob.glob(pattern, recursive=True)), key=lambda p: (len(p.parts), p)
    ):
        names = path.parts[num_fixed:]
        first_hidden = next((number for number, name in enumerate(names, 1) if is_hidden(name)), None)
        if first_hidden is not None:
            path = pathlib.Path(*path.parts[: num_fixed + first_hidden])
        place = resolve(path.parent) / path.name
        if place in places:
            continue
        places.add(place)
        if first_hidden is not None:
            tree.hidden.append(str(path))
        elif not path.is_dir():
            files.append(path)
    tree.files = list(map(str, sorted(files)))
    return tree


# --- checks of whole sources, and the log ---


def check_labels(label_map: LabelMap, source: Source) -> None:
    """Raises DataError if `source` has a category that `label_map` lacks. Compares ids and names."""
    issues = Issues(source.annotations.origin)
    issues.add_each("eval-categories", label_map.differences(source.label_map), str)
    issues.raise_if_stopping()


def check_sizes(source: Source, batch_size: int, num_replicas: int, max_instances: int) -> None:
    """Logs images with too many boxes.

    Raises:
        DataError: the data set has fewer images than the replicas need for one batch each.
    """
    annotations = source.annotations
    issues, counts = Issues(annotations.origin), np.diff(annotations.target_boxes.row_splits)
    if source.size < batch_size * num_replicas:
        replicas = f" x {num_replicas} ranks" if num_replicas > 1 else ""
        issues.add("fewer-than-batch", f"{source.size} images, --batch_size={batch_size}{replicas}")
    issues.raise_if_stopping()
    issues.add_each(
        "too-many-boxes",
        np.flatnonzero(counts > max_instances),
        lambda i: f"{annotations.image_name(i)} has {counts[i]}, of which {max_instances} are kept",
    )
    log_issues(issues.origin, issues)


def check_shuffle(a: Args, source: Source, num_replicas: int) -> None:
    """Logs if --shuffle=buffer reads fewer record files or shards than there are replicas.

    Raises:
        UserError: --shuffle=buffer has no effect on this source.
    """
    if a.shuffle != "buffer":
        return
    container = getattr(source, "records", None) or getattr(source, "shards", None)
    if a.pipeline_type == "tensorflow" or not container:
        reads = "--pipeline_type=tensorflow" if container else f"{source.annotations.origin}"
        raise UserError(f"--shuffle=buffer has no effect: {reads} is always shuffled as a whole. Omit it")
    if len(container.files) < num_replicas:
        issues = Issues(source.annotations.origin)
        issues.add("few-files", f"{len(container.files)} files, {num_replicas} ranks")
        log_issues(issues.origin, issues)


def log_source(split: str, source: Source) -> None:
    """Logs a summary of a source and the issues that the data check found."""
    log(f"{split} data: {source.annotations.summary()}")
    for issue in source.annotations.issues:
        if issue.kind not in _NOT_LOGGED:
            log(f"  {issue.line(shown=3)}")


def log_issues(origin: str, issues: Iterable[Issue]) -> None:
    """Logs the issues of a data set, with at most three offenders each."""
    for issue in issues:
        log(f"{origin}: {issue.line(shown=3)}")
