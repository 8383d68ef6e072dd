"""The flags of export.py, and which of them go together."""

import dataclasses
import pathlib

from absl import flags

from common.errors import UserError, unknown

FORMATS = ("saved_model", "onnx", "litert", "tensorrt")
QUANTIZE = ("none", "fp16", "int8")
NMS = ("standard", "efficientnms_trt", "none")
OPSETS = (13, 18)  # 13: per-channel Q and DQ; 18 is the newest that tf2onnx 1.17 writes
OPSET = 17

_SUFFIX = {"saved_model": "", "onnx": ".onnx", "litert": ".tflite", "tensorrt": ".engine"}


def define_export_flags(fv: flags.FlagValues) -> None:
    """What to write, and what to check it with."""
    flags.DEFINE_enum("format", None, FORMATS, "Of the exported file.", flag_values=fv)
    flags.DEFINE_string(
        "output", None, "Exported file; of a saved_model: directory. It is replaced.", flag_values=fv
    )
    flags.DEFINE_enum(
        "quantize",
        "none",
        QUANTIZE,
        "fp16: half the bytes. int8: a quarter; onnx and tensorrt measure ranges on --calibration_images.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "calibration_images",
        None,
        "Images like those to come, for --quantize=int8: a directory or a glob; about a hundred.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "calibration_table",
        None,
        "File of measured ranges: used where it is there, else written. Default: beside the output.",
        flag_values=fv,
    )
    flags.DEFINE_enum(
        "nms",
        None,
        NMS,
        "Suppression by standard operations, by TensorRT's plugin, or none: all boxes and scores come out. "
        "Default: standard, of tensorrt the plugin.",
        flag_values=fv,
    )
    flags.DEFINE_integer(
        "opset", OPSET, "Of ONNX.", lower_bound=OPSETS[0], upper_bound=OPSETS[1], flag_values=fv
    )
    flags.DEFINE_string(
        "verify_images",
        None,
        "Images to compare the exported file with the weights on. Default: eight drawn ones.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "verify_annotations", None, "COCO json of --verify_images: compares AP, too.", flag_values=fv
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write; UserError, one line, for what does not go together."""

    format: str
    output: pathlib.Path
    quantize: str
    nms: str
    opset: int
    calibration_images: str | None
    calibration_table: pathlib.Path | None

    @property
    def needs_calibration(self) -> bool:
        return self.quantize == "int8" and self.format in ("onnx", "tensorrt")

    @property
    def onnx_file(self) -> pathlib.Path:
        """The ONNX file: the output itself, or what the engine is made of."""
        return self.output if self.format == "onnx" else self.output.with_suffix(".onnx")


def check(
    *,
    format: str | None,
    output: str | None,
    quantize: str,
    nms: str | None,
    opset: int,
    calibration_images: str | None,
    calibration_table: str | None,
    verify_images: str | None,
    verify_annotations: str | None,
) -> Options:
    """The options that the flags mean.

    Raises:
        UserError: one is missing, or two exclude each other.
    """
    if not format:
        raise UserError(f"--format is missing: one of {', '.join(FORMATS)}")
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if not output:
        raise UserError("--output is missing: name the file to write, or for saved_model the directory")
    file = pathlib.Path(output)
    if file.suffix != _SUFFIX[format] and format != "saved_model":
        raise UserError(f"--output={output}: a file of --format={format} ends in {_SUFFIX[format]}")
    if format == "saved_model" and quantize != "none":
        raise UserError(f"--quantize={quantize}: a saved_model keeps float32; use --format=onnx or litert")
    nms = nms or ("efficientnms_trt" if format == "tensorrt" else "standard")
    if nms == "efficientnms_trt" and format not in ("onnx", "tensorrt"):
        raise UserError(f"--nms=efficientnms_trt is an ONNX node for TensorRT: --format={format} has none")
    if verify_annotations and not verify_images:
        raise UserError("--verify_annotations needs --verify_images, the directory of its images")
    if verify_annotations and (nms != "standard" or format == "tensorrt"):
        raise UserError(
            f"--verify_annotations needs detections that run here: not those of --format={format} --nms={nms}"
        )
    table = pathlib.Path(calibration_table) if calibration_table else None
    options = Options(format, file, quantize, nms, opset, calibration_images, table)
    if options.needs_calibration:
        table = table or file.with_name(f"{file.name}.calibration.json")
        if not calibration_images and not table.exists():
            raise UserError(
                "--quantize=int8 needs --calibration_images, images like those to come, or the "
                "--calibration_table of an earlier export"
            )
        return dataclasses.replace(options, calibration_table=table)
    if calibration_images or calibration_table:
        raise UserError(f"nothing is calibrated for --format={format} --quantize={quantize}: drop the flag")
    return options
