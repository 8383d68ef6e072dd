r"""Converts data sets: Pascal VOC, YOLO txt, COCO and TFRecords to COCO json or to TFRecords.

    python tools/convert.py --from=voc --to=coco --input=VOCdevkit/VOC2012 --split=train \
        --output=voc/instances_train.json
    python tools/convert.py --from=yolo --to=tfrecord --input=my/data.yaml --split=val --output=records/val
    python tools/convert.py --from=coco --to=tfrecord --input=my/instances.json --images=my/images \
        --output=records/train --num_shards=4
    python tools/convert.py --from=tfrecord --to=coco --input='records/train*.tfrecord' \
        --output=my/instances.json

It lists everything that is wrong with the input, with its file, before it writes anything. voc.py, yolo.py
and labels.py in tools/conversion/ describe what becomes of ids, difficult objects, polygons and so on. A COCO
json goes with the images where they lie, and its file names are relative to the directory that is printed;
only images in TFRecords are written anew, to `images` beside the json.
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import args as shared_flags
from common import errors
from common.errors import UserError

# Format -> the flags that mean something for it alone.
READ = {
    "voc": ("images", "split", "label_map", "difficult", "voc_pixels"),
    "yolo": ("split", "label_map", "names", "yolo_pixels"),
    "coco": ("images",),
    "tfrecord": ("images", "label_map"),
}
WRITTEN = {"coco": (), "tfrecord": ("num_shards", "seed")}


def define_flags(fv: flags.FlagValues) -> None:
    """The flags of this command."""
    flags.DEFINE_enum("from", None, list(READ), "Format of the input.", flag_values=fv)
    flags.DEFINE_enum("to", None, list(WRITTEN), "Format of the output.", flag_values=fv)
    texts = {
        "input": "voc: directory with Annotations/ and JPEGImages/, or of xml files. yolo: directory with "
        "images/ and labels/, data.yaml, or list of images. coco: json. tfrecord: glob.",
        "output": "coco: json to write. tfrecord: prefix of the files to write.",
        "images": "Directory of images. voc, coco: where they are. tfrecord: where they go; default: images "
        "beside --output.",
        "split": "voc: NAME of ImageSets/Main/NAME.txt, or path of a list of names. yolo: train, val, ...",
        "label_map": "voc, yolo: ids of the class names. tfrecord: class names of the ids.",
        "names": "yolo: file of class names, one a line, or a data.yaml.",
    }
    for name, text in texts.items():
        flags.DEFINE_string(name, None, text, flag_values=fv)
    choices = ("keep", "crowd", "drop")
    flags.DEFINE_enum(
        "difficult", "keep", choices, "voc: what becomes of objects marked difficult.", flag_values=fv
    )
    text = (
        "voc: one_based counts pixels from 1 and includes the last, as Pascal VOC does; zero_based are edges "
        "from 0, as labelImg writes them."
    )
    flags.DEFINE_enum("voc_pixels", "one_based", ("one_based", "zero_based"), text, flag_values=fv)
    text = "yolo: which pixels the labels of images with an EXIF turn refer to."
    flags.DEFINE_enum("yolo_pixels", None, ("stored", "turned"), text, flag_values=fv)
    flags.DEFINE_integer("num_shards", 1, "tfrecord: number of files.", lower_bound=1, flag_values=fv)
    text = "tfrecord: seed of the order of the images."
    flags.DEFINE_integer("seed", 0, text, lower_bound=0, flag_values=fv)
    flags.DEFINE_bool("overwrite", False, "Replace files that are there already.", flag_values=fv)
    shared_flags.define_image_flags(fv)
    flags.mark_flags_as_required(["from", "to", "input", "output"], flag_values=fv)


def refuse_idle_flags(fv: flags.FlagValues) -> None:
    """UserError for a flag that is given and does nothing in this direction."""
    source, target = fv["from"].value, fv["to"].value
    special = {name for names in (*READ.values(), *WRITTEN.values()) for name in names}
    for name in sorted(special - {*READ[source], *WRITTEN[target]}):
        if fv[name].present:
            raise UserError(f"--{name} does nothing from {source} to {target}: leave it out")


def main() -> None:
    """The command. Flags are parsed before TensorFlow and DALI are imported, which takes seconds."""
    refuse_idle_flags(flags.FLAGS)
    values = shared_flags.values(flags.FLAGS, define_flags)
    source, target = values.pop("from"), values.pop("to")
    from common.progress import say_findings
    from tools.conversion.convert import Options, convert

    options = Options(**values)
    annotations, images_dir = convert(source, target, options)
    say_findings(annotations.findings)
    print(annotations.summary())
    print(f"{target}: {options.output}; images: {images_dir}")


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
