"""Reads a data set in one format and writes it in another, optionally with smaller images or in two parts."""

import dataclasses
import glob
import hashlib
import os

import numpy as np

from common.args import ImagePolicy
from common.data.annotations import Annotations
from common.data.check.coco import load_coco
from common.data.open import open_tfrecords
from common.errors import UserError
from common.progress import import_tensorflow
from tools.conversion.coco_writer import file_names, round_boxes, write_coco, write_images
from tools.conversion.options import Options
from tools.conversion.shrinking import shrink_annotations, shrink_image, write_shrunk
from tools.conversion.voc import read_voc
from tools.conversion.yolo import read_yolo


def convert(source: str, target: str, options: Options) -> tuple[dict[str, Annotations], str]:
    """Converts a data set.

    Args:
        source, target: the formats, --from and --to.

    Returns:
        ({name of an output: its annotations}, directory of the images). --holdout makes two outputs.

    Raises:
        DataError: the input has errors; the message lists all of them.
        UserError: flags exclude each other, or files are missing, exist already or cannot be read.
    """
    output, max_side, holdout = options.output, options.max_side, options.holdout
    if source == target and (target == "tfrecord" or max_side is holdout is None):
        hint = "coco to coco needs --max_side or --holdout"
        raise UserError(f"--from={source} --to={target}: there is nothing to convert; {hint}")
    if output.endswith("/") or (target == "coco" and os.path.isdir(output)):
        raise UserError(f"--output={output} is a directory: add {_NAMES[target]}")
    outputs = [output]
    if holdout is not None:
        if not 0 < holdout < 1:
            raise UserError(f"--holdout={holdout}: give a fraction above 0 and below 1, such as 0.2")
        stem, suffix = os.path.splitext(output) if target == "coco" else (output, "")
        outputs = [f"{stem}_train{suffix}", f"{stem}_val{suffix}"]
    endings = ("",) if target == "coco" else (".label_map.json", "-[0-9]*-of-[0-9]*.tfrecord")
    in_the_way = [path for name in outputs for end in endings for path in glob.glob(glob.escape(name) + end)]
    if in_the_way and not options.overwrite:
        raise UserError(f"{in_the_way[0]} exists already: choose another --output, or give --overwrite")
    policy = ImagePolicy(options.on_bad_image, options.max_megapixels)
    try:
        annotations, images_dir = _READERS[source](options, policy)
        parts = [annotations] if holdout is None else split(annotations, holdout, options.seed)
        if max_side is not None:
            if target == "coco" and source != "tfrecord":
                original_dir, images_dir = images_dir, f"{os.path.dirname(output) or '.'}/images_{max_side}"
                write_shrunk(annotations, original_dir, images_dir, max_side, overwrite=options.overwrite)
            parts = [shrink_annotations(part, max_side) for part in parts]
        written = dict(zip(outputs, parts, strict=True))
        # The smaller part comes first: if it has too few images for --num_shards, no part is written.
        for name, part in sorted(written.items(), key=lambda item: item[1].num_images):
            if target == "coco":
                write_coco(part, name)
            else:
                import_tensorflow()
                from tools.conversion.coco_to_tfrecord import write_tfrecords

                shards = {"num_shards": options.num_shards, "seed": options.seed}
                write_tfrecords(part, images_dir, name, **shards, max_side=max_side)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}") from error
    return written, images_dir


def split(annotations: Annotations, holdout: float, seed: int) -> list[Annotations]:
    """Splits a data set by image into one for training and one for evaluation, in this order.

    The split depends only on the seed and the file names.

    Args:
        holdout: fraction of the images for evaluation, above 0 and below 1. The number of images is rounded.

    Raises:
        UserError: a part would have no image.
    """
    total = annotations.num_images
    count = round(holdout * total)
    if not 0 < count < total:
        raise UserError(f"--holdout={holdout} selects {count} of {total} images: each part needs an image")
    hashes = [hashlib.sha256(f"{seed} {name}".encode()).digest() for name in annotations.file_names]
    held_out = np.zeros(total, np.bool_)
    held_out[sorted(range(total), key=hashes.__getitem__)[:count]] = True
    return [annotations.select(~held_out), annotations.select(held_out)]


def _read_coco(options: Options, policy: ImagePolicy) -> tuple[Annotations, str]:
    if not options.images:
        raise UserError("--from=coco needs --images=DIR, the directory that the json's file names refer to")
    return load_coco(options.input, options.images, policy=policy), options.images


def _read_tfrecords(options: Options, policy: ImagePolicy) -> tuple[Annotations, str]:
    source = open_tfrecords(options.input, options.label_map, policy)
    directory = options.images or os.path.join(os.path.dirname(options.output), "images")
    names = file_names(source.annotations, source.encoded)
    annotations = dataclasses.replace(round_boxes(source.annotations), file_names=names)

    def encoded(row: int) -> bytes:
        return shrink_image(source.encoded(row), annotations.image_name(row), options.max_side)

    write_images(directory, names, encoded, overwrite=options.overwrite)
    return annotations, directory


_NAMES = {"coco": "a file name that ends in .json", "tfrecord": "a file name without .tfrecord"}
_READERS = {"voc": read_voc, "yolo": read_yolo, "coco": _read_coco, "tfrecord": _read_tfrecords}
