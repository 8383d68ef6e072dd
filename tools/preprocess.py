r"""Image preprocessing with DALI on its own: any source, a chain of operators, any output.

    python tools/preprocess.py --source=files --input=photos --output=small.npz \
        --ops="resize:short=256 | crop:224x224 | crop_mirror_normalize:mean=imagenet"
    python tools/preprocess.py --api=dynamic --source=tfrecord --input='data/*.tfrecord' --output=sheet.png \
        --ops="resize:128x128 | rotate:angle=-10..10,fill=114 | flip:p=0.5"
    python tools/preprocess.py --list_ops

The same chain runs in DALI's Pipeline API (a graph, prefetched: throughput) or its Dynamic API (imperative:
exploration). In Python: `open_image_source` and `Preprocessor`, see preprocessing/work.py.
"""

import glob
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags
from nvidia.dali import backend, types

from common import args as shared_flags
from common import errors
from common.datacheck.images import ImagePolicy
from common.errors import UserError
from common.progress import log
from tools.preprocessing import chain
from tools.preprocessing.image_source import KINDS, open_image_source
from tools.preprocessing.outputs import IMAGE_FORMATS, Sample, check_output
from tools.preprocessing.preprocessor import APIS, Preprocessor

__all__ = ["Preprocessor", "open_image_source", "preprocess"]


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_enum("source", "files", list(KINDS), "Kind of --input.", flag_values=fv)
    flags.DEFINE_string(
        "input",
        None,
        "A directory, file or glob; for external a FILE.py:name or module:name.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "images", None, "coco: directory of the images, where --input is the json.", flag_values=fv
    )
    flags.DEFINE_string(
        "annotations", None, "coco: the json, where --input is the directory of the images.", flag_values=fv
    )
    flags.DEFINE_string("label_map", None, "File that names the labels.", flag_values=fv)
    flags.DEFINE_string("ops", "", "Chain of operators; --list_ops shows them.", flag_values=fv)
    flags.DEFINE_bool("list_ops", False, "Show all operators with their arguments.", flag_values=fv)
    flags.DEFINE_enum(
        "api",
        "pipeline",
        APIS,
        "pipeline: a graph, prefetched; dynamic: operator by operator. The same pixels.",
        flag_values=fv,
    )
    flags.DEFINE_enum(
        "device", "cpu", ("cpu", "gpu"), "Where images are, from the decoder on.", flag_values=fv
    )
    flags.DEFINE_string(
        "output",
        None,
        "x.npz or x.npy: one array; a directory: a picture of each image; x.png or x.jpg: a contact sheet; "
        "x.tfrecord: records with an index.",
        flag_values=fv,
    )
    flags.DEFINE_bool("overwrite", False, "Replace --output.", flag_values=fv)
    flags.DEFINE_enum(
        "image_format", None, IMAGE_FORMATS, "Of pictures and records. Default: png.", flag_values=fv
    )
    flags.DEFINE_integer("jpeg_quality", None, "1 to 100.", flag_values=fv)
    flags.DEFINE_integer("output_shards", None, "Number of record files.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer("shard_id", 0, "Which part of the source.", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer("num_shards", 1, "Into how many parts.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer(
        "seed",
        0,
        "Of random draws; 0 is one.",
        lower_bound=0,
        upper_bound=shared_flags.MAX_SEED,
        flag_values=fv,
    )
    flags.DEFINE_bool(
        "decode", False, "Look at every pixel of every image before anything runs.", flag_values=fv
    )
    shared_flags.define_batch_flags(fv)


def preprocess(
    *,
    source: str = "files",
    input: str | None = None,
    images: str | None = None,
    annotations: str | None = None,
    label_map: str | None = None,
    ops: str = "",
    list_ops: bool = False,
    api: str = "pipeline",
    device: str = "cpu",
    output: str | None = None,
    overwrite: bool = False,
    image_format: str | None = None,
    jpeg_quality: int | None = None,
    output_shards: int | None = None,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    decode: bool = False,
    num_threads: int = 2,
    prefetch: int = 2,
    batch_size: int = 8,
    on_bad_image: str = "stop",
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS,
) -> None:
    """The command; see the flags of the same names.

    Raises:
        UserError: flags that cannot be used, an image that an operator refuses.
        DataError: images that cannot be used.
    """
    if list_ops:
        print(chain.describe())
        return
    if not input:
        raise UserError("--input is missing: name a directory, file or glob of images")
    if not output:
        raise UserError(
            "--output is missing: name an .npz, .npy, .png, .jpg or .tfrecord file, or a directory"
        )
    if shard_id >= num_shards:
        raise UserError(
            f"--shard_id={shard_id} is not in 0..{num_shards - 1}, as --num_shards={num_shards} says"
        )
    color = chain.parse(ops).color  # complains before images are looked at
    if device == "gpu" and not backend.GetCUDADeviceCount():
        raise UserError("--device=gpu: DALI sees no GPU here; use --device=cpu")
    policy = ImagePolicy(on_bad_image, max_megapixels, decode)
    opened = open_image_source(
        source, input, policy=policy, annotations=annotations, images=images, label_map=label_map
    )
    target = check_output(
        output,
        overwrite=overwrite,
        inputs=[
            *(path for given in (input, images, annotations) if given for path in [given, *glob.glob(given)]),
            *getattr(opened, "files", ()),  # a list names files elsewhere
        ],
        has_labels=bool((opened.labels >= 0).any()),
        label_names=opened.label_names,
        image_format=image_format,
        jpeg_quality=jpeg_quality,
        num_shards=output_shards,
        is_bgr=color == types.BGR,
    )
    work = Preprocessor(
        source=opened,
        ops=ops,
        batch_size=min(batch_size, opened.size),
        device=device,
        device_id=0 if device == "gpu" else None,
        num_threads=num_threads,
        prefetch=prefetch,
        shard_id=shard_id,
        num_shards=num_shards,
        seed=seed,
    )
    made = 0

    def samples() -> Iterator[Sample]:
        nonlocal made
        for sample in work.samples(api):
            made += 1
            yield sample

    begin = time.perf_counter()
    print(target.write(samples(), work.size))
    seconds = time.perf_counter() - begin
    log(f"{made} images in {seconds:.1f} s: {made / seconds:.0f} images/s, decoding to writing")


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves as little behind as Ctrl-C
    preprocess(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
