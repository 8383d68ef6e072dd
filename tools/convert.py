r"""Converts data sets: Pascal VOC, YOLO txt, COCO and TFRecords to COCO json or to TFRecords.

    python tools/convert.py --from=voc --to=coco --input=VOCdevkit/VOC2012 --split=train \
        --output=voc/instances_train.json
    python tools/convert.py --from=yolo --to=tfrecord --input=my/data.yaml --split=val --output=records/val
    python tools/convert.py --from=coco --to=tfrecord --input=my/instances.json --images=my/images \
        --output=records/train --num_shards=4
    python tools/convert.py --from=tfrecord --to=coco --input='records/train*.tfrecord' \
        --output=my/instances.json

Everything that is wrong with the input is listed, with file and line, before anything is written. What is
decided about ids, difficult objects, polygons and so on stands in voc.py, yolo_txt.py and labelled_images.py.
A COCO json goes with the images where they lie, and its file names are relative to the directory that is
printed; only images in TFRecords are written anew, to `images` beside the json.
"""

import glob
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import args as shared_flags
from common import errors
from common.annotations import Annotations
from common.datacheck.coco import load_coco
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import log_findings, open_tfrecords
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion import voc, yolo_txt
from tools.conversion.coco_to_tfrecord import write_tfrecords
from tools.conversion.coco_writer import extract_images, shorten_boxes, write_coco


class Options(NamedTuple):
    """The values of the flags of the same names."""

    input: str
    output: str
    images: str | None = None
    split: str | None = None
    label_map: str | None = None
    names: str | None = None
    difficult: str = "keep"
    voc_pixels: str = "one_based"
    yolo_pixels: str | None = None
    num_shards: int = 1
    seed: int = 0
    num_workers: int = 4
    overwrite: bool = False
    on_bad_image: str = "stop"
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS

    @property
    def policy(self) -> ImagePolicy:
        return ImagePolicy(self.on_bad_image, self.max_megapixels)

    @property
    def labels(self) -> LabelMap | None:
        return LabelMap.load(self.label_map) if self.label_map else None


def convert(source: str, target: str, options: Options) -> tuple[Annotations, str]:
    """Converts a data set.

    Args:
        source, target: --from and --to.
        options: the other flags.

    Returns:
        What was read, and the directory of its images.

    Raises:
        DataError: everything that is wrong with the input.
        UserError: flags that do not go together, files that are missing or in the way, the disk.
    """
    if source == target:
        raise UserError(f"--from={source} --to={target}: there is nothing to convert")
    find_existing, write = _WRITERS[target]
    existing = find_existing(options)
    if existing and not options.overwrite:
        raise UserError(f"{existing[0]} is there already: choose another --output, or --overwrite")
    try:
        annotations, images_dir = _READERS[source].read(options)
        write(annotations, images_dir, options)
    except OSError as error:
        raise UserError(f"{error.filename or options.output}: {error.strerror or error}") from error
    return annotations, images_dir


def _read_voc(options: Options) -> tuple[Annotations, str]:
    return voc.read_voc(
        options.input,
        options.images,
        split=options.split,
        label_map=options.labels,
        difficult=options.difficult,
        pixels=options.voc_pixels,
        policy=options.policy,
    )


def _read_yolo(options: Options) -> tuple[Annotations, str]:
    return yolo_txt.read_yolo(
        options.input,
        split=options.split,
        names=options.names,
        label_map=options.labels,
        pixels=options.yolo_pixels,
        policy=options.policy,
    )


def _read_coco(options: Options) -> tuple[Annotations, str]:
    if not options.images:
        raise UserError("--from=coco needs --images=DIR, the directory that the json's file names refer to")
    return load_coco(options.input, options.images, policy=options.policy), options.images


def _read_tfrecord(options: Options) -> tuple[Annotations, str]:
    source = open_tfrecords(options.input, options.label_map, options.policy)
    directory = options.images or os.path.join(os.path.dirname(options.output), "images")
    annotations = shorten_boxes(source.annotations)
    return extract_images(source.files, annotations, directory, overwrite=options.overwrite), directory


def _write_coco(annotations: Annotations, images_dir: str, options: Options) -> None:
    write_coco(annotations, options.output)


def _write_tfrecord(annotations: Annotations, images_dir: str, options: Options) -> None:
    write_tfrecords(
        annotations,
        images_dir,
        options.output,
        num_shards=options.num_shards,
        seed=options.seed,
        num_workers=options.num_workers,
        policy=options.policy,
    )


def _existing_coco(options: Options) -> list[str]:
    if os.path.isdir(options.output) or options.output.endswith("/"):
        raise UserError(f"--output={options.output} is a directory: name the json file to write")
    return [options.output] if os.path.lexists(options.output) else []


