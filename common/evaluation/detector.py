"""A trained detector, opened from whatever file holds it: what eval.py and infer.py work with."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from common import hparams
from common.errors import UserError
from common.evaluation import exported
from common.evaluation.evaluate import Detect
from common.labels import LabelMap
from common.training import metadata_files


class Detector(NamedTuple):
    """What each app's `open_detector` returns, the same for weights of ours and for exported files.

    Attributes:
        detect: from a batch of the evaluation loader to detections, as `evaluate.predict` takes it.
        config: the app's, as it was trained, with the image size and the suppression that `detect` has: what
            make_loader takes.
        label_map: of the trained classes.
        file: what was read: a weights file, a file of an exported format, or a saved_model directory.
        metadata: what the file says about itself: app, config, num_classes, label_map, ...
    """

    detect: Detect
    config: Any
    label_map: LabelMap
    file: pathlib.Path
    metadata: dict[str, Any]

    @property
    def results_directory(self) -> pathlib.Path:
        """Where evaluation writes by default: the run directory; beside an exported file."""
        if exported.is_exported(self.file):
            return self.file.with_name(f"{self.file.name}.eval")
        return self.file.parent


def open_exported(
    path: pathlib.Path,
    *,
    app: str,
    config_class: type,
    to_pixels: Callable[[tf.Tensor], tf.Tensor],
    image_size: str | None,
    hparams_spec: str | None,
) -> Detector:
    """A file that export.py wrote, behind the evaluation loader.

    Args:
        path: a saved_model directory, an .onnx or a .tflite file.
        app: whose it must be.
        config_class: of the app.
        to_pixels: images of the app's loader -> uint8.
        image_size, hparams_spec: what the user wants changed, which cannot be done.

    Raises:
        UserError: it is damaged, of the other app, without suppression, or cannot be changed like this.
    """
    metadata, _ = metadata_files.read(path)
    if metadata.get("app") != app or "export" not in metadata:
        raise UserError(f"{path} was exported by {metadata.get('app')!r}, not by {app}")
    for flag, value in (("image_size", image_size), ("hparams", hparams_spec)):
        if value:
            raise UserError(f"--{flag}={value} cannot change {path}: export the weights again with it")
    if metadata["export"]["nms"] != "standard":
        raise UserError(
            f"{path} was exported with --nms={metadata['export']['nms']} and gives no detections here: "
            "export it with --nms=standard"
        )
    detect = exported.make_detect(exported.open_runner(path), to_pixels)
    config = hparams.from_json(config_class, metadata["config"])
    return Detector(detect, config, LabelMap.from_json(metadata["label_map"]), path, metadata)
