r"""Converts a data set or detections to another format.

It reads Pascal VOC, YOLO txt, CVAT's xml, labelme's json, csv files of boxes, COCO json, TFRecords,
WebDataset and the detections of infer.py. It writes COCO json, TFRecords, WebDataset, YOLO txt, Pascal VOC
and CVAT's xml.

    python tools/convert.py --from=voc --to=coco --input=VOCdevkit/VOC2012 --split=train \
        --output=voc/instances_train.json
    python tools/convert.py --from=yolo --to=tfrecord --input=my/data.yaml --split=val --output=records/val
    python tools/convert.py --from=cvat --to=coco --input=cvat/annotations.xml --images=cvat/images \
        --output=my/instances.json
    python tools/convert.py --from=labelme --to=coco --input=my/photos --output=my/instances.json
    python tools/convert.py --from=csv --to=coco --input=my/train_labels.csv --images=my/images \
        --output=my/instances.json
    python tools/convert.py --from=coco --to=tfrecord --input=my/instances.json --images=my/images \
        --output=records/train --num_shards=4
    python tools/convert.py --from=coco --to=webdataset --input=my/instances.json --images=my/images \
        --output=shards/train --num_shards=4
    python tools/convert.py --from=tfrecord --to=coco --input='records/train*.tfrecord' \
        --output=my/instances.json
    python tools/convert.py --from=coco --to=coco --input=my/instances.json --images=my/images \
        --output=my/small/instances.json --max_side=1024 --holdout=0.2
    python tools/convert.py --from=coco --to=coco --input=a/instances.json,b/instances.json \
        --images=a/images,b/images --output=both.json
    python tools/convert.py --from=detections --to=cvat --input=found/detections.json --images=photos \
        --score_threshold=0.4 --output=corrections

The command lists all errors in the input before it writes anything. The modules in tools/conversion/
describe the conversion of ids, difficult objects, polygons and rotated boxes. --to=coco does not copy
image files. If the input is TFRecords or WebDataset, it writes their images into the directory `images` next
to --output. --to=yolo, --to=voc and --to=cvat write a directory with the labels and a copy of the images.

--max_side=N scales larger images down. With --to=tfrecord and --to=webdataset, the output contains the scaled
images. With --to=coco, all images are written into the directory `images_N` next to the json. Images from
TFRecords and WebDataset are written into `images` instead.

--holdout=F splits the images into two outputs. The fraction F of the images goes to OUTPUT_val, and the rest
goes to OUTPUT_train. The split depends only on the file names and --seed.
"""

import dataclasses
import functools
import glob
import hashlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
from absl import flags

from common import args as shared_flags
from common import errors
from common.args import ImagePolicy, flag
from common.data import storage
from common.data.annotations import Annotations
from common.data.check import recognition
from common.data.coco import load_coco
from common.data.open import log_issues, open_file_pattern
from common.errors import UserError
from common.files import TEMPORARY
from common.progress import import_tensorflow, log
from tools.conversion.coco_to_webdataset import write_webdataset
from tools.conversion.coco_writer import (
    copy_records,
    file_names,
    lost_keys,
    round_boxes,
    write_coco,
    write_images,
)
from tools.conversion.csv_boxes import read_csv
from tools.conversion.cvat import read_cvat
from tools.conversion.detections import read_detections
from tools.conversion.joining import coco_inputs, join
from tools.conversion.label_writer import write_labels
from tools.conversion.labelme import read_labelme
from tools.conversion.shrinking import shrink_annotations, shrink_image, write_shrunk
from tools.conversion.voc import read_voc
from tools.conversion.yolo import read_yolo

