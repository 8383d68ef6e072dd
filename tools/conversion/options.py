"""The flags of tools/convert.py, and which of them a format uses. Imports neither TensorFlow nor DALI."""

import dataclasses

from absl import flags

from common import args as shared_flags
from common.args import flag
from common.errors import UserError

# Format -> the flags that mean something for it alone.
READ = {
    "voc": ("images", "split", "label_map", "difficult", "voc_pixels"),
    "yolo": ("split", "label_map", "names", "yolo_pixels"),
    "coco": ("images",),
    "tfrecord": ("images", "label_map"),
}
WRITTEN = {"coco": (), "tfrecord": ("num_shards", "seed")}


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags but --from and --to. absl insists on --input and --output."""

    input: str = flag(
        None,
        "voc: directory with Annotations/ and JPEGImages/, or of xml files. yolo: directory with images/ and "
        "labels/, data.yaml, or list of images. coco: json. tfrecord: glob.",
    )
    output: str = flag(None, "coco: json to write. tfrecord: prefix of the files to write.")
    images: str | None = flag(
        None, "Images. voc, coco: their directory. tfrecord: where they go; default: images beside --output."
    )
    split: str | None = flag(
        None, "voc: NAME of ImageSets/Main/NAME.txt, or path of a list of names. yolo: train, val, ..."
    )
    label_map: str | None = flag(None, "voc, yolo: ids of the class names. tfrecord: class names of the ids.")
    names: str | None = flag(None, "yolo: file of class names, one a line, or a data.yaml.")
    difficult: str = flag(
        "keep", "voc: what becomes of objects marked difficult.", choices=("keep", "crowd", "drop")
    )
    voc_pixels: str = flag(
        "one_based",
        "voc: pixels count from 1, or edges from 0 (labelImg).",
        choices=("one_based", "zero_based"),
    )
    yolo_pixels: str | None = flag(
        None, "yolo: pixels that labels of images with an EXIF turn refer to.", choices=("stored", "turned")
    )
    num_shards: int = flag(1, "tfrecord: number of files.", low=1)
    seed: int = flag(0, "Seed of --holdout, and of the order of the images in tfrecord.", low=0)
    max_side: int | None = flag(None, "Longest side in pixels; larger images are written smaller.", low=1)
    holdout: float | None = flag(None, "Share of images for evaluation: writes OUTPUT_train and OUTPUT_val.")
    overwrite: bool = flag(False, "Replace files that are there already.")
    on_bad_image: str = "stop"
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS


def define_flags(fv: flags.FlagValues) -> None:
    """The flags of tools/convert.py."""
    flags.DEFINE_enum("from", None, list(READ), "Format of the input.", flag_values=fv)
    flags.DEFINE_enum("to", None, list(WRITTEN), "Format of the output.", flag_values=fv)
    own = [field.name for field in dataclasses.fields(Options) if "help" in field.metadata]
    shared_flags.define(fv, Options, own)
    shared_flags.define(fv, shared_flags.Args, shared_flags.IMAGE_FLAGS)
    flags.mark_flags_as_required(["from", "to", "input", "output"], flag_values=fv)


def refuse_idle_flags(fv: flags.FlagValues) -> None:
    """UserError for a flag that is given and does nothing in this direction."""
    source, target = str(fv["from"].value), str(fv["to"].value)
    of_holdout = ("seed",) if fv["holdout"].present else ()
    special = {name for names in (*READ.values(), *WRITTEN.values()) for name in names}
    for name in sorted(special - {*READ[source], *WRITTEN[target], *of_holdout}):
        if fv[name].present:
            raise UserError(f"--{name} does nothing from {source} to {target}: leave it out")