def _existing_tfrecord(options: Options) -> list[str]:
    prefix, number = glob.escape(options.output), "[0-9]" * 5
    shards = glob.glob(f"{prefix}-{number}-of-{number}.tfrecord")
    return sorted(shards + glob.glob(f"{prefix}.label_map.json"))


class _Reader(NamedTuple):
    """A format that can be read, and the flags that mean something for it alone."""

    read: Callable[[Options], tuple[Annotations, str]]
    flags: tuple[str, ...]


class _Writer(NamedTuple):
    """A format that can be written: what is there already of --output, and the writer."""

    find_existing: Callable[[Options], list[str]]
    write: Callable[[Annotations, str, Options], None]


_READERS = {
    "voc": _Reader(_read_voc, ("images", "split", "label_map", "difficult", "voc_pixels")),
    "yolo": _Reader(_read_yolo, ("split", "label_map", "names", "yolo_pixels")),
    "coco": _Reader(_read_coco, ("images",)),
    "tfrecord": _Reader(_read_tfrecord, ("images", "label_map")),
}
_WRITERS = {
    "coco": _Writer(_existing_coco, _write_coco),
    "tfrecord": _Writer(_existing_tfrecord, _write_tfrecord),
}
_TFRECORD_FLAGS = ("num_shards", "seed", "num_workers")


def define_flags(fv: flags.FlagValues) -> None:
    """The flags of this command."""
    flags.DEFINE_enum("from", None, list(_READERS), "Format of the input.", flag_values=fv)
    flags.DEFINE_enum("to", None, list(_WRITERS), "Format of the output.", flag_values=fv)
    flags.DEFINE_string(
        "input",
        None,
        "voc: directory with Annotations/ and JPEGImages/, or of xml files. yolo: directory with images/ and "
        "labels/, data.yaml, or list of images. coco: json. tfrecord: glob.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "output", None, "coco: json to write. tfrecord: prefix of the files to write.", flag_values=fv
    )
    flags.DEFINE_string(
        "images",
        None,
        "Directory of images. voc, coco: where they are. tfrecord: where they go; default: images beside "
        "--output.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "split",
        None,
        "voc: NAME of ImageSets/Main/NAME.txt, or the path of a list of names. yolo: train, val, ...",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "label_map",
        None,
        "voc, yolo: ids of the class names. tfrecord: class names of the ids.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "names", None, "yolo: file of class names, one a line, or a data.yaml.", flag_values=fv
    )
    flags.DEFINE_enum(
        "difficult", "keep", voc.DIFFICULT, "voc: what becomes of objects marked difficult.", flag_values=fv
    )
    flags.DEFINE_enum(
        "voc_pixels",
        "one_based",
        voc.PIXELS,
        "voc: one_based counts pixels from 1 and includes the last, as Pascal VOC does; zero_based are edges "
        "from 0, as labelImg writes them.",
        flag_values=fv,
    )
    flags.DEFINE_enum(
        "yolo_pixels",
        None,
        yolo_txt.PIXELS,
        "yolo: which pixels the labels of images with an EXIF turn refer to.",
        flag_values=fv,
    )
    flags.DEFINE_integer("num_shards", 1, "tfrecord: number of files.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer("seed", 0, "tfrecord: of the order of the images.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer(
        "num_workers",
        4,
        "tfrecord: threads that read images, and files written at once.",
        lower_bound=1,
        flag_values=fv,
    )
    flags.DEFINE_bool("overwrite", False, "Replace files that are there already.", flag_values=fv)
    shared_flags.define_image_flags(fv)
    flags.mark_flags_as_required(["from", "to", "input", "output"], flag_values=fv)


def refuse_idle_flags(fv: flags.FlagValues) -> None:
    """UserError for a flag that is given and does nothing in this direction."""
    source, target = fv["from"].value, fv["to"].value
    special = {name for reader in _READERS.values() for name in reader.flags} | set(_TFRECORD_FLAGS)
    used = {*_READERS[source].flags, *(_TFRECORD_FLAGS if target == "tfrecord" else ())}
    for name in sorted(special - used):
        if fv[name].present:
            raise UserError(f"--{name} does nothing from {source} to {target}: leave it out")


def main() -> None:
    """The command."""
    refuse_idle_flags(flags.FLAGS)
    values: dict[str, Any] = shared_flags.values(flags.FLAGS, define_flags)
    source, target = values.pop("from"), values.pop("to")
    options = Options(**values)
    annotations, images_dir = convert(source, target, options)
    log_findings(annotations.findings)
    print(annotations.summary())
    print(f"{target}: {options.output}; images: {images_dir}")


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
