"""The flags of export.py, and which of them go together. Imports neither TensorFlow nor DALI."""

import dataclasses
import pathlib
from typing import NamedTuple

from common.args import TrainedArgs, flag
from common.errors import UserError

QUANTIZE = ("none", "fp16", "int8")
NMS = ("standard", "efficientnms_trt", "none")


class Format(NamedTuple):
    """What a format can hold.

    Attributes:
        suffix: of its file; "" where it is a directory.
        quantize, nms: values of the two flags that it takes; the first of `nms` is the default.
        calibrates: whether int8 needs ranges that are measured on images.
    """

    suffix: str
    quantize: tuple[str, ...]
    nms: tuple[str, ...]
    calibrates: bool


FORMATS = {
    "saved_model": Format("", ("none",), ("standard", "none"), calibrates=False),
    "onnx": Format(".onnx", QUANTIZE, NMS, calibrates=True),
    "litert": Format(".tflite", QUANTIZE, ("standard", "none"), calibrates=False),
    "tensorrt": Format(".plan", QUANTIZE, ("efficientnms_trt", "standard", "none"), calibrates=True),
}


@dataclasses.dataclass(frozen=True)
class Options(TrainedArgs):
    """The flags, and what follows from their values. `check` insists on `format` and `output`."""

    format: str = flag(None, "Format of the exported file.", choices=tuple(FORMATS))
    output: str = flag(None, "Exported file; for saved_model a directory. An existing one is replaced.")
    quantize: str = flag(
        "none",
        "fp16: half the bytes. int8: a quarter; onnx and tensorrt measure ranges on --calibration_images.",
        choices=QUANTIZE,
    )
    calibration_images: str | None = flag(
        None, "Typical images for --quantize=int8: a directory or a glob; about a hundred."
    )
    nms: str | None = flag(
        None,
        "Suppression by standard operations, by TensorRT's plugin, or none: all boxes and scores come out. "
        "Default: the plugin for tensorrt, else standard.",
        choices=NMS,
    )
    verify_images: str | None = flag(
        None, "Images to compare the exported file with the weights on. Default: eight synthetic ones."
    )
    verify_annotations: str | None = flag(None, "COCO json of --verify_images: compares AP, too.")

    @property
    def file(self) -> pathlib.Path:
        return pathlib.Path(self.output)

    @property
    def verified_file(self) -> pathlib.Path:
        """The file that is compared with the weights: the output, or the ONNX file of an engine."""
        return self.file.with_suffix(".onnx") if self.format == "tensorrt" else self.file

    @property
    def needs_calibration(self) -> bool:
        return self.quantize == "int8" and FORMATS[self.format].calibrates

    @property
    def suppression(self) -> str:
        """--nms or its default."""
        return self.nms or FORMATS[self.format].nms[0]

    def check(self) -> None:
        """Raises a UserError where a flag is missing or two exclude each other."""
        if self.format not in FORMATS:
            raise UserError(f"--format={self.format}: it must be one of {', '.join(FORMATS)}")
        suffix, quantize, nms, _ = FORMATS[self.format]
        if not self.output or (suffix and self.file.suffix != suffix):
            place = f"a file that ends in {suffix}" if suffix else "a directory"
            raise UserError(f"--output={self.output}: name {place} for --format={self.format}")
        for name, value, known in (("quantize", self.quantize, quantize), ("nms", self.suppression, nms)):
            if value not in known:
                raise UserError(f"--{name}={value}: --format={self.format} has only {', '.join(known)}")
        if self.verify_annotations and not self.verify_images:
            raise UserError("--verify_annotations needs --verify_images, the directory of its images")
        if self.verify_annotations and (self.suppression != "standard" or self.format == "tensorrt"):
            raise UserError(
                "--verify_annotations needs detections that run here: not those of "
                f"--format={self.format} --nms={self.suppression}"
            )
        if self.needs_calibration and not self.calibration_images:
            raise UserError("--quantize=int8 needs --calibration_images: a directory of typical images")
        if self.calibration_images and not self.needs_calibration:
            raise UserError(
                f"nothing is calibrated for --format={self.format} --quantize={self.quantize}: drop the flag"
            )
