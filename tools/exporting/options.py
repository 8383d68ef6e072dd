"""The flags of export.py, and which of them go together. Imports neither TensorFlow nor DALI."""

import dataclasses
import pathlib

from common.args import TrainedArgs, flag
from common.errors import UserError, unknown

FORMATS = ("saved_model", "onnx", "litert", "tensorrt")
QUANTIZE = ("none", "fp16", "int8")
NMS = ("standard", "efficientnms_trt", "none")
OPSETS = (13, 18)  # 13: per-channel Q and DQ; 18 is the newest that tf2onnx 1.17 writes
OPSET = 17

_SUFFIX = {"onnx": ".onnx", "litert": ".tflite", "tensorrt": ".engine"}


@dataclasses.dataclass(frozen=True)
class Options(TrainedArgs):
    """The flags, and what follows from their values."""

    format: str | None = flag(None, "Format of the exported file.", choices=FORMATS)
    output: str | None = flag(
        None, "Exported file; for saved_model a directory. An existing one is replaced."
    )
    quantize: str = flag(
        "none",
        "fp16: half the bytes. int8: a quarter; onnx and tensorrt measure ranges on --calibration_images.",
        choices=QUANTIZE,
    )
    calibration_images: str | None = flag(
        None, "Typical images for --quantize=int8: a directory or a glob; about a hundred."
    )
    calibration_table: str | None = flag(
        None, "File of measured ranges: read where it exists, else written. Default: beside the output."
    )
    nms: str | None = flag(
        None,
        "Suppression by standard operations, by TensorRT's plugin, or none: all boxes and scores come out. "
        "Default: the plugin for tensorrt, else standard.",
        choices=NMS,
    )
    opset: int = flag(OPSET, "Version of ONNX's operators.", low=OPSETS[0], high=OPSETS[1])
    verify_images: str | None = flag(
        None, "Images to compare the exported file with the weights on. Default: eight drawn ones."
    )
    verify_annotations: str | None = flag(None, "COCO json of --verify_images: compares AP, too.")

    @property
    def file(self) -> pathlib.Path:
        return pathlib.Path(self.output)

    @property
    def onnx_file(self) -> pathlib.Path:
        """The ONNX file: the output, or the source of the engine."""
        return self.file if self.format == "onnx" else self.file.with_suffix(".onnx")

    @property
    def verified_file(self) -> pathlib.Path:
        """The file that is compared with the weights."""
        return self.onnx_file if self.format == "tensorrt" else self.file

    @property
    def table(self) -> pathlib.Path:
        """The calibration table."""
        return pathlib.Path(self.calibration_table or f"{self.output}.calibration.json")

    @property
    def needs_calibration(self) -> bool:
        return self.quantize == "int8" and self.format in ("onnx", "tensorrt")

    @property
    def suppression(self) -> str:
        """--nms or its default."""
        return self.nms or ("efficientnms_trt" if self.format == "tensorrt" else "standard")

    def check(self) -> None:
        """Raises a UserError where a flag is missing or two exclude each other."""
        if not self.format:
            raise UserError(f"--format is missing: one of {', '.join(FORMATS)}")
        if self.format not in FORMATS:
            raise unknown("format", self.format, FORMATS)
        if not self.output:
            raise UserError("--output is missing: name the file to write, or for saved_model the directory")
        if self.format in _SUFFIX and self.file.suffix != _SUFFIX[self.format]:
            suffix = _SUFFIX[self.format]
            raise UserError(f"--output={self.output}: a file of --format={self.format} ends in {suffix}")
        if self.format == "saved_model" and self.quantize != "none":
            raise UserError(
                f"--quantize={self.quantize}: a saved_model keeps float32; use --format=onnx or litert"
            )
        if self.suppression == "efficientnms_trt" and self.format not in ("onnx", "tensorrt"):
            raise UserError(
                f"--nms=efficientnms_trt is an ONNX node for TensorRT: --format={self.format} has none"
            )
        if self.verify_annotations and not self.verify_images:
            raise UserError("--verify_annotations needs --verify_images, the directory of its images")
        if self.verify_annotations and (self.suppression != "standard" or self.format == "tensorrt"):
            raise UserError(
                "--verify_annotations needs detections that run here: not those of "
                f"--format={self.format} --nms={self.suppression}"
            )
        if self.needs_calibration and not self.calibration_images and not self.table.exists():
            raise UserError(
                "--quantize=int8 needs --calibration_images, typical images, or the --calibration_table of "
                "an earlier export"
            )
        if not self.needs_calibration and (self.calibration_images or self.calibration_table):
            raise UserError(
                f"nothing is calibrated for --format={self.format} --quantize={self.quantize}: drop the flag"
            )