# Format -> the flags that it uses. Flags that all formats use are not listed.
INPUT_FLAGS: dict[str, tuple[str, ...]] = {
    "voc": ("images", "split", "label_map", "difficult", "voc_pixels"),
    "yolo": ("split", "label_map", "names", "yolo_pixels", "yolo_labels"),
    "cvat": ("images", "label_map"),
    "labelme": ("images", "label_map"),
    "csv": ("images", "label_map", "names"),
    "coco": ("images", "coco_pixels"),
    "tfrecord": ("images", "label_map"),
    "webdataset": ("images", "label_map"),
    "detections": ("images", "image_info", "score_threshold"),
}
READERS: dict[str, Callable[..., tuple[Annotations, str]]] = {
    "voc": read_voc,
    "yolo": read_yolo,
    "cvat": read_cvat,
    "labelme": read_labelme,
    "csv": read_csv,
    "detections": read_detections,
}
# Flags -> the arguments of these functions with other names.
_ARGUMENTS = {"images": "images_dir", "label_map": "label_map_file", "names": "names_file"}
_OF_FILES = ("max_side", "holdout", "overwrite")  # flags of formats whose --output is not a directory
OUTPUT_FLAGS: dict[str, tuple[str, ...]] = {
    "coco": _OF_FILES,
    "tfrecord": (*_OF_FILES, "num_shards", "seed"),
    "webdataset": (*_OF_FILES, "num_shards", "seed"),
    "yolo": (),
    "voc": ("voc_pixels",),
    "cvat": (),
}
DIRECTORIES = ("yolo", "voc", "cvat")  # formats of which --output is a directory
CONTAINERS = {"tfrecord": ".tfrecord", "webdataset": ".tar"}  # formats whose files contain the images


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, except --from and --to."""

    input: str = flag(
        None,
        "voc: directory with Annotations/ and JPEGImages/, or directory of xml files. yolo: directory with "
        "images/ and labels/, a data.yaml, or a list of images. cvat: xml file. labelme: directory of json "
        "files. csv: csv file. coco: json file, or several with commas between them. tfrecord, webdataset: "
        "glob of files. detections: detections.json.",
    )
    output: str = flag(
        None,
        "coco: json to write. tfrecord, webdataset: prefix of the files to write, or s3://BUCKET/PREFIX. "
        "yolo, voc, cvat: empty or new directory for labels and images.",
    )
    images: str | None = flag(
        None,
        "Directory of the images. coco: one for each json, with commas between them. tfrecord, webdataset: "
        "the images are written there; default: images/ next to --output if that is coco.",
    )
    split: str | None = flag(
        None,
        "voc: list of the images to convert, either NAME for ImageSets/Main/NAME.txt or the path of a file. "
        "yolo: name of a split, such as train or val.",
    )
    label_map: str | None = flag(None, "All but coco and detections: json or .pbtxt file of the categories.")
    image_info: str | None = flag(
        None,
        "detections: json with COCO's `images` and `categories`. Default: image_info.json next to --input.",
    )
    score_threshold: float = flag(0.3, "detections: minimum score.", low=0.0, high=1.0)
    names: str | None = flag(
        None,
        "yolo: file with one class name per line, or a data.yaml. csv: class-descriptions-boxable.csv of "
        "OpenImages.",
    )
    difficult: str = flag(
        "keep", "voc: what to do with objects marked difficult.", choices=("keep", "crowd", "drop")
    )
    voc_pixels: str = flag(
        "one_based",
        "voc: meaning of the coordinates. one_based: numbers of a box's first and last pixel, from 1 (VOC). "
        "zero_based: positions of its edges, from 0 (labelImg).",
        choices=("one_based", "zero_based"),
    )
    yolo_pixels: str | None = flag(
        None,
        "yolo: whether labels refer to the images as stored, or as turned by their EXIF orientation.",
        choices=("stored", "turned"),
    )
    yolo_labels: str | None = flag(
        None,
        "yolo: meaning of lines with more than six numbers. polygon: corners. pose: a box and keypoints. "
        "Default: recognised by kpt_shape in the data.yaml, or by the numbers.",
        choices=("polygon", "pose"),
    )
    num_shards: int = flag(1, "tfrecord, webdataset: number of files to write.", low=1)
    seed: int = flag(0, "Seed of --holdout, and of the image order in TFRecords and WebDataset.", low=0)
    max_side: int | None = flag(None, "Longest side in pixels; larger images are scaled down.", low=1)
    holdout: float | None = flag(None, "Fraction of images for evaluation. Writes OUTPUT_train, OUTPUT_val.")
    overwrite: bool = flag(False, "Replace existing files.")
    on_bad_image: str = "stop"
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS
    coco_pixels: str | None = None


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_enum("from", None, list(INPUT_FLAGS), "Format of the input.", flag_values=fv)
    flags.DEFINE_enum("to", None, list(OUTPUT_FLAGS), "Format of the output.", flag_values=fv)
    names = [field.name for field in dataclasses.fields(Options) if "help" in field.metadata]
    shared_flags.define(fv, Options, names)
    shared_flags.define(fv, shared_flags.Args, (*shared_flags.IMAGE_FLAGS, "coco_pixels"))
    flags.mark_flags_as_required(["from", "to", "input", "output"], flag_values=fv)


def refuse_idle_flags(fv: flags.FlagValues) -> None:
    """Raises UserError if a given flag has no effect for the formats --from and --to."""
    source, target = str(fv["from"].value), str(fv["to"].value)
    used = {*INPUT_FLAGS[source], *OUTPUT_FLAGS[target], *(("seed",) if fv["holdout"].present else ())}
    special = {name for names in (*INPUT_FLAGS.values(), *OUTPUT_FLAGS.values()) for name in names}
    for name in sorted(special - used):
        if fv[name].present:
            raise UserError(f"--{name} has no effect on a conversion from {source} to {target}: remove it")


def convert(source: str, target: str, options: Options) -> tuple[dict[str, Annotations], str]:
    """Converts a data set.

    Args:
        source, target: the formats, --from and --to.

    Returns:
        ({name of an output: its annotations}, directory of the images, or the input from which they were
        copied). --holdout makes two outputs.

    Raises:
        DataError: the input has errors; the message lists all of them.
        UserError: flags exclude each other, or files are missing, exist already or cannot be read.
    """
    if source not in CONTAINERS:
        advice = "only TFRecords and WebDataset are read from there, copy it to a disk"
        storage.refuse_remote("--input", options.input, advice)
    formats = recognition.recognise_path(options.input)
    if formats and source not in {row.source for row in formats}:
        row, path = next(iter(formats.items()))
        raise UserError(f"--from={source}, but {path} is in another format: {row.message(path)}")
    output, max_side, holdout = options.output, options.max_side, options.holdout
    joins = source == "coco" and bool(options.images) and len(coco_inputs(options.input, options.images)) > 1
    changes = max_side is not None or holdout is not None or options.coco_pixels == "turned" or joins
    if source == target and (target in CONTAINERS or not changes):
        needs = "--max_side, --holdout, --coco_pixels=turned or several jsons"
        raise UserError(
            f"--from={source} --to={target}: there is nothing to convert; coco to coco needs {needs}"
        )
    copies_keys = source == target == "coco" and options.coco_pixels != "turned" and not joins
    outputs = _outputs(target, options)
    try:
        if source in CONTAINERS and target != "coco" and not options.images:
            # The folder of the output does not exist yet, and is not made if the input is refused.
            folders = pathlib.Path(os.path.abspath(output)).parents
            folder = None if storage.is_remote(output) else next(filter(os.path.isdir, folders))
            with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as images:
                return convert(source, target, dataclasses.replace(options, images=images))[0], options.input
        annotations, images_dir = _read(source, options)
        parts = [annotations] if holdout is None else split(annotations, holdout, options.seed)
        if max_side is not None:
            if target == "coco" and source not in CONTAINERS:
                original_dir, images_dir = images_dir, f"{os.path.dirname(output) or '.'}/images_{max_side}"
                write_shrunk(annotations, original_dir, images_dir, max_side, overwrite=options.overwrite)
            parts = [shrink_annotations(part, max_side) for part in parts]
        part_of = dict(zip(outputs, parts, strict=True))
        # The smaller part comes first: if it has too few images for --num_shards, no part is written.
        for name, part in sorted(part_of.items(), key=lambda item: item[1].num_images):
            if copies_keys:
                pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
                if count := copy_records(options.input, part, name):
                    log(f"{name}: {count} masks (RLE) are left out, because --max_side cannot scale them")
            elif target == "coco":
                write_coco(part, name)
            elif target in DIRECTORIES:
                write_labels(target, part, images_dir, name, voc_pixels=options.voc_pixels)
            else:
                import_tensorflow()
                from tools.conversion.coco_to_tfrecord import write_tfrecords

                write = write_tfrecords if target == "tfrecord" else write_webdataset
                shards = {"num_shards": options.num_shards, "seed": options.seed}
                write(part, images_dir, name, max_side=max_side, **shards)
        if source == "coco" and not copies_keys:
            for file, _ in coco_inputs(options.input, options.images):
                if keys := lost_keys(file):
                    log(f"{file}: these keys are not in the output: {', '.join(keys)}")
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}") from error
    return part_of, images_dir


def _outputs(target: str, options: Options) -> list[str]:
    """Returns the outputs: --output, or two for --holdout. Raises UserError if one cannot be written."""
    output, holdout = options.output, options.holdout
    if not output:
        raise UserError("--output is empty: give a path")
    storage.refuse_remote("--images", options.images, "give a directory on a disk")
    if target not in CONTAINERS:
        storage.refuse_remote("--output", output, "give a path on a disk, and copy the result to the bucket")
    if target in DIRECTORIES:
        if os.path.exists(output) and (not os.path.isdir(output) or os.listdir(output)):
            raise UserError(f"--output={output} exists already: give an empty or a new directory")
        return [output]
    ending = f"without {CONTAINERS[target]}" if target in CONTAINERS else "that ends in .json"
    if output.endswith("/") or (target == "coco" and os.path.isdir(output)):
        raise UserError(f"--output={output} is a directory: add a file name {ending}")
    outputs = [output]
    if holdout is not None:
        if not 0 < holdout < 1:
            raise UserError(f"--holdout={holdout}: give a fraction above 0 and below 1, such as 0.2")
        stem, suffix = os.path.splitext(output) if target == "coco" else (output, "")
        outputs = [f"{stem}_train{suffix}", f"{stem}_val{suffix}"]
    endings: tuple[str, ...] = ("",)
    if target in CONTAINERS:
        endings = (".label_map.json", f"-[0-9]*-of-[0-9]*{CONTAINERS[target]}")
    existing = [
        path for name in outputs for end in endings for path in storage.match(glob.escape(name) + end)
    ]
    if existing and not options.overwrite:
        raise UserError(f"{existing[0]} exists already: choose another --output, or give --overwrite")
    return outputs


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


def _read(source: str, options: Options) -> tuple[Annotations, str]:
    """Reads and checks the input. Returns its annotations and the directory of its images."""
    policy = ImagePolicy(options.on_bad_image, options.max_megapixels, coco_pixels=options.coco_pixels)
    if source in READERS:
        values = {_ARGUMENTS.get(name, name): getattr(options, name) for name in INPUT_FLAGS[source]}
        return READERS[source](options.input, policy=policy, **values)
    if source in CONTAINERS:
        return _read_containers(source, options, policy)
    inputs = coco_inputs(options.input, options.images)
    if len(inputs) > 1:
        return join(inputs, functools.partial(load_coco, policy=policy))
    return load_coco(*inputs[0], policy=policy), inputs[0][1]


def _read_containers(source_type: str, options: Options, policy: ImagePolicy) -> tuple[Annotations, str]:
    """Reads records or shards and writes their images as files."""
    source = open_file_pattern(options.input, options.label_map, policy, source_type)
    directory = options.images or os.path.join(os.path.dirname(options.output), "images")
    names = file_names(source.annotations, source.encoded)
    annotations = dataclasses.replace(source.annotations, file_names=names)
    if source_type == "tfrecord":
        annotations = round_boxes(annotations)

    def encoded(row: int) -> bytes:
        return shrink_image(source.encoded(row), annotations.image_name(row), options.max_side)

    write_images(directory, names, encoded, overwrite=options.overwrite)
    return annotations, directory


def main() -> None:
    refuse_idle_flags(flags.FLAGS)
    values = shared_flags.values(flags.FLAGS, define_flags)
    source, target = values.pop("from"), values.pop("to")
    options = Options(**values)
    parts, images_dir = convert(source, target, options)
    annotations = next(iter(parts.values()))
    log_issues(annotations.origin, annotations.issues)
    for output, part in parts.items():
        print(part.summary())
        if target in DIRECTORIES:
            print(f"{target}: {output}, with a copy of the images in {images_dir}")
        elif target in CONTAINERS:
            files = f"{output}-*-of-{options.num_shards:05d}{CONTAINERS[target]}"
            print(f"{target}: {files}; images from {images_dir}")
        else:
            print(f"{target}: {output}; images: {images_dir}")


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
