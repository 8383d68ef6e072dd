"""One export from weights to a checked file: the shared part of both apps' export.py."""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from common import devices
from common.datacheck.open_data import check_labels, open_images, open_source
from common.errors import UserError
from common.evaluation import exported as runtimes
from common.evaluation.evaluate import Detect, evaluate
from common.files import write_directory, write_file
from common.labels import LabelMap
from common.loader import BaseLoader
from common.progress import log
from common.sources import Source
from common.training import weights
from common.training.model_metadata import App
from tools import synthetic
from tools.exporting import export_graph, litert, onnx_file, quantization, saved_model, tensorrt, verify
from tools.exporting.export_graph import Exportable
from tools.exporting.options import Options

DRAWN_IMAGES = 8  # for comparison where the user names none
_CALIBRATION_BATCH = 4


class Network(NamedTuple):
    """The weights that are exported.

    Attributes:
        parts: see tools/exporting/export_graph.py.
        detectors: detection by the weights: "exported" and "trained" suppression, where they differ.
        make_loader: evaluation loader of (source, pipeline_type, batch_size).
        to_pixels: images of that loader -> uint8.
        label_map: of the trained classes.
        metadata: of the weights, with the config that is exported.
    """

    parts: Exportable
    detectors: dict[str, Detect]
    make_loader: Callable[[Source, str, int], BaseLoader]
    to_pixels: Callable[[tf.Tensor], tf.Tensor]
    label_map: LabelMap
    metadata: dict[str, Any]


def export(
    app: App,
    options: Options,
    make_exportable: Callable[[keras.Model, Any], Exportable],
    make_loader: Callable[..., BaseLoader],
    nms_method: str,
) -> pathlib.Path:
    """Writes the file and compares it with the weights. Results go to stdout.

    Args:
        app: of predict.py.
        options: the flags.
        make_exportable: of export_parts.py.
        make_loader: of loaders.py.
        nms_method: the app's name of the NMS that is exported.

    Returns:
        The file or directory that was written.

    Raises:
        UserError: flags that exclude each other; images are missing, the output cannot be written, a package
            is missing; or a float32 file differs from the weights: it stays, but no engine is built from it.
    """
    options.check()
    devices.share_gpu_memory()
    network = _load(app, options, make_exportable, make_loader, nms_method)
    _check_output(options)
    evaluation = None
    if options.verify_annotations:
        evaluation = open_source(options.verify_images, options.verify_annotations, split="verify")
        check_labels(network.label_map, evaluation)
    # TensorFlow's default on recent GPUs rounds to 10 bits, and the comparison would measure that
    tf.config.experimental.enable_tensor_float_32_execution(False)
    _write(network, options)
    with _images(options.verify_images) as images:
        largest = _compare(network, options, images)
    if evaluation:
        _compare_ap(network, options, evaluation)
    if options.quantize == "none" and not largest <= verify.FLOAT_LIMIT:  # NaN is too far, too
        raise UserError(
            f"{options.verified_file} is written, but differs from the weights by {largest:.1e}, more than "
            f"{verify.FLOAT_LIMIT:g}. A network of a few epochs may, by rounding; trust it only if "
            "--verify_annotations shows the same AP"
        )
    output = options.file
    if options.format == "tensorrt":
        tensorrt.build(options.onnx_file, output, network.parts.image_size, options.quantize)
    size = sum(file.stat().st_size for file in [output, *output.rglob("*")] if file.is_file())
    print(f"wrote {output} ({size / 2**20:.1f} MiB)")
    return output


def _load(
    app: App,
    options: Options,
    make_exportable: Callable[[keras.Model, Any], Exportable],
    make_app_loader: Callable[..., BaseLoader],
    nms_method: str,
) -> Network:
    """The trained network of --weights."""
    model, trained_config, label_map, file = app.load(options.weights, options.image_size, options.hparams)
    config = dataclasses.replace(trained_config, nms_method=nms_method)
    given = {"config": config, "training": False, "with_targets": False}
    detectors = {"exported": app.make_detect(model, config)}
    if config != trained_config:
        detectors["trained"] = app.make_detect(model, trained_config)
    metadata = weights.read_metadata(file)
    return Network(
        parts=make_exportable(model, config),
        detectors=detectors,
        make_loader=lambda source, pipeline_type, batch_size: make_app_loader(
            pipeline_type, source=source, batch_size=batch_size, **given
        ),
        to_pixels=app.to_pixels,
        label_map=label_map,
        metadata=metadata | app.make_metadata(config, label_map, metadata["num_classes"]),
    )


def _check_output(options: Options) -> None:
    output = options.file
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output={output}: {error.strerror}") from error
    is_saved_model = (output / "saved_model.pb").is_file()
    if options.format == "saved_model" and output.exists() and not is_saved_model:
        raise UserError(f"--output={output} exists and is not a saved_model: name a new directory")
    if options.format != "saved_model" and output.is_dir():
        raise UserError(f"--output={output} is a directory: name a file")


