"""Opens and checks the data that flags name.

All errors of the training and evaluation data are reported together, before anything is built or written.
"""

import glob
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from common.args import Args
from common.datacheck import image_files, tfrecord
from common.datacheck.coco import load_coco
from common.datacheck.images import IMAGE_SUFFIXES, ImagePolicy
from common.errors import UserError
from common.issues import DataError, Findings
from common.labels import LabelMap
from common.progress import log
from common.sources import CocoSource, ImageListSource, Source, TFRecordSource

_IN_SUMMARY = ("crowd", "image-without-boxes")  # which the summary counts


class DataFlags(NamedTuple):
    """The data flags of one split: a directory and a COCO json, or a glob of TFRecords."""

    images: str | None = None
    annotations: str | None = None
    file_pattern: str | None = None


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
    """The source that the data flags of one split describe, opened and checked.

    Args:
        images, annotations, file_pattern: the flags of the split.
        input_type: "coco", "tfrecord" or None: by which of the flags are given.
        label_map: --label_map.
        policy: about images that cannot be used.
        split: "train", "eval" or "", for messages.

    Raises:
        UserError: flags missing or given too often, files missing.
        DataError: everything in the data that would make training or evaluation wrong.
    """
    return _open(DataFlags(images, annotations, file_pattern), input_type, label_map, policy, split)


def open_coco(
    images_dir: str | os.PathLike, json_path: str | os.PathLike, policy: ImagePolicy = ImagePolicy()
) -> CocoSource:
    """The checked images and annotations of a COCO json; DataError as `load_coco`."""
    return CocoSource(os.fspath(images_dir), load_coco(json_path, images_dir, policy=policy))


def open_tfrecords(
    pattern: str, label_map: str | None = None, policy: ImagePolicy = ImagePolicy()
) -> TFRecordSource:
    """The checked records of a glob; DataError as `tfrecord.open_records`.

    Args:
        pattern: glob of the record files.
        label_map: file of the categories; by default `<prefix>.label_map.json` (tools/convert.py).
        policy: about images that cannot be used.
    """
    files = tfrecord.expand_pattern(pattern)
    labels = LabelMap.load(label_map or tfrecord.find_label_map(files))
    return tfrecord.open_records(files, labels, policy=policy)


def open_splits(
    train: DataFlags,
    evaluation: DataFlags,
    *,
    input_type: str | None = None,
    label_map: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
    names: tuple[str, str] = ("train", "eval"),
) -> tuple[Source, Source | None]:
    """The sources of training and of evaluation, opened and checked together; None for no evaluation.

    Args:
        train, evaluation: the flags' values.
        input_type, label_map, policy: as for `open_source`, of both.
        names: `split` of each, as for `open_source`.

    Raises:
        UserError: as `open_source`.
        DataError: all faults of both, and categories of the evaluation data that training does not know.
    """
    sources: list[Source] = []
    faulty: list[Findings] = []
    for given, split in zip((train, evaluation), names, strict=True):
        if split == names[0] or any(given):
            try:
                sources.append(_open(given, input_type, label_map, policy, split))
            except DataError as error:
                faulty += error.findings
    if not faulty and len(sources) == 2:
        faulty = _compare(sources[0].label_map, sources[1])
    if faulty:
        raise DataError(*faulty)
    return sources[0], sources[1] if len(sources) == 2 else None


def open_checked(a: Args, *, num_replicas: int, max_instances: int) -> tuple[Source, Source | None]:
    """The sources that the flags of train.py name, opened, checked and logged; None for no evaluation.

    Args:
        a: the flags.
        num_replicas: devices that train.
        max_instances: boxes of an image that are kept.

    Raises:
        UserError, DataError: see `open_splits` and `check_sizes`.
    """
    train, evaluation = open_splits(
        DataFlags(a.train_images, a.train_annotations, a.train_file_pattern),
        DataFlags(a.eval_images, a.eval_annotations, a.eval_file_pattern),
        input_type=a.input_type,
        label_map=a.label_map,
        policy=ImagePolicy(a.on_bad_image, a.max_megapixels),
    )
    log_source("training", train)
    check_sizes(train, batch_size=a.batch_size, num_replicas=num_replicas, max_instances=max_instances)
    if evaluation:
        log_source("evaluation", evaluation)
    return train, evaluation


def open_images(images: str, policy: ImagePolicy = ImagePolicy()) -> ImageListSource:
    """The images that --images means, checked, for inference.

    Raises:
        UserError: there are none.
        DataError: images that cannot be used.
    """
    files = list_images(images)
    findings = Findings(f"--images={images}")
    facts = image_files.inspect_list(files, decode=policy.decode, max_megapixels=policy.max_megapixels)
    for file, fact in zip(files, facts, strict=True):
        fact.add_fault(repr(str(file)), findings)
    if policy.on_bad_image == "skip":
        findings.skip_images()
        files = [file for file, fact in zip(files, facts, strict=True) if not fact.fault]
        if not files:
            findings.add("no-images", f"none of {len(facts)} can be read")
    findings.raise_if_stopping()
    log_findings(findings)
    return ImageListSource(tuple(files))


