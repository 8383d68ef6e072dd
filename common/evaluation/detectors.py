"""Opens the detector that --weights of eval.py and infer.py names."""

import pathlib
from typing import Any, NamedTuple

from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import exported
from common.weights import model_metadata
from common.weights.trained import App, Detect


class Detector(NamedTuple):
    """A detector for the evaluation loader.

    Attributes:
        detect: the detection function.
        config: the app's config, with which the loader preprocesses images.
        label_map: the trained classes.
        file: the file that was read.
    """

    detect: Detect
    config: Any
    label_map: LabelMap
    file: pathlib.Path


def open_detector(
    app: App, path: str | None, image_size: str | None = None, spec: str | None = None, **defaults: Any
) -> Detector:
    """Opens a detector, with the arguments and errors of `App.load`.

    `path` may also be an exported model: a saved_model directory, or an .onnx, .tflite or .plan file. Its
    input size, config and NMS cannot change.
    """
    file = pathlib.Path(path or "")
    if not model_metadata.is_exported(file):
        model, config, label_map, file = app.load(path, image_size, spec, **defaults)
        return Detector(app.make_detect(model, config), config, label_map, file)
    config, metadata = read_exported(app, file, image_size, spec)
    detect = exported.make_detect(exported.open_runner(file), app.to_pixels)
    return Detector(detect, config, LabelMap.from_json(metadata["label_map"]), file)


def read_exported(
    app: App, file: pathlib.Path, image_size: str | None, spec: str | None
) -> tuple[Any, dict[str, Any]]:
    """Returns the config and the metadata of an exported model with NMS.

    Raises:
        UserError: the file is damaged, of another app or without NMS, or `image_size` or `spec` is given.
    """
    metadata = model_metadata.read(file)
    config = app.read_config(metadata, file)
    for flag, value in (("image_size", image_size), ("hparams", spec)):
        if value:
            raise UserError(f"--{flag}={value} has no effect on {file}: export it again with this flag")
    nms = metadata.get("export", {}).get("nms")
    if nms != "standard" and (nms, file.suffix) != ("efficientnms_trt", ".plan"):
        raise UserError(f"{file} was exported with --nms={nms}: export it again with --nms=standard")
    return config, metadata
