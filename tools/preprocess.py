r"""Image preprocessing with DALI: any source, a chain of operators, any output.

    python tools/preprocess.py --source=files --input=photos --output=small.npz \
        --ops="resize:short=256 | crop:224x224 | crop_mirror_normalize:mean=imagenet"
    python tools/preprocess.py --api=dynamic --source=tfrecord --input='data/*.tfrecord' --output=sheet.png \
        --ops="resize:128x128 | rotate:angle=-10..10,fill=114 | flip:p=0.5"
    python tools/preprocess.py --list_ops

The same chain runs in DALI's Pipeline API (a graph, prefetched: throughput) or its Dynamic API (imperative:
exploration). In Python: `open_image_source` and `Preprocessor`, see preprocessing/preprocessor.py.
"""

import dataclasses
import glob
import pathlib
import signal
import sys
import types

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from common.progress import import_tensorflow

if __name__ == "__main__":
    import_tensorflow()  # without its first lines

from absl import flags
from nvidia.dali import backend
from nvidia.dali import types as dali_types

from common import args as shared_flags
from common import errors
from common.args import ImagePolicy, default_threads, flag
from common.errors import UserError
from tools.preprocessing import chain
from tools.preprocessing.image_source import KINDS, open_image_source
from tools.preprocessing.outputs import ACCEPTED, IMAGE_FORMATS, check_output
from tools.preprocessing.preprocessor import APIS, Preprocessor

__all__ = ["Preprocessor", "open_image_source", "preprocess"]


@dataclasses.dataclass(frozen=True)
class Args:
    """The flags of this command, beside those of `args.BATCH_FLAGS`."""

    source: str = flag("files", "Kind of --input.", choices=list(KINDS))
    input: str | None = flag(None, "A directory, file or glob; for external FILE.py:name or module:name.")
    images: str | None = flag(None, "coco: directory of the images, where --input is the json.")
    annotations: str | None = flag(None, "coco: the json, where --input is the directory of the images.")
    ops: str = flag("", "Chain of operators; --list_ops shows them.")
    list_ops: bool = flag(False, "Show all operators with their arguments.")
    api: str = flag("pipeline", "pipeline: a graph, prefetched; dynamic: operator by operator.", choices=APIS)
    device: str = flag("cpu", "Where images are, from the decoder on.", choices=("cpu", "gpu"))
    output: str | None = flag(None, f"Where images go: {ACCEPTED}.")
    overwrite: bool = flag(False, "Replace --output.")
    image_format: str | None = flag(None, "Format of pictures. Default: png.", choices=IMAGE_FORMATS)
    jpeg_quality: int | None = flag(None, "Quality of JPEGs. Default: 95.", low=1, high=100)
    output_shards: int | None = flag(None, "Number of record files.", low=1)
    seed: int = flag(0, "Seed of random draws.", low=0, high=shared_flags.MAX_SEED)
    decode: bool = flag(False, "Check every pixel of every image before anything runs.")


def define_flags(fv: flags.FlagValues) -> None:
    """All flags of this command."""
    shared_flags.define(fv, Args)
    shared_flags.define(fv, shared_flags.Args, shared_flags.BATCH_FLAGS)


def preprocess(a: types.SimpleNamespace) -> None:
    """The command.

    Args:
        a: the values of the flags, by their names.

    Raises:
        UserError: flags that cannot be used, an image that an operator refuses.
        DataError: images that cannot be used.
    """
    if a.list_ops:
        print(chain.describe())
        return
    if not a.input:
        raise UserError("--input is missing: name a directory, file or glob of images")
    if not a.output:
        raise UserError(f"--output is missing: name {ACCEPTED}")
    color = chain.parse(a.ops).color  # an error in --ops comes before images are checked
    if a.device == "gpu" and not backend.GetCUDADeviceCount():
        raise UserError("--device=gpu: DALI sees no GPU here; use --device=cpu")
    policy = ImagePolicy(a.on_bad_image, a.max_megapixels, a.decode)
    source = open_image_source(a.source, a.input, policy=policy, annotations=a.annotations, images=a.images)
    given = [path for path in (a.input, a.images, a.annotations) if path]
    output = check_output(
        a.output,
        inputs=[*given, *(file for path in given for file in glob.glob(path)), *source.files],
        has_labels=bool((source.labels >= 0).any()),
        label_names=source.label_names,
        is_bgr=color == dali_types.BGR,
        **{name: getattr(a, name) for name in ("overwrite", "image_format", "jpeg_quality", "output_shards")},
    )
    preprocessor = Preprocessor(
        source=source,
        batch_size=min(a.batch_size, source.size),
        device_id=0 if a.device == "gpu" else None,
        num_threads=a.num_threads or default_threads(),
        **{name: getattr(a, name) for name in ("ops", "device", "prefetch", "seed")},
    )
    print(output.write(preprocessor.samples(a.api), preprocessor.size))


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves as little behind as Ctrl-C
    preprocess(types.SimpleNamespace(**shared_flags.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
