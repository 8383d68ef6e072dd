r"""Preprocesses images with DALI: reads a source, decodes and transforms the images, and writes them.

    python examples/preprocessing/preprocess.py --source=files --input=my/images --output=small.npz \
        --resize_shorter=256 --crop=224x224 --normalize=imagenet
    python examples/preprocessing/preprocess.py --api=dynamic --source=tfrecord --input='my/*.tfrecord' \
        --resize_shorter=256 --rotate=10 --output=pictures

Images go through the steps of `preprocess` in pipeline_api.py or dynamic_api.py. Both give the same pixels.
"""

import dataclasses
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Iterator

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np
from absl import flags

from common import args as shared_flags
from common import errors
from common.args import default_threads, flag
from common.errors import UserError
from common.files import write_directory
from common.progress import import_tensorflow

SOURCES = ("files", "list", "external", "tfrecord", "coco", "lmdb", "recordio", "webdataset", "numpy")


@dataclasses.dataclass(frozen=True)
class Args:
    """The flags. A step whose flag is not given is left out."""

    api: str = flag("pipeline", "API of DALI.", choices=("pipeline", "dynamic"))
    source: str = flag("files", "Kind of --input.", choices=SOURCES)
    input: str | None = flag(None, "File, directory or glob. For external, also FILE.py:name.")
    images: str | None = flag(None, "For coco: image directory. Default: `images` beside the json.")
    output: str | None = flag(None, "OUT.npz: one array `images`, in input order. Or a directory for PNGs.")
    decode: str = flag(
        "whole", "Which pixels to decode. cropped: only those of the crop.", choices=("whole", "cropped")
    )
    resize_shorter: int | None = flag(None, "New length of the shorter side in pixels.", low=1, high=65_535)
    crop: str | None = flag(None, "HEIGHTxWIDTH in pixels of a crop from the centre.")
    brightness: float = flag(1.0, "Factor for the brightness.", low=0)
    saturation: float = flag(1.0, "Factor for the saturation; 0 is gray.", low=0)
    rotate: float = flag(0.0, "Rotation in degrees, counter-clockwise.")
    shear: float = flag(0.0, "Shear in degrees.", low=-80, high=80)
    normalize: str = flag("none", "imagenet: float32, by mean and deviation.", choices=("imagenet", "none"))
    batch_size: int = flag(32, "Images that DALI processes at once.", low=1)
    device: str = flag(
        "cpu", "Device that decodes and transforms. gpu was never run.", choices=("cpu", "gpu")
    )


def preprocess(a: types.SimpleNamespace) -> None:
    """Runs the command. Raises UserError."""
    crop = _check_flags(a)
    import_tensorflow()
    from examples.preprocessing import checks, outputs

    with tempfile.TemporaryDirectory() as scratch:
        try:
            source = checks.open_source(a.source, a.input, a.images, scratch)
        except OSError as error:
            raise UserError(f"{error.filename or a.input}: {error.strerror}") from error
        names = ("resize_shorter", "brightness", "saturation", "rotate", "shear", "normalize", "device")
        options = {name: getattr(a, name) for name in names} | {"crop": crop, "decode": a.decode}
        if source.is_decoded:
            options["decode"] = "no"
        _check_crop(a, crop, source)
        count = len(source.names)
        images = _images(a, source, options)
        try:
            if a.output.endswith(".npz"):
                shape = outputs.write_npz(a.output, images, count)
                print(f"{count} images: {a.output}, array `images` of shape {shape}")
            else:
                pathlib.Path(a.output).parent.mkdir(parents=True, exist_ok=True)
                write_directory(a.output, lambda new: outputs.write_pictures(new, images, source.names))
                print(f"{count} pictures: {a.output}")
        except ValueError as error:
            raise UserError(f"--output={a.output}: {error}: an .npz needs one size, give --crop") from error
        except OSError as error:
            raise UserError(f"--output={a.output}: {error.strerror or error}") from error


