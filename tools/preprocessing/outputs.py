"""Where preprocessed images go, chosen by what --output names.

x.npz, x.npy            one array of all images, and x.npz.csv with their names and labels
x.png, x.jpg            one contact sheet of the first images
x.tfrecord              records with an index; with --output_shards x-00000-of-00004.tfrecord ...
a directory             a picture of each image, named after its source

output = check_output("small.npz", overwrite=False, inputs=files, has_labels=True)   # complains here
print(output.write(samples, total))
"""

import os
import pathlib
import re
from collections.abc import Sequence

from common.errors import UserError
from tools.conversion.coco_to_tfrecord import refuse_other_set
from tools.preprocessing.output_arrays import ArrayOutput, table_of
from tools.preprocessing.output_encoding import IMAGE_FORMATS, JPEG_QUALITY, Encoding
from tools.preprocessing.output_pictures import SHEET_IMAGES, PictureOutput, SheetOutput
from tools.preprocessing.output_records import SUFFIX as RECORD_SUFFIX
from tools.preprocessing.output_records import RecordOutput, record_files
from tools.preprocessing.output_sample import Output, Sample

__all__ = ["IMAGE_FORMATS", "JPEG_QUALITY", "SHEET_IMAGES", "Output", "Sample", "check_output"]

_ARRAYS = (".npz", ".npy")
_SHEETS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
_KINDS = "an .npz, .npy, .png, .jpg or .tfrecord file, or a directory"


def check_output(
    output: str,
    *,
    overwrite: bool,
    inputs: Sequence[str | os.PathLike],
    has_labels: bool,
    label_names: Sequence[str] = (),
    image_format: str | None = None,
    jpeg_quality: int | None = None,
    num_shards: int | None = None,
    is_bgr: bool = False,
) -> Output:
    """The output that the flags describe; nothing is written yet.

    Args:
        output: --output.
        overwrite: files that are there already may be replaced; in a directory other files stay.
        inputs: the files that are read, or directories of them, which are never replaced.
        has_labels: whether the source has labels.
        label_names: of the source's labels, in their order.
        image_format: of IMAGE_FORMATS, for pictures and records; None: png.
        jpeg_quality: 1 to 100; None: JPEG_QUALITY.
        num_shards: of records (--output_shards); None: one file of just this name.
        is_bgr: whether the channels will come as blue, green, red; arrays keep them so.

    Raises:
        UserError: what --output names cannot be written, is there already or is the input; a flag that does
            nothing for it.
    """
    kind = _kind(output, num_shards)
    _refuse_idle(output, kind, image_format=image_format, num_shards=num_shards)
    encoding = _encoding(output, kind, image_format, jpeg_quality, is_bgr=is_bgr)
    path = pathlib.Path(output)
    if kind == "directory":
        _check_directory(path, overwrite=overwrite, inputs=inputs)
        return PictureOutput(path, encoding)
    if kind == "array":
        _check_files([path, table_of(path)], overwrite=overwrite, inputs=inputs)
        return ArrayOutput(path, label_names)
    if kind == "sheet":
        _check_files([path], overwrite=overwrite, inputs=inputs)
        return SheetOutput(path, encoding)
    files = record_files(output, num_shards)
    indexes = [pathlib.Path(f"{file}.idx") for file in files]
    _check_files([*files, *indexes], overwrite=overwrite, inputs=inputs)
    if num_shards is not None and path.parent.is_dir():
        prefix = path.name.removesuffix(RECORD_SUFFIX)
        refuse_other_set(path.parent, prefix, [file.name for file in files])
    return RecordOutput(files, encoding, has_labels, label_names)


def _kind(output: str, num_shards: int | None) -> str:
    if not output or "\0" in output:
        raise UserError(f"--output={output!r}: name {_KINDS}")
    suffix = os.path.splitext(output)[1].lower()
    if output.endswith("/") or os.path.isdir(output):
        return "directory"
    if suffix in _ARRAYS:
        return "array"
    if suffix in _SHEETS:
        return "sheet"
    if suffix == RECORD_SUFFIX or num_shards is not None:
        return "records"
    if re.fullmatch(r"\.[a-z][a-z0-9]{0,7}", suffix):
        raise UserError(f"--output={output}: name {_KINDS} (add a / to {os.path.basename(output)})")
    return "directory"


def _refuse_idle(output: str, kind: str, *, image_format: str | None, num_shards: int | None) -> None:
    if image_format is not None and kind not in ("directory", "records"):
        raise UserError(f"--image_format does nothing for --output={output}: leave it out")
    if num_shards is not None and kind != "records":
        raise UserError(f"--output_shards does nothing for --output={output}: leave it out")
    if num_shards is not None and num_shards < 1:
        raise UserError(f"--output_shards={num_shards} is not at least 1")


def _encoding(
    output: str, kind: str, image_format: str | None, jpeg_quality: int | None, *, is_bgr: bool
) -> Encoding:
    if kind == "sheet":
        image_format = _SHEETS[os.path.splitext(output)[1].lower()]
    image_format = image_format or IMAGE_FORMATS[0]
    if jpeg_quality is None:
        return Encoding(image_format, is_bgr=is_bgr)
    if kind == "array" or image_format != "jpeg":
        raise UserError(f"--jpeg_quality does nothing for --output={output} without JPEGs: leave it out")
    if not 1 <= jpeg_quality <= 100:
        raise UserError(f"--jpeg_quality={jpeg_quality} is not in 1..100")
    return Encoding(image_format, jpeg_quality, is_bgr=is_bgr)


def _check_directory(
    directory: pathlib.Path, *, overwrite: bool, inputs: Sequence[str | os.PathLike]
) -> None:
    _check_place(directory, directory)
    try:
        is_used = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise UserError(f"--output={directory}: {error.strerror}") from error
    if not is_used:
        return
    real = _real(directory)
    for given in inputs:
        path = _real(given)
        if path == real or real in path.parents or (path in real.parents and path.is_dir()):
            raise UserError(
                f"--output={directory} holds files of the input, or lies among them ({given}): name another"
                " directory"
            )
    if not overwrite:
        raise UserError(
            f"--output={directory} is not empty: name another directory, or give --overwrite to replace"
            " files of the same names"
        )


def _check_files(
    files: Sequence[pathlib.Path], *, overwrite: bool, inputs: Sequence[str | os.PathLike]
) -> None:
    _check_place(files[0].parent, files[0])
    there = [file for file in files if os.path.lexists(file)]
    for file in there:
        if file.is_dir():
            raise UserError(f"--output={file} is a directory: name another file")
        real = _real(file)
        for given in inputs:
            path = _real(given)
            if path == real or (path in real.parents and path.is_dir()):
                raise UserError(f"--output={file} is a file of the input ({given}): name another file")
    if there and not overwrite:
        raise UserError(f"{there[0]} is there already: choose another --output, or --overwrite")


def _real(path: str | os.PathLike) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(path))


def _check_place(directory: pathlib.Path, output: pathlib.Path) -> None:
    """The directory can be written, or can be made."""
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UserError(f"--output={output}: {there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--output={output}: nothing can be written to {there}")
