"""The flags of tools/preprocess.py."""

import dataclasses

from absl import flags

from common import args as shared_flags
from common.args import flag

SOURCES = ("files", "list", "tfrecord", "coco", "external", "lmdb", "recordio", "webdataset", "numpy")
APIS = ("pipeline", "dynamic")
IMAGE_FORMATS = ("png", "jpeg")
ACCEPTED = (
    "x.npz or x.npy (one array), x.png or x.jpg (a contact sheet), x.tfrecord, or a directory of pictures"
)


@dataclasses.dataclass(frozen=True)
class Args:
    """The flags of this command, except those in `args.BATCH_FLAGS`."""

    source: str = flag("files", "Format of --input.", choices=SOURCES)
    input: str | None = flag(None, "Directory, file or glob. For external: FILE.py:name or module:name.")
    images: str | None = flag(None, "Directory of the images, if --source=coco and --input is the json.")
    annotations: str | None = flag(None, "COCO json, if --source=coco and --input is the image directory.")
    ops: str = flag("", "Chain of operators; --list_ops shows them.")
    list_ops: bool = flag(False, "Show all operators with their arguments.")
    api: str = flag("pipeline", "DALI's API. pipeline: prefetches; dynamic: runs step by step.", choices=APIS)
    device: str = flag("cpu", "Device on which the operators run.", choices=("cpu", "gpu"))
    output: str | None = flag(None, f"Output: {ACCEPTED}.")
    overwrite: bool = flag(False, "Replace an existing --output.")
    image_format: str | None = flag(None, "Format of written images. Default: png.", choices=IMAGE_FORMATS)
    jpeg_quality: int | None = flag(None, "Quality of JPEGs. Default: 95.", low=1, high=100)
    output_shards: int | None = flag(None, "Number of TFRecord files.", low=1)
    seed: int = flag(0, "Seed of the random numbers in --ops.", low=0, high=shared_flags.MAX_SEED)
    decode: bool = flag(False, "Decode every image completely before the start, to find damage.")


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, Args)
    shared_flags.define(fv, shared_flags.Args, shared_flags.BATCH_FLAGS)