def _check_flags(a: types.SimpleNamespace) -> tuple[int, int] | None:
    """Returns --crop as (height, width)."""
    for name in ("input", "output"):
        if not getattr(a, name):
            raise UserError(f"--{name} is missing")
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", a.crop or "1x1")
    crop = (int(match[1]), int(match[2])) if match else (0, 0)
    if min(crop) < 1:
        raise UserError(f"--crop={a.crop}: give HEIGHTxWIDTH in pixels, such as 224x224")
    suffix = os.path.splitext(a.output)[1]
    if re.fullmatch(r"\.[A-Za-z]\w{0,7}", suffix) and suffix != ".npz":
        raise UserError(f"--output={a.output}: the suffix {suffix} is unknown, use OUT.npz or a directory")
    if os.path.lexists(a.output) and not (os.path.isdir(a.output) and not os.listdir(a.output)):
        raise UserError(f"--output={a.output} exists: choose another name, or remove it first")
    if a.output.endswith(".npz") and not os.path.isdir(os.path.dirname(a.output) or "."):
        raise UserError(f"--output={a.output}: its directory does not exist: make it first")
    if not a.output.endswith(".npz") and a.normalize != "none":
        raise UserError("pictures cannot hold normalised values: use --output=OUT.npz or --normalize=none")
    if a.decode == "cropped" and not (a.crop and a.resize_shorter and max(crop) <= a.resize_shorter):
        raise UserError("--decode=cropped needs --crop, and a --resize_shorter that is at least as large")
    if a.decode == "cropped" and (a.device == "gpu" or a.source == "numpy"):
        raise UserError("--decode=cropped decodes images on the CPU: remove it")
    return crop if a.crop else None


def _check_crop(a: types.SimpleNamespace, crop: tuple[int, int] | None, source) -> None:
    """Raises UserError if an image is smaller than its crop."""
    for name, size in zip(source.names, source.sizes, strict=True):
        scale = a.resize_shorter / min(size) if a.resize_shorter else 1
        # EXIF may swap the sides, so compare the shorter and the longer side.
        sides = sorted(round(side * scale) for side in size)
        if crop and any(side < needed for side, needed in zip(sides, sorted(crop), strict=True)):
            raise UserError(
                f"image {name!r} has {sides[0]} x {sides[1]} pixels, less than --crop={a.crop}:"
                " give a smaller --crop or a larger --resize_shorter"
            )


def _images(a: types.SimpleNamespace, source, options: dict) -> Iterator[np.ndarray]:
    """Yields the images in order. Raises UserError if DALI fails."""
    import nvidia.dali.experimental.dynamic as ndd
    from nvidia.dali import backend

    from examples.preprocessing import checks, dynamic_api, outputs, pipeline_api, sources

    if a.device == "gpu" and not backend.GetCUDADeviceCount():
        raise UserError("--device=gpu: DALI sees no GPU here; use --device=cpu")
    read = getattr(sources, f"{a.source}_{a.api}")
    count = len(source.names)
    try:
        if a.api == "pipeline":
            threads = {"batch_size": min(a.batch_size, count), "num_threads": default_threads()}
            device_id = 0 if a.device == "gpu" else None
            pipeline = pipeline_api.make_pipeline(
                read, source.arguments, options, device_id=device_id, **threads
            )
            yield from outputs.numpy_images(pipeline, count)
        else:
            ndd.set_num_threads(default_threads())
            for encoded, *_ in read(**source.arguments, batch_size=min(a.batch_size, count)):
                for image in dynamic_api.preprocess(encoded, **options).cpu().tensors:
                    if count:
                        yield np.array(image)
                        count -= 1
    except RuntimeError as error:
        name = _failing_image(a, source, options)
        raise UserError(f"--input={a.input}: DALI fails at {name}: {checks.reason(error)}") from error


def _failing_image(a: types.SimpleNamespace, source, options: dict) -> str:
    """Processes each image alone, and returns the name of the first that fails."""
    import nvidia.dali.experimental.dynamic as ndd

    from examples.preprocessing import dynamic_api, sources

    batches = getattr(sources, f"{a.source}_dynamic")(**source.arguments, batch_size=1)
    for name, (encoded, *_) in zip(source.names, batches, strict=False):
        try:
            with ndd.EvalMode.sync_cpu:
                dynamic_api.preprocess(encoded, **options)
        except RuntimeError:
            return f"image {name!r}"
    return "an unknown image"


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, Args)


def main() -> None:
    preprocess(types.SimpleNamespace(**shared_flags.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
