"""Runs exported files: saved_model by TensorFlow, .onnx by ONNX Runtime, .tflite by LiteRT.

run = open_runner(pathlib.Path("detector.onnx"))
found = run(images, image_sizes)  # boxes, scores, classes, count: tools/exporting/export_graph.py, detect
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from common.errors import UserError

Found = dict[str, np.ndarray]
Run = Callable[[np.ndarray, np.ndarray], Found]  # images uint8 (B, H, W, 3), image_sizes int32 (B, 2)

RESIZED = "resized"  # the signature of a saved_model for images at their places in the network input


def open_runner(path: pathlib.Path) -> Run:
    """A function that runs the exported detector.

    Raises:
        UserError: the file is damaged, or the package that runs it is missing.
    """
    try:
        if path.is_dir():
            return _open_saved_model(path)
        return _open_onnx(path) if path.suffix == ".onnx" else _open_litert(path)
    except ImportError as error:
        package = (error.name or "").partition(".")[0].replace("_", "-")
        missing = f"the package {package}: pip install {package}" if package else f"a package: {error}"
        raise UserError(f"running {path} needs {missing}") from error
    except Exception as error:  # the packages raise many classes for damaged files
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} cannot be opened, export it again: {reason}") from error


def make_detect(run: Run, to_pixels: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., tuple]:
    """An exported detector as a function for common.evaluation.evaluate.

    Its second input is the size of the original, from which it computes the place of the image in the network
    input. The size of that place, given as the size of the original, gives boxes in pixels of the place.

    Args:
        run: of `open_runner`.
        to_pixels: images of the app's loader, normalised -> uint8.
    """

    def detect(images: tf.Tensor, letterbox: tf.Tensor) -> tuple[np.ndarray, ...]:
        sizes = np.asarray(letterbox)[:, 2:].astype(np.int32)
        found = run(np.asarray(to_pixels(images)), sizes)
        boxes = found["boxes"] / sizes[:, np.newaxis, [1, 0, 1, 0]].astype(np.float32)
        # The file turns output that is not finite into no detection and does not return it.
        return boxes, found["scores"], found["classes"], np.ones(len(sizes), bool)

    return detect


def _open_saved_model(path: pathlib.Path) -> Run:
    loaded = tf.saved_model.load(str(path))
    function = loaded.signatures[RESIZED]

    # The default keeps `loaded`, and with it the variables, as long as the function.
    def run(images: np.ndarray, image_sizes: np.ndarray, _kept: Any = loaded) -> Found:
        found = function(images=tf.constant(images), image_sizes=tf.constant(image_sizes))
        return {name: value.numpy() for name, value in found.items()}

    return run


def _open_onnx(path: pathlib.Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=onnxruntime.get_available_providers())
    names = [output.name for output in session.get_outputs()]

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Found:
        found = session.run(names, {"images": images, "image_sizes": image_sizes})
        return dict(zip(names, found, strict=True))

    return run


def _open_litert(path: pathlib.Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=os.cpu_count())
    function = interpreter.get_signature_runner()

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Found:
        found = []
        for i in range(len(images)):
            one = function(images=images[i : i + 1], image_sizes=image_sizes[i : i + 1])
            found.append({name: value.copy() for name, value in one.items()})
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    return run
