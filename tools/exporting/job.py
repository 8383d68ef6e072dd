"""One export from weights to a checked file: what both apps' export.py do with their own parts."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from common.datacheck.open_data import check_labels, open_images, open_source
from common.errors import UserError
from common.evaluation import exported as runtimes
from common.evaluation.evaluate import Detect, evaluate
from common.files import write_directory, write_file
from common.labels import LabelMap
from common.loading import Loader
from common.progress import log
from common.sources import Source
from tools import synthetic
from tools.exporting import calibration, check, fp16, litert, onnx_file, saved_model, tensorrt
from tools.exporting import export_graph as parts_lib
from tools.exporting.export_graph import Exportable
from tools.exporting.options import Options

DRAWN_IMAGES = 8  # for comparison where the user names none
_CALIBRATION_BATCH = 4


class Trained(NamedTuple):
    """What an app has to say about the weights that are exported.

    Attributes:
        parts: see tools/exporting/export_graph.py.
        detect: of the weights themselves, with the suppression that is exported.
        trained_detect: with the suppression that was trained; None where it is the same.
        make_loader: evaluation loader of (source, pipeline_type, batch_size).
        to_pixels: images of that loader -> uint8.
        label_map: of the trained classes.
        passport: of the weights, with the config that is exported.
    """

    parts: Exportable
    detect: Detect
    trained_detect: Detect | None
    make_loader: Callable[[Source, str, int], Loader]
    to_pixels: Callable[[tf.Tensor], tf.Tensor]
    label_map: LabelMap
    passport: dict[str, Any]


def export(
    trained: Trained, options: Options, verify_images: str | None, verify_annotations: str | None
) -> pathlib.Path:
    """Writes the file and checks it. Results go to stdout.

    Raises:
        UserError: images are missing, the output cannot be written, a package is missing; or a file of
            float32 finds something else than the weights: it stays, but no engine is built from it.
    """
    _check_output(options)
    evaluation = _open_evaluation(trained, verify_images, verify_annotations)
    # TensorFlow's default on recent GPUs rounds to 10 bits, and the comparison would measure that
    tf.config.experimental.enable_tensor_float_32_execution(False)
    _write(trained, options)
    with _images(verify_images) as images:
        largest = _compare(trained, options, images)
    if evaluation:
        _compare_ap(trained, options, evaluation)
    if options.quantize == "none" and not largest <= check.FLOAT_LIMIT:  # NaN is too far, too
        raise UserError(
            f"{_compared_file(options)} is written, but differs from the weights by {largest:.1e}, more than "
            f"{check.FLOAT_LIMIT:g}. A network of a few epochs may, by rounding; trust it only if "
            "--verify_annotations shows the same AP"
        )
    if options.format == "tensorrt":
        tensorrt.build(options.onnx_file, options.output, trained.parts.image_size, options.quantize)
    print(f"wrote {options.output} ({_size(options.output) / 2**20:.1f} MiB)")
    return options.output


def _check_output(options: Options) -> None:
    output = options.output
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output={output}: {error.strerror}") from error
    is_saved_model = (output / "saved_model.pb").is_file()
    if options.format == "saved_model" and output.exists() and not is_saved_model:
        raise UserError(f"--output={output} is there and is no saved_model: name a new directory")
    if options.format != "saved_model" and output.is_dir():
        raise UserError(f"--output={output} is a directory: name a file")


def _open_evaluation(trained: Trained, images: str | None, annotations: str | None) -> Source | None:
    if not annotations:
        return None
    source = open_source(images, annotations, split="verify")
    check_labels(trained.label_map, source)
    return source


def _write(trained: Trained, options: Options) -> None:
    parts, about = trained.parts, _passport(trained, options)
    log(f"writing {_compared_file(options)}")
    common = {"nms": options.nms, "passport": about}
    try:
        if options.format == "saved_model":
            write_directory(options.output, lambda path: saved_model.write(parts, path, **common))
        elif options.format == "litert":
            write_file(
                options.output,
                lambda path: litert.write(parts, path, quantize=options.quantize, **common),
            )
        else:
            quantizer = _quantizer(trained, options)
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


def _passport(trained: Trained, options: Options) -> str:
    facts = {
        "format": options.format,
        "quantize": options.quantize,
        "nms": options.nms,
        "image_size": trained.parts.image_size,
        "inputs": "images: uint8 RGB; image_sizes: int32, heights and widths of the originals",
        "boxes": "left, top, right, bottom in pixels of the original image",
        "classes": "0-based, in the order of label_map; -1 in the padding",
    }
    if options.format in ("onnx", "tensorrt"):
        facts["opset"] = options.opset
    return json.dumps(trained.passport | {"export": facts})


def _quantizer(trained: Trained, options: Options) -> onnx_file.Quantizer | None:
    if options.quantize == "fp16" and options.format == "onnx":
        return fp16.quantize
    if not options.needs_calibration:
        return None  # TensorRT itself makes FP16
    symmetric = options.format == "tensorrt"
    if options.calibration_table.exists():
        return calibration.make_quantizer(iter(()), 0, options.calibration_table, symmetric=symmetric)
    loader = trained.make_loader(open_images(options.calibration_images), "auto", _CALIBRATION_BATCH)
    log(f"measuring ranges on {loader.size} images")
    arrays = (np.asarray(images) for images, _ in check.batches(loader))
    return calibration.make_quantizer(
        arrays, loader.steps_per_epoch, options.calibration_table, symmetric=symmetric
    )


@contextlib.contextmanager
def _images(verify_images: str | None) -> Iterator[Source]:
    """The images to compare on."""
    if verify_images:
        yield open_images(verify_images)
        return
    with tempfile.TemporaryDirectory() as folder:
        synthetic.draw_dataset(folder, DRAWN_IMAGES, seed=0)
        yield open_images(f"{folder}/images")


def _compared_file(options: Options) -> pathlib.Path:
    return options.onnx_file if options.format == "tensorrt" else options.output


def _compare(trained: Trained, options: Options, source: Source) -> float:
    """Prints and returns the largest difference from the weights; 0 where nothing here runs the file."""
    file = _compared_file(options)
    if options.nms == "efficientnms_trt":
        print(f"{file} is not compared with the weights: only TensorRT runs its plugin")
        return 0.0
    run = runtimes.open_runner(file)
    loader = trained.make_loader(source, "tensorflow", 1)
    if options.nms == "none":
        largest, count = check.largest_raw_difference(_raw_of(trained), run, trained.to_pixels, loader)
    else:
        exported = runtimes.make_detect(run, trained.to_pixels)
        largest, count = check.largest_difference(
            trained.detect, exported, loader, trained.parts.max_detections
        )
    print(
        f"largest difference from the weights, of scores and of boxes as shares of the image: {largest:.1e} "
        f"({count} boxes in {source.size} images)"
    )
    return largest


def _raw_of(trained: Trained) -> runtimes.Run:
    detect = tf.function(lambda *given: parts_lib.detect_raw(trained.parts, *given), reduce_retracing=True)
    return lambda *given: {k: v.numpy() for k, v in detect(*map(tf.constant, given)).items()}


def _compare_ap(trained: Trained, options: Options, source: Source) -> None:
    """Prints AP of the weights and of the exported file."""
    run = runtimes.open_runner(options.output)
    detectors = {
        "weights, as they detect in training": trained.trained_detect,
        "weights, hard suppression": trained.detect,
        f"{options.output}": runtimes.make_detect(run, trained.to_pixels),
    }
    ap = {}
    for name, detect in detectors.items():
        if detect:
            loader = trained.make_loader(source, "auto", 8)
            ap[name] = evaluate(detect, loader, source, trained.label_map).metrics["AP"]
            print(f"AP {ap[name]:.4f}  {name}")
    *_, ours, theirs = ap.values()
    limit = {"none": check.AP_LIMIT, "int8": check.INT8_AP_LIMIT}.get(options.quantize)
    if limit and abs(ours - theirs) > limit:
        print(f"AP differs by {abs(ours - theirs):.4f}: MORE than {limit:g}")


def _size(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