def _write(network: Network, options: Options) -> None:
    log(f"writing {options.verified_file}")
    common = {"nms": options.suppression, "metadata": _metadata(network, options)}
    parts = network.parts
    try:
        if options.format == "saved_model":
            write_directory(options.file, lambda path: saved_model.write(parts, path, **common))
        elif options.format == "litert":
            write_file(
                options.file,
                lambda path: litert.write(parts, path, quantize=options.quantize, **common),
            )
        else:
            quantizer = _quantizer(network, options)
            write_file(
                options.onnx_file,
                lambda path: onnx_file.write(parts, path, opset=options.opset, quantizer=quantizer, **common),
            )
    except ImportError as error:
        raise UserError(
            f"--format={options.format} needs the package {error.name}: pip install '.[export]'"
        ) from error
    except OSError as error:
        raise UserError(f"--output={options.output}: {error.strerror or error}") from error


def _metadata(network: Network, options: Options) -> dict[str, Any]:
    about = {
        "format": options.format,
        "quantize": options.quantize,
        "nms": options.suppression,
        "image_size": network.parts.image_size,
        "inputs": "images: uint8 RGB; image_sizes: int32, heights and widths of the originals",
        "boxes": "left, top, right, bottom in pixels of the original image",
        "classes": "0-based, in the order of label_map; -1 in the padding",
    }
    if options.format in ("onnx", "tensorrt"):
        about["opset"] = options.opset
    return network.metadata | {"export": about}


def _quantizer(network: Network, options: Options) -> onnx_file.Quantizer | None:
    if options.quantize == "fp16" and options.format == "onnx":
        return quantization.to_fp16
    if not options.needs_calibration:
        return None  # TensorRT itself makes FP16
    batches, count = iter(()), 0
    if not options.table.exists():
        loader = network.make_loader(open_images(options.calibration_images), "auto", _CALIBRATION_BATCH)
        log(f"measuring ranges on {loader.size} images")
        batches, count = (np.asarray(images) for images, _ in verify.batches(loader)), loader.steps_per_epoch
    return quantization.make_int8(batches, count, options.table, symmetric=options.format == "tensorrt")


@contextlib.contextmanager
def _images(verify_images: str | None) -> Iterator[Source]:
    """The images to compare on."""
    if verify_images:
        yield open_images(verify_images)
        return
    with tempfile.TemporaryDirectory() as folder:
        synthetic.draw_dataset(folder, DRAWN_IMAGES, seed=0)
        yield open_images(f"{folder}/images")


def _compare(network: Network, options: Options, source: Source) -> float:
    """Prints and returns the largest difference from the weights; 0 where nothing here runs the file."""
    file = options.verified_file
    if options.suppression == "efficientnms_trt":
        print(f"{file} is not compared with the weights: only TensorRT runs its plugin")
        return 0.0
    run = runtimes.open_runner(file)
    loader = network.make_loader(source, "tensorflow", 1)
    if options.suppression == "none":
        largest, count = verify.largest_raw_difference(_raw_of(network), run, network.to_pixels, loader)
    else:
        exported = runtimes.make_detect(run, network.to_pixels)
        largest, count = verify.largest_difference(
            network.detectors["exported"], exported, loader, network.parts.max_detections
        )
    print(
        f"largest difference from the weights, of scores and of boxes as shares of the image: {largest:.1e} "
        f"({count} boxes in {source.size} images)"
    )
    return largest


def _raw_of(network: Network) -> runtimes.Run:
    """The weights without suppression, as a function like that of an exported file."""
    detect = tf.function(lambda *given: export_graph.detect_raw(network.parts, *given), reduce_retracing=True)
    return lambda *given: {name: value.numpy() for name, value in detect(*map(tf.constant, given)).items()}


def _compare_ap(network: Network, options: Options, source: Source) -> None:
    """Prints AP of the weights and of the exported file."""
    run = runtimes.open_runner(options.file)
    detectors = {
        "weights, as they detect in training": network.detectors.get("trained"),
        "weights, hard suppression": network.detectors["exported"],
        str(options.file): runtimes.make_detect(run, network.to_pixels),
    }
    ap = {}
    for name, detect in detectors.items():
        if detect:
            loader = network.make_loader(source, "auto", 8)
            ap[name] = evaluate(detect, loader, source, network.label_map).metrics["AP"]
            print(f"AP {ap[name]:.4f}  {name}")
    *_, by_weights, by_file = ap.values()
    limit = verify.AP_LIMITS.get(options.quantize)
    if limit and abs(by_weights - by_file) > limit:
        print(f"AP differs by {abs(by_weights - by_file):.4f}: MORE than {limit:g}")
