r"""Preprocesses images with DALI: reads them from a source, applies a chain of operators, and writes them.

    python tools/preprocess.py --source=files --input=photos --output=small.npz \
        --ops="resize:short=256 | crop:224x224 | crop_mirror_normalize:mean=imagenet"
    python tools/preprocess.py --api=dynamic --source=tfrecord --input='data/*.tfrecord' --output=sheet.png \
        --ops="resize:128x128 | rotate:angle=-10..10,fill=114 | flip:p=0.5"
    python tools/preprocess.py --list_ops

The same chain runs in DALI's Pipeline API, which prefetches batches, or in its Dynamic API. In Python use
`open_image_source` and `Preprocessor` of preprocessing/preprocessor.py.
"""

import glob
import pathlib
import signal
import sys
import types

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors
from common.args import ImagePolicy, default_threads
from common.errors import UserError
from common.progress import import_tensorflow
from tools.preprocessing.options import ACCEPTED, define_flags


def preprocess(a: types.SimpleNamespace) -> None:
    """Runs the command. Raises UserError or DataError."""
    if not (a.input or a.list_ops):
        raise UserError("--input is missing: give a directory, file or glob of images")
    if not (a.output or a.list_ops):
        raise UserError(f"--output is missing: give {ACCEPTED}")
    import_tensorflow()
    from nvidia.dali import backend
    from nvidia.dali import types as dali_types

    from tools.preprocessing import chain
    from tools.preprocessing.image_source import open_image_source
    from tools.preprocessing.outputs import check_output
    from tools.preprocessing.preprocessor import Preprocessor

    if a.list_ops:
        print(chain.describe())
        return
    color = chain.parse(a.ops).color
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    preprocess(types.SimpleNamespace(**shared_flags.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
