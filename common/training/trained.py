"""Opens what was trained: a weights file, a run directory, or a file that export.py wrote."""

import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from common import hparams
from common.errors import UserError
from common.evaluation import exported
from common.evaluation.evaluate import Detect, Detector
from common.labels import LabelMap
from common.training import model_metadata, weights


class App(NamedTuple):
    """The parts of an app that a trained network needs.

    Attributes:
        name: as metadata hold it.
        config_class: the app's config, a dataclass.
        detection_fields: fields of the config that do not change what was trained.
        build_model: (model name, number of classes, config) -> the network.
        make_metadata: of model_metadata.py.
        make_detect: (network, config) -> a compiled function for evaluate.predict.
        to_pixels: images of the evaluation loader -> uint8.
        converter: the command that makes a weights file of published weights.
    """

    name: str
    config_class: type
    detection_fields: Collection[str]
    build_model: Callable[..., keras.Model]
    make_metadata: Callable[..., dict[str, Any]]
    make_detect: Callable[[keras.Model, Any], Detect]
    to_pixels: Callable[[tf.Tensor], tf.Tensor]
    converter: str


class Trained(NamedTuple):
    """What `load` returns; `file` is the weights file that was read."""

    model: keras.Model
    config: Any
    label_map: LabelMap
    file: pathlib.Path


def load(
    app: App,
    path: str | None,
    image_size: str | None = None,
    hparams_spec: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Trained:
    """The model that weights were saved from, with them in it.

    Args:
        app: the app's parts.
        path: a `.weights.h5` file of this project, or a run directory.
        image_size: N or HxW to run it at another size.
        hparams_spec: how to detect, for example `nms_method=hard`; what was trained cannot change any more.
        defaults: fields of the config to use instead of the trained ones where `hparams_spec` has none.

    Raises:
        UserError: there is no such file, it is damaged or not of this app, or cannot be changed like this.
    """
    if not path:
        raise UserError("--weights is missing: name a .weights.h5 file or a run directory")
    file = weights.find(path)
    if file.suffix != ".h5":
        raise UserError(
            f"weights {file} are not a .weights.h5 file; convert published weights with {app.converter}"
        )
    metadata = weights.read_metadata(file)
    config = _read_config(app, metadata, file)
    if defaults:
        config = hparams.replace(config, defaults)
        metadata["config"] |= defaults  # they are not differences to report
    if image_size:
        config = hparams.replace(config, {"image_size": hparams.parse_image_size(image_size)})
    config = hparams.override(config, hparams_spec, only=app.detection_fields)
    model = app.build_model(config.model_name, metadata["num_classes"], config=config)
    weights.load(model, file)
    label_map = LabelMap.from_json(metadata["label_map"])
    now = app.make_metadata(config, label_map, metadata["num_classes"])
    model_metadata.explain(metadata, now, f"{file} runs otherwise than it was saved")
    return Trained(model, config, label_map, file)


def open_detector(
    app: App,
    path: str | None,
    image_size: str | None = None,
    hparams_spec: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Detector:
    """A detector for the evaluation loader; arguments and errors are those of `load`.

    `path` may also be an exported saved_model directory, .onnx or .tflite file, whose size, config and
    suppression cannot change any more: `defaults` do not concern it.
    """
    file = pathlib.Path(path or "")
    if file.suffix not in (".onnx", ".tflite") and not (file / "saved_model.pb").is_file():
        model, config, label_map, file = load(app, path, image_size, hparams_spec, defaults)
        return Detector(app.make_detect(model, config), config, label_map, file)
    metadata = model_metadata.read(file)
    config = _read_config(app, metadata, file)
    for flag, value in (("image_size", image_size), ("hparams", hparams_spec)):
        if value:
            raise UserError(f"--{flag}={value} cannot change {file}: export the weights again with it")
    nms = metadata.get("export", {}).get("nms")
    if nms != "standard":
        raise UserError(
            f"{file} was exported with --nms={nms} and gives no detections here: export it with "
            "--nms=standard"
        )
    detect = exported.make_detect(exported.open_runner(file), app.to_pixels)
    return Detector(detect, config, LabelMap.from_json(metadata["label_map"]), file)


def _read_config(app: App, metadata: Mapping[str, Any], file: pathlib.Path) -> Any:
    """The config that a file was saved with; UserError where another app saved it."""
    if metadata.get("app") != app.name:
        raise UserError(f"{file} was saved by {metadata.get('app')!r}, not by {app.name}")
    return hparams.from_json(app.config_class, metadata["config"])
