"""Reads a data set in one format and writes it in another."""

import glob
import os

from common.annotations import Annotations
from common.datacheck.coco import load_coco
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import open_tfrecords
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion.coco_to_tfrecord import write_tfrecords
from tools.conversion.coco_writer import extract_images, round_boxes, write_coco
from tools.conversion.options import Options
from tools.conversion.voc import read_voc
from tools.conversion.yolo import read_yolo


def convert(source: str, target: str, options: Options) -> tuple[Annotations, str]:
    """Converts a data set.

    Args:
        source, target: --from and --to.
        options: the other flags.

    Returns:
        The annotations, and the directory of the images.

    Raises:
        DataError: everything that is wrong with the input.
        UserError: flags that do not go together, files that are missing or in the way, the disk.
    """
    if source == target:
        raise UserError(f"--from={source} --to={target}: there is nothing to convert")
    existing = _existing(target, options.output)
    if existing and not options.overwrite:
        raise UserError(f"{existing[0]} is there already: choose another --output, or --overwrite")
    policy = ImagePolicy(options.on_bad_image, options.max_megapixels)
    try:
        annotations, images_dir = _read(source, options, policy)
        if target == "coco":
            write_coco(annotations, options.output)
        else:
            write_tfrecords(
                annotations,
                images_dir,
                options.output,
                num_shards=options.num_shards,
                seed=options.seed,
                policy=policy,
            )
    except OSError as error:
        raise UserError(f"{error.filename or options.output}: {error.strerror or error}") from error
    return annotations, images_dir


def _read(source: str, options: Options, policy: ImagePolicy) -> tuple[Annotations, str]:
    if source == "tfrecord":
        records = open_tfrecords(options.input, options.label_map, policy)
        directory = options.images or os.path.join(os.path.dirname(options.output), "images")
        annotations = round_boxes(records.annotations)
        return extract_images(records.files, annotations, directory, overwrite=options.overwrite), directory
    if source == "coco":
        if not options.images:
            raise UserError(
                "--from=coco needs --images=DIR, the directory that the json's file names refer to"
            )
        return load_coco(options.input, options.images, policy=policy), options.images
    label_map = LabelMap.load(options.label_map) if options.label_map else None
    common = {"split": options.split, "label_map": label_map, "policy": policy}
    if source == "yolo":
        return read_yolo(options.input, names=options.names, pixels=options.yolo_pixels, **common)
    return read_voc(
        options.input, options.images, difficult=options.difficult, pixels=options.voc_pixels, **common
    )


def _existing(target: str, output: str) -> list[str]:
    """Files that the output would replace."""
    if target == "coco":
        if os.path.isdir(output) or output.endswith("/"):
            raise UserError(f"--output={output} is a directory: name the json file to write")
        return [output] if os.path.lexists(output) else []
    prefix, number = glob.escape(output), "[0-9]" * 5
    shards = glob.glob(f"{prefix}-{number}-of-{number}.tfrecord")
    return sorted(shards + glob.glob(f"{prefix}.label_map.json"))
