"""Exports weights to a file and compares the file with the weights."""

import dataclasses
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from common.args import ImagePolicy
from common.data.labels import LabelMap
from common.data.loader import BaseLoader
from common.data.open import check_labels, open_images, open_source
from common.data.sources import Source
from common.distributed.start import share_gpu_memory
from common.errors import UserError
from common.evaluation import exported as runtimes
from common.evaluation.detectors import read_exported
from common.evaluation.evaluate import evaluate
from common.export import tensorflow_files, tensorrt, triton_repository, verify
from common.export.export_graph import Exportable
from common.export.options import ExportArgs
from common.export.triton_repository import Placement
from common.files import user_errors, write_directory, write_file
from common.progress import counted, log
from common.weights import weight_files as weights
from common.weights.model_metadata import is_exported
from common.weights.trained import App, Detect

_CALIBRATION_BATCH = 4

OpenLoader = Callable[..., BaseLoader]  # called as f(pipeline_type, source=, batch_size=)


def export(
    app: App,
    options: ExportArgs,
    make_exportable: Callable[[keras.Model, Any], Exportable],
    make_loader: OpenLoader,
    placement: Callable[[Any], Placement],
    nms_method: str,
) -> pathlib.Path:
    """Writes the exported file, compares it with the weights, and returns its path.

    Args:
        make_exportable, make_loader, placement: the app's functions in export_parts.py and loaders.py.
        nms_method: the name of hard NMS, which is exported, in the app's config.

    Raises:
        UserError: flags exclude each other; images or a package are missing; the output cannot be written; or
            a float32 file gives other detections than the weights.
    """
    options.check()
    if options.format == "triton" and is_exported(pathlib.Path(options.weights or "")):
        return _wrap(app, options, placement)
    sources = _open_sources(options)  # before all that takes minutes
    share_gpu_memory()
    model, trained_config, label_map, weights_file = app.load(
        options.weights, options.image_size, options.hparams
    )
    config = dataclasses.replace(trained_config, nms_method=nms_method)
    parts = make_exportable(model, config)
    if sources.evaluation:
        check_labels(label_map, sources.evaluation)
    # GPUs round to TF32 by default. That is too inexact for the comparison.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    open_loader = functools.partial(make_loader, config=config, training=False, with_targets=False)
    metadata = weights.read_metadata(weights_file)
    metadata |= app.make_metadata(config, label_map, metadata["num_classes"])
    _write(parts, options, metadata, placement(config), sources.calibration, open_loader)
    hard = app.make_detect(model, config)
    log(f"comparing {options.verified_file} with the weights")
    compare = functools.partial(_compare, parts, options, hard, app.to_pixels, sources.images, open_loader)
    largest = compare(options.verified_file)
    if sources.evaluation:
        detectors = {"weights, hard NMS": hard}
        if config != trained_config:
            detectors["weights, NMS of the training"] = app.make_detect(model, trained_config)
        file = runtimes.make_detect(runtimes.open_runner(options.file), app.to_pixels)
        loader = functools.partial(open_loader, "auto", source=sources.evaluation, batch_size=8)
        _compare_ap(detectors | {str(options.file): file}, options.quantize, loader, label_map)
    if options.quantize == "none" and not largest <= verify.FLOAT_LIMIT:  # or NaN
        raise UserError(
            f"{options.verified_file} is written, but its outputs differ from the model by {largest:.1e} > "
            f"{verify.FLOAT_LIMIT:g}. This can be rounding if the network trained for only a few epochs: use "
            "the file only if --verify_annotations shows the same AP"
        )
    if options.format == "tensorrt":
        tensorrt.build(options.verified_file, options.file, parts.image_size)
        compare(options.file)
    return _report(options.file)


def _report(file: pathlib.Path) -> pathlib.Path:
    size = sum(each.stat().st_size for each in [file, *file.rglob("*")] if each.is_file())
    print(f"wrote {file} ({size / 2**20:.1f} MiB)")
    return file


def _wrap(app: App, options: ExportArgs, placement: Callable[[Any], Placement]) -> pathlib.Path:
    """Writes a Triton repository with an .onnx or .plan file that was exported before."""
    model = pathlib.Path(options.weights or "")
    if model.suffix not in (".onnx", ".plan"):
        raise UserError(f"--format=triton takes weights, or an .onnx or .plan file, not --weights={model}")
    config, metadata = read_exported(app, model, options.image_size, options.hparams)
    for flag, default in (("quantize", "none"), ("calibration_images", None), ("verify_images", None)):
        if (value := getattr(options, flag)) != default:
            raise UserError(
                f"--{flag}={value} has no effect on {model}: it is already exported; omit the flag"
            )
    write_model = functools.partial(shutil.copyfile, model)
    _write_repository(options, model.suffix, write_model, placement(config), metadata)
    return _report(options.file)


