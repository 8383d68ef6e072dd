"""Reads a data set in one format and writes it in another."""

import glob
import os

from common.annotations import Annotations
from common.args import ImagePolicy
from common.datacheck.coco import load_coco
from common.datacheck.datasets import open_tfrecords
from common.errors import UserError
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
    output = options.output
    if source == target:
        raise UserError(f"--from={source} --to={target}: there is nothing to convert")
    if target == "coco" and (os.path.isdir(output) or output.endswith("/")):
        raise UserError(f"--output={output} is a directory: name the json file to write")
    in_the_way = [output] if os.path.lexists(output) else []
    if target == "tfrecord":
        in_the_way = glob.glob(f"{glob.escape(output)}.label_map.json")
        in_the_way += glob.glob(f"{glob.escape(output)}-[0-9]*-of-[0-9]*.tfrecord")
    if in_the_way and not options.overwrite:
        raise UserError(f"{in_the_way[0]} is there already: choose another --output, or --overwrite")
    policy = ImagePolicy(options.on_bad_image, options.max_megapixels)
    try:
        annotations, images_dir = _READERS[source](options, policy)
        if target == "coco":
            write_coco(annotations, output)
        else:
            shards = {"num_shards": options.num_shards, "seed": options.seed}
            write_tfrecords(annotations, images_dir, output, **shards)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}") from error
    return annotations, images_dir


def _read_coco(options: Options, policy: ImagePolicy) -> tuple[Annotations, str]:
    if not options.images:
        raise UserError("--from=coco needs --images=DIR, the directory that the json's file names refer to")
    return load_coco(options.input, options.images, policy=policy), options.images


def _read_tfrecords(options: Options, policy: ImagePolicy) -> tuple[Annotations, str]:
    source = open_tfrecords(options.input, options.label_map, policy)
    directory = options.images or os.path.join(os.path.dirname(options.output), "images")
    annotations = round_boxes(source.annotations)
    files = source.records.files
    return extract_images(files, annotations, directory, overwrite=options.overwrite), directory


# Format -> a function of (options, policy) that gives the annotations and the directory of the images.
_READERS = {"voc": read_voc, "yolo": read_yolo, "coco": _read_coco, "tfrecord": _read_tfrecords}
