"""The flags of tools/convert.py, and which formats use them."""

import dataclasses

from absl import flags

from common import args as shared_flags
from common.args import flag
from common.errors import UserError

# Format -> the flags that it uses. Flags that all formats use are not listed.
READ = {
    "voc": ("images", "split", "label_map", "difficult", "voc_pixels"),
    "yolo": ("split", "label_map", "names", "yolo_pixels"),
    "coco": ("images",),
    "tfrecord": ("images", "label_map"),
}
WRITTEN = {"coco": (), "tfrecord": ("num_shards", "seed")}


@dataclasses.dataclass(frozen=True)
class Options:
    input: str = flag(
        None,
        "voc: directory with Annotations/ and JPEGImages/, or directory of xml files. yolo: directory with "
        "images/ and labels/, a data.yaml, or a list of images. coco: json file. tfrecord: glob of files.",
    )
    output: str = flag(None, "coco: json to write. tfrecord: prefix of the files to write.")
    images: str | None = flag(
        None, "Directory of the images. --from=tfrecord writes them there; default: images/ next to --output."
    )
    split: str | None = flag(
        None,
        "voc: list of the images to convert, either NAME for ImageSets/Main/NAME.txt or the path of a file. "
        "yolo: name of a split, such as train or val.",
    )
    label_map: str | None = flag(None, "voc, yolo, tfrecord: json or .pbtxt file of the categories.")
    names: str | None = flag(None, "yolo: file with one class name per line, or a data.yaml.")
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
    num_shards: int = flag(1, "tfrecord: number of files to write.", low=1)
    seed: int = flag(0, "Seed of --holdout, and of the image order in TFRecords.", low=0)
    max_side: int | None = flag(None, "Longest side in pixels; larger images are scaled down.", low=1)
    holdout: float | None = flag(None, "Fraction of images for evaluation. Writes OUTPUT_train, OUTPUT_val.")
    overwrite: bool = flag(False, "Replace existing files.")
    on_bad_image: str = "stop"
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_enum("from", None, list(READ), "Format of the input.", flag_values=fv)
    flags.DEFINE_enum("to", None, list(WRITTEN), "Format of the output.", flag_values=fv)
    own = [field.name for field in dataclasses.fields(Options) if "help" in field.metadata]
    shared_flags.define(fv, Options, own)
    shared_flags.define(fv, shared_flags.Args, shared_flags.IMAGE_FLAGS)
    flags.mark_flags_as_required(["from", "to", "input", "output"], flag_values=fv)


def refuse_idle_flags(fv: flags.FlagValues) -> None:
    """Raises UserError if a given flag has no effect for the formats --from and --to."""
    source, target = str(fv["from"].value), str(fv["to"].value)
    of_holdout = ("seed",) if fv["holdout"].present else ()
    special = {name for names in (*READ.values(), *WRITTEN.values()) for name in names}
    for name in sorted(special - {*READ[source], *WRITTEN[target], *of_holdout}):
        if fv[name].present:
            raise UserError(f"--{name} has no effect on a conversion from {source} to {target}: remove it")