def _write_repository(options: ExportArgs, *arguments: Any) -> None:
    """Writes a Triton repository; `arguments` are those of triton_repository.write."""
    with user_errors(f"--output={options.output} cannot be written"):
        options.file.parent.mkdir(parents=True, exist_ok=True)
        write_directory(options.file, lambda path: triton_repository.write(path, *arguments))


class _Sources(NamedTuple):
    """The images of export.py's flags; None for each flag that is not given."""

    calibration: Source | None
    images: Source | None
    evaluation: Source | None


def _open_sources(options: ExportArgs) -> _Sources:
    policy = ImagePolicy(options.on_bad_image, options.max_megapixels)
    calibration, images = (
        open_images(value, policy, f"--{name}") if (value := getattr(options, name)) else None
        for name in ("calibration_images", "verify_images")
    )
    evaluation = None
    if truth := options.verify_annotations:
        evaluation = open_source(options.verify_images, truth, policy=policy, split="verify")
    return _Sources(calibration, images, evaluation)


def _write(
    parts: Exportable,
    options: ExportArgs,
    metadata: dict[str, Any],
    placement: Placement,
    calibration: Source | None,
    open_loader: OpenLoader,
) -> None:
    output = options.file
    is_saved_model = options.format == "saved_model"
    if options.format == "tensorrt":
        output.unlink(missing_ok=True)  # it would not belong to the new ONNX file beside it
    log(f"writing {options.verified_file}")
    export_facts = {
        "format": options.format,
        "quantize": options.quantize,
        "nms": options.suppression,
        "image_size": parts.image_size,
        "inputs": "images: uint8 RGB; image_sizes: int32, heights and widths of the originals",
        "boxes": "left, top, right, bottom in pixels of the original image",
        "classes": "0-based, in the order of label_map; -1 in the padding",
    }
    options_of_writer: dict[str, Any] = {
        "nms": options.suppression,
        "metadata": metadata | {"export": export_facts},
    }
    try:
        if is_saved_model:
            writer = tensorflow_files.write_saved_model
        elif options.format == "litert":
            writer = functools.partial(tensorflow_files.write_litert, quantize=options.quantize)
        else:
            from common.export import onnx_file

            writer = functools.partial(
                onnx_file.write, quantize=_quantizer(options, calibration, open_loader)
            )
        if options.format == "triton":
            write_model = functools.partial(writer, parts, **options_of_writer)
            _write_repository(options, ".onnx", write_model, placement, metadata)
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        write = write_directory if is_saved_model else write_file
        write(options.verified_file, lambda path: writer(parts, path, **options_of_writer))
    except OSError as error:
        raise UserError(f"--output={options.output} cannot be written: {error.strerror or error}") from error


def _quantizer(options: ExportArgs, calibration: Source | None, open_loader: OpenLoader) -> Callable | None:
    from common.export import quantization

    if options.quantize == "fp16":
        return quantization.to_fp16
    if not calibration:
        return None
    loader = open_loader("auto", source=calibration, batch_size=_CALIBRATION_BATCH)
    log(f"measuring the ranges of activations on {counted(loader.size, 'image')}")
    batches = (np.asarray(images) for images, _ in verify.batches(loader))
    return functools.partial(quantization.to_int8, batches=batches, tensorrt=options.format == "tensorrt")


def _compare(
    parts: Exportable,
    options: ExportArgs,
    detect: Detect,
    to_pixels: verify.ToPixels,
    images: Source | None,
    open_loader: OpenLoader,
    file: pathlib.Path,
) -> float:
    """Compares a file with the weights on `images`, or else on drawn images.

    Prints and returns the largest difference.

    A file that only TensorRT can run is not compared; the result is 0.
    """
    if options.suppression == "efficientnms_trt" and file.suffix == ".onnx":
        print(f"{file} is not compared with the weights: only TensorRT runs its plugin")
        return 0.0
    run = runtimes.open_runner(file)
    with tempfile.TemporaryDirectory() as folder:
        if not images:
            verify.draw_images(pathlib.Path(folder))
        source = images or open_images(folder)
        loader = open_loader("auto", source=source, batch_size=1)
        if options.suppression == "none":
            largest = verify.largest_raw_difference(parts, run, to_pixels, loader)
        else:
            largest = verify.largest_difference(parts, detect, run, to_pixels, loader)
    what = "largest difference from the weights, in scores or in box coordinates / image size"
    print(f"{file.name}: {what}: {largest:.1e} ({source.size} images)")
    return largest


def _compare_ap(
    detectors: dict[str, Detect], quantize: str, open_loader: Callable[[], BaseLoader], label_map: LabelMap
) -> None:
    aps = []
    for name, detect in detectors.items():
        aps.append(evaluate(detect, open_loader(), label_map).metrics["AP"])
        print(f"AP {100 * aps[-1]:.2f}  {name}")
    limit, apart = verify.AP_LIMITS.get(quantize), abs(aps[0] - aps[-1])
    if limit and apart > limit:
        print(f"AP differs by {100 * apart:.2f}: MORE than the limit of {100 * limit:g}")
