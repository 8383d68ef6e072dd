"""The flags of export.py, and which of them can be combined."""

import dataclasses
import importlib.util
import pathlib
from typing import NamedTuple

from common.args import ImageArgs, TrainedArgs, flag
from common.errors import UserError
from common.export import triton_repository

QUANTIZE = ("none", "fp16", "int8")
NMS = ("standard", "efficientnms_trt", "none")


class Format(NamedTuple):
    """What a format supports.

    Attributes:
        suffix: suffix of the exported file; "" if it is a directory.
        quantize, nms: supported values of these two flags; the first of `nms` is the default.
        calibrates: whether int8 needs ranges of activations, measured on images.
        packages: packages that the format needs.
    """

    suffix: str
    quantize: tuple[str, ...]
    nms: tuple[str, ...]
    calibrates: bool
    packages: tuple[str, ...] = ()


_ONNX_PACKAGES = ("onnx", "onnxruntime", "tf2onnx")
FORMATS = {
    "saved_model": Format("", ("none",), ("standard", "none"), False),
    "onnx": Format(".onnx", QUANTIZE, NMS, True, _ONNX_PACKAGES),
    "litert": Format(".tflite", QUANTIZE, ("standard", "none"), False, ("ai_edge_litert",)),
    "tensorrt": Format(".plan", QUANTIZE, ("efficientnms_trt", "standard", "none"), True, _ONNX_PACKAGES),
    "triton": Format("", QUANTIZE, ("standard",), True, _ONNX_PACKAGES),
}
# A file that shows that a directory has the format.
_FILE_IN_DIRECTORY = {"saved_model": "saved_model.pb", "triton": f"{triton_repository.ENSEMBLE}/config.pbtxt"}


@dataclasses.dataclass(frozen=True)
class ExportArgs(TrainedArgs, ImageArgs):
    format: str = flag(None, "Format of the exported file.", choices=tuple(FORMATS))
    output: str = flag(
        None, "File to write; for saved_model and triton, a directory. An existing output is replaced."
    )
    quantize: str = flag(
        "none",
        "fp16 halves the size of the weights, int8 quarters it. For onnx, tensorrt and triton, "
        "int8 needs --calibration_images.",
        choices=QUANTIZE,
    )
    calibration_images: str | None = flag(
        None, "Directory or glob of about a hundred typical images, for --quantize=int8."
    )
    nms: str | None = flag(
        None,
        "standard: NMS by standard operations. efficientnms_trt: by TensorRT's plugin. none: all boxes and "
        "scores are returned. Default: efficientnms_trt for tensorrt, else standard.",
        choices=NMS,
    )
    verify_images: str | None = flag(
        None, "Images for the comparison of the file with the weights. Default: eight drawn images."
    )
    verify_annotations: str | None = flag(None, "COCO json of --verify_images. If given, AP is compared too.")

    @property
    def file(self) -> pathlib.Path:
        return pathlib.Path(self.output)

    @property
    def verified_file(self) -> pathlib.Path:
        """The file to compare with the weights. For TensorRT and Triton this is the ONNX file."""
        if self.format == "triton":
            return (self.file / triton_repository.MODEL).with_suffix(".onnx")
        return self.file.with_suffix(".onnx") if self.format == "tensorrt" else self.file

    @property
    def suppression(self) -> str:
        return self.nms or FORMATS[self.format].nms[0]

    def check(self) -> None:
        """Raises UserError if a flag is missing or two flags exclude each other."""
        if self.format not in FORMATS:
            problem = f"={self.format} is unknown" if self.format else " is missing"
            raise UserError(f"--format{problem}: use one of {', '.join(FORMATS)}")
        suffix, quantize, nms, calibrates, packages = FORMATS[self.format]
        if not self.output or (suffix and self.file.suffix != suffix):
            place = f"a file that ends in {suffix}" if suffix else "a directory"
            raise UserError(f"--output={self.output}: give {place} for --format={self.format}")
        is_export = (self.file / _FILE_IN_DIRECTORY.get(self.format, "")).is_file()
        if self.file.exists() and not is_export:
            raise UserError(
                f"--output={self.output} exists and is not of --format={self.format}: choose another path"
            )
        for package in packages:
            if not importlib.util.find_spec(package):
                raise UserError(
                    f"--format={self.format} needs the package {package}: pip install '.[export]'"
                )
        if self.format == "tensorrt" and self.file.exists() and not importlib.util.find_spec("tensorrt"):
            raise UserError(
                f"--output={self.output} exists, and no new engine can be built without TensorRT: install "
                "TensorRT, or give another --output"
            )
        for name, value, known in (("quantize", self.quantize, quantize), ("nms", self.suppression, nms)):
            if value not in known:
                raise UserError(f"--{name}={value}: --format={self.format} supports only {', '.join(known)}")
        if self.verify_annotations and not self.verify_images:
            raise UserError("--verify_annotations needs --verify_images, the directory of its images")
        if self.verify_annotations and (self.suppression != "standard" or self.format == "tensorrt"):
            raise UserError(
                f"--verify_annotations cannot check --format={self.format} --nms={self.suppression}: "
                "it needs a file with NMS that runs without TensorRT"
            )
        calibrates = calibrates and self.quantize == "int8"
        if calibrates and not self.calibration_images:
            raise UserError("--quantize=int8 needs --calibration_images: a directory of typical images")
        if self.calibration_images and not calibrates:
            raise UserError(
                f"--calibration_images has no effect for --format={self.format} --quantize={self.quantize}: "
                "remove the flag"
            )
