"""A trained detector, from a weights file or an exported file, as eval.py and infer.py use it."""

import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from common import hparams
from common.errors import UserError
from common.evaluation import exported
from common.evaluation.evaluate import Detect
from common.labels import LabelMap

Config = TypeVar("Config")


class Detector(NamedTuple):
    """What each app's `open_detector` returns.

    Attributes:
        detect: from a batch of the evaluation loader to detections, as `evaluate.predict` takes it.
        config: the app's, with the image size and the NMS that `detect` has: what make_loader takes.
        label_map: of the trained classes.
        file: what was read: a weights file, a file of an exported format, or a saved_model directory.
    """

    detect: Detect
    config: Any
    label_map: LabelMap
    file: pathlib.Path

    @property
    def results_directory(self) -> pathlib.Path:
        """Where evaluation writes by default: the run directory; beside an exported file."""
        if exported.is_exported(self.file):
            return self.file.with_name(f"{self.file.name}.eval")
        return self.file.parent


def read_config(
    metadata: Mapping[str, Any], file: pathlib.Path, app: str, config_class: type[Config]
) -> Config:
    """The config that a file was saved with; UserError where another app saved it."""
    if metadata.get("app") != app:
        raise UserError(f"{file} was saved by {metadata.get('app')!r}, not by {app}")
    return hparams.from_json(config_class, metadata["config"])


def change_config(
    config: Config, image_size: str | None, hparams_spec: str | None, allowed: Collection[str]
) -> Config:
    """A trained config with another image size and other ways to detect.

    Args:
        config: of the weights.
        image_size: --image_size: N or HxW.
        hparams_spec: --hparams, for example `nms_method=hard`.
        allowed: fields that do not change what was trained.

    Raises:
        UserError: any other field is to be changed, or a value is invalid.
    """
    if image_size:
        config = hparams.replace(config, {"image_size": hparams.parse_image_size(image_size)})
    return hparams.override(config, hparams_spec, only=allowed)


def open_exported(
    path: pathlib.Path,
    metadata: Mapping[str, Any],
    config: Any,
    to_pixels: Callable[[tf.Tensor], tf.Tensor],
    image_size: str | None,
    hparams_spec: str | None,
) -> Detector:
    """A file that export.py wrote, behind the evaluation loader.

    Args:
        path: a saved_model directory, an .onnx or a .tflite file.
        metadata: of the file.
        config: what `read_config` returned.
        to_pixels: images of the app's loader -> uint8.
        image_size, hparams_spec: what the user wants changed, which an exported file does not allow.

    Raises:
        UserError: it is damaged, has no NMS, or is to be changed.
    """
    for flag, value in (("image_size", image_size), ("hparams", hparams_spec)):
        if value:
            raise UserError(f"--{flag}={value} cannot change {path}: export the weights again with it")
    nms = metadata.get("export", {}).get("nms")
    if nms != "standard":
        raise UserError(
            f"{path} was exported with --nms={nms} and gives no detections here: export it with "
            "--nms=standard"
        )
    detect = exported.make_detect(exported.open_runner(path), to_pixels)
    return Detector(detect, config, LabelMap.from_json(metadata["label_map"]), path)