def check_labels(label_map: LabelMap, source: Source) -> None:
    """DataError unless a trained network knows all categories of the data, under the same id and name."""
    faulty = _compare(label_map, source)
    if faulty:
        raise DataError(*faulty)


def check_sizes(source: Source, *, batch_size: int, num_replicas: int, max_instances: int) -> None:
    """Compares a training set with the run that wants it: says which images have too many boxes.

    Raises:
        DataError: fewer images than ranks, or than one batch of all ranks, which would repeat images.
    """
    annotations = source.annotations
    findings = Findings(annotations.origin)
    if annotations.num_images < num_replicas:
        findings.add("fewer-than-ranks", f"{annotations.num_images} images, {num_replicas} ranks")
    elif annotations.num_images < batch_size * num_replicas:
        ranks = f" x {num_replicas} ranks" if num_replicas > 1 else ""
        findings.add("fewer-than-batch", f"{annotations.num_images} images, --batch_size={batch_size}{ranks}")
    findings.raise_if_stopping()
    counts = np.diff(annotations.target_boxes.row_splits)
    findings.add_each(
        "too-many-boxes",
        np.flatnonzero(counts > max_instances),
        lambda i: f"{annotations.image_name(i)} has {counts[i]}, kept are {max_instances}",
    )
    log_findings(findings)


def log_findings(findings: Findings) -> None:
    """Logs what was found in a data set, with a few of the offenders."""
    for finding in findings:
        log(f"{findings.origin}: {finding.line(shown=3)}")


def log_source(split: str, source: Source) -> None:
    """Logs what a source holds, and what was fixed, left out or is remarkable in it."""
    log(f"{split} data: {source.annotations.summary()}")
    for finding in source.annotations.findings:
        if finding.kind not in _IN_SUMMARY:
            log(f"  {finding.line(shown=3)}")


def _open(
    given: DataFlags, input_type: str | None, label_map: str | None, policy: ImagePolicy, split: str
) -> Source:
    prefix = f"--{split}_" if split else "--"
    coco = {f"{prefix}images": given.images, f"{prefix}annotations": given.annotations}
    if os.path.isfile(given.images or "") and os.path.isdir(given.annotations or ""):
        raise UserError(f"{prefix}images and {prefix}annotations are swapped: the first is the directory")
    if os.path.isdir(given.file_pattern or ""):
        raise UserError(
            f"{prefix}file_pattern={given.file_pattern} is a directory: name the files in it, for example"
            f" '{os.path.join(given.file_pattern, '*.tfrecord')}'"
        )
    named = [flag for flag, value in coco.items() if value]
    if input_type is None:
        if given.file_pattern and named:
            raise UserError(
                f"{prefix}file_pattern (TFRecords) and {named[0]} (COCO) are both given: choose one"
            )
        input_type = "tfrecord" if given.file_pattern else "coco"
    if input_type == "tfrecord":
        if not given.file_pattern:
            raise UserError(f"--input_type=tfrecord needs {prefix}file_pattern")
        return open_tfrecords(given.file_pattern, label_map, policy)
    if len(named) == 2:
        return open_coco(given.images, given.annotations, policy)
    if named:
        (absent,) = set(coco) - set(named)
        raise UserError(f"{named[0]} is given without {absent}: COCO data needs both")
    raise UserError(
        f"no data: give {prefix}images and {prefix}annotations (COCO), or {prefix}file_pattern (TFRecords)"
    )


def _compare(label_map: LabelMap, source: Source) -> list[Findings]:
    """Findings about categories of `source` that `label_map` lacks or calls otherwise; [] where all agree."""
    findings = Findings(source.annotations.origin)
    for difference in label_map.differences(source.label_map):
        findings.add("eval-categories", difference)
    return [findings] if findings.stopping else []


def list_images(images: str) -> list[pathlib.Path]:
    """The files that --images means: one file, those of a directory (not deeper) that look like images, or
    a glob.

    Returns:
        The files, sorted.

    Raises:
        UserError: there are none.
    """
    path = pathlib.Path(images)
    if path.is_file():
        return [path]
    if not path.exists() and not glob.has_magic(images):
        raise UserError(f"--images={images}: there is no such file or directory")
    found = path.iterdir() if path.is_dir() else map(pathlib.Path, glob.glob(images, recursive=True))
    files = sorted(file for file in found if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if not files:
        raise UserError(f"--images={images}: no image there ({', '.join(IMAGE_SUFFIXES)})")
    return files


def open_evaluation(a: Any, label_map: LabelMap) -> Source:
    """The evaluation data that the flags of eval.py describe, opened, checked and logged.

    Args:
        a: the flags, common.args.EvalArgs.
        label_map: of the classes that the network was trained on.

    Raises:
        UserError, DataError: as `open_source` and `check_labels`.
    """
    source = open_source(
        a.eval_images,
        a.eval_annotations,
        a.eval_file_pattern,
        input_type=a.input_type,
        label_map=a.label_map,
        policy=ImagePolicy(a.on_bad_image, a.max_megapixels),
        split="eval",
    )
    check_labels(label_map, source)
    log_source("evaluation", source)
    return source
