"""Where preprocessed images go, chosen by --output.

x.npz, x.npy            one array of all images, and x.npz.csv with their names and labels
x.png, x.jpg            one contact sheet of the first images
x.tfrecord              records with an index; with --output_shards x-00000-of-00004.tfrecord ...
a directory             a picture of each image, named after its source

output = check_output("small.npz", overwrite=False, inputs=files)   # UserError before anything runs
print(output.write(samples, total))
"""

import contextlib
import csv
import dataclasses
import glob
import itertools
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import tensorflow as tf
from PIL import Image

from common import progress
from common.datacheck.tfrecord_scan import name_files
from common.errors import UserError
from common.evaluation import drawing
from common.files import TEMPORARY, write_into
from common.tfrecord import write_index
from tools.conversion.coco_to_tfrecord import refuse_other_set
from tools.preprocessing.samples import FileNames, Sample, encode, to_picture

IMAGE_FORMATS = ("png", "jpeg")
JPEG_QUALITY = 95
SHEET_IMAGES = 64
_SHEET_COLUMNS = 8
_SHEET_WIDTH = 1280  # pixels
_SUFFIXES = {".npz": "array", ".npy": "array", ".png": "sheet", ".jpg": "sheet", ".jpeg": "sheet"}
_RECORDS = ".tfrecord"
ACCEPTED = "an .npz, .npy, .png, .jpg or .tfrecord file, or a directory"


@dataclasses.dataclass(frozen=True)
class Output:
    """A place for samples, checked before anything runs.

    Attributes:
        path: --output.
        kind: "array", "sheet", "records" or "directory".
        files: those that `write` makes, for arrays, sheets and records, without indexes and tables.
        image_format, jpeg_quality: of pictures and records.
        is_bgr: three channels are blue, green, red; in pictures they become red, green, blue.
        label_names: by label; may be empty.
        has_labels: whether records have labels.
    """

    path: str
    kind: str
    files: Sequence[pathlib.Path]
    image_format: str = IMAGE_FORMATS[0]
    jpeg_quality: int = JPEG_QUALITY
    is_bgr: bool = False
    label_names: Sequence[str] = ()
    has_labels: bool = False

    def write(self, samples: Iterable[Sample], total: int) -> str:
        """Writes all samples, or after any failure nothing.

        Args:
            samples: in the order of their positions; read one at a time, for a sheet not to the end.
            total: how many there are.

        Returns:
            One line about what was written where.

        Raises:
            UserError: samples that this output cannot hold; the disk.
        """
        if self.kind == "records" and total < len(self.files):
            raise UserError(f"--output_shards={len(self.files)} is not in 1..{total}, the number of images")
        writers: dict[str, Callable[[pathlib.Path, Iterator[Sample], int], str]] = {
            "array": self._write_array,
            "sheet": self._write_sheet,
            "records": self._write_records,
            "directory": self._write_pictures,
        }
        told = ""

        def write(staged: pathlib.Path) -> None:
            nonlocal told
            shown = min(total, SHEET_IMAGES) if self.kind == "sheet" else total
            told = writers[self.kind](staged, _counted(itertools.islice(samples, shown), shown), total)

        directory = pathlib.Path(self.path) if self.kind == "directory" else self.files[0].parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_into(directory, write)
        except BaseException as error:
            progress.log("")  # a bar that stopped half-way has not ended its line
            if not isinstance(error, OSError | tf.errors.OpError):
                raise
            # TensorFlow's errors have the file in their message.
            reason = error.message if isinstance(error, tf.errors.OpError) else _reason(error)
            # Staged files have their final names in messages.
            reason = re.sub(rf"{re.escape(TEMPORARY)}[^/]*/?", "", reason)
            raise UserError(f"--output={self.path}: {reason}") from error
        return told

    def _write_array(self, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
        """One array (N, ...) of the images' dtype, as NumPy's format has it (numpy/lib/format.py), never held
        in memory; and a table with position, name, label (empty: none) and the label's name of each row."""
        path = self.files[0]
        table = path.with_name(f"{path.name}.csv")
        first = None
        with (
            _array_stream(staged / path.name) as stream,
            (staged / table.name).open("w", newline="", encoding="utf-8", errors="replace") as csv_file,
        ):
            rows = csv.writer(csv_file)
            rows.writerow(("position", "name", "label", "class"))
            for sample in samples:
                image = sample.image
                if first is None:
                    first = sample
                    descr = np.lib.format.dtype_to_descr(image.dtype)
                    header = {"descr": descr, "fortran_order": False, "shape": (total, *image.shape)}
                    np.lib.format.write_array_header_1_0(stream, header)
                if image.shape != first.image.shape or image.dtype != first.image.dtype:
                    raise UserError(
                        f"{first.describe()}, {sample.describe()}: an array needs all of one size and type; a"
                        " resize, crop or letterbox to one size at the end of --ops makes them so"
                    )
                stream.write(np.ascontiguousarray(image).data)
                label = sample.label if sample.label >= 0 else ""
                rows.writerow((sample.position, sample.name, label, self._label_name(sample)))
        shape = " x ".join(map(str, first.image.shape))
        return f"{total} images, {total} x {shape}: {path}; their names: {table}"

    def _write_pictures(self, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
        names = FileNames(".png" if self.image_format == "png" else ".jpg")
        for sample in samples:
            path = staged / names.of(sample.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._encode(to_picture(sample, is_bgr=self.is_bgr)))
        return f"{total} pictures ({self.image_format}): {self.path}"

    def _write_sheet(self, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
        """The first SHEET_IMAGES images on one picture; a single image as it is."""
        if total == 1:
            sheet = to_picture(next(samples), is_bgr=self.is_bgr)
        else:
            pictures = []
            for sample in samples:
                image = Image.fromarray(to_picture(sample, is_bgr=self.is_bgr)).convert("RGB")
                image.thumbnail((_SHEET_WIDTH, _SHEET_WIDTH))  # 64 photographs would fill gigabytes
                pictures.append(np.asarray(image))
            columns = min(math.ceil(math.sqrt(len(pictures))), _SHEET_COLUMNS)  # about as many as rows
            sheet = drawing.contact_sheet(pictures, columns=columns, width=_SHEET_WIDTH)
        (staged / self.files[0].name).write_bytes(self._encode(sheet))
        if total == 1:
            return f"the image: {self.path}"
        return f"contact sheet of {min(total, SHEET_IMAGES)} of {total} images: {self.path}"

    def _write_records(self, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
        """Each file has equally many images or one more, in the order of the source."""
        for shard, file in enumerate(self.files):
            begin, end = (total * (shard + i) // len(self.files) for i in (0, 1))
            with tf.io.TFRecordWriter(os.fspath(staged / file.name)) as writer:
                for sample in itertools.islice(samples, end - begin):
                    writer.write(self._record(sample))
            write_index(staged / file.name)
        return f"{total} images in {name_files(self.files)}, with indexes"

    def _record(self, sample: Sample) -> bytes:
        """The keys of tensorflow/models research/slim/datasets/dataset_utils.py, image_to_tfexample, with the
        name and the position of the source in image/filename and image/source_id, and image/class/text where
        labels have names."""
        picture = to_picture(sample, is_bgr=self.is_bgr)
        values: dict[str, bytes | int] = {
            "image/encoded": self._encode(picture),
            "image/format": self.image_format.encode(),
            "image/filename": os.fsencode(sample.name),
            "image/source_id": str(sample.position).encode(),
            "image/height": picture.shape[0],
            "image/width": picture.shape[1],
        }
        if self.has_labels:
            values["image/class/label"] = sample.label
        if self.label_names:
            values["image/class/text"] = self._label_name(sample).encode()
        example = tf.train.Example()
        for key, value in values.items():
            feature = example.features.feature[key]
            kind = feature.bytes_list if isinstance(value, bytes) else feature.int64_list
            kind.value.append(value)
        return example.SerializeToString(deterministic=True)  # protobuf's maps have no order unless asked

    def _encode(self, picture: np.ndarray) -> bytes:
        return encode(picture, self.image_format, self.jpeg_quality)

    def _label_name(self, sample: Sample) -> str:
        return self.label_names[sample.label] if 0 <= sample.label < len(self.label_names) else ""


def check_output(
    output: str,
    *,
    overwrite: bool,
    inputs: Sequence[str | os.PathLike],
    has_labels: bool = False,
    label_names: Sequence[str] = (),
    image_format: str | None = None,
    jpeg_quality: int | None = None,
    num_shards: int | None = None,
    is_bgr: bool = False,
) -> Output:
    """The output that the flags describe; nothing is written yet.

    Args:
        output: --output.
        overwrite: files that exist may be replaced; in a directory other files stay.
        inputs: the files that are read, or directories of them, which are never replaced.
        has_labels, label_names, is_bgr: as in `Output`.
        image_format: of IMAGE_FORMATS, for pictures and records; None: png.
        jpeg_quality: 1 to 100; None: JPEG_QUALITY.
        num_shards: number of record files (--output_shards); None: one file of just this name.

    Raises:
        UserError: what --output names cannot be written, exists or is the input; a flag that does nothing
            for it.
    """
    kind = _kind(output, num_shards)
    if image_format is not None and kind not in ("directory", "records"):
        raise UserError(f"--image_format does nothing for --output={output}: leave it out")
    if num_shards is not None and kind != "records":
        raise UserError(f"--output_shards does nothing for --output={output}: leave it out")
    if kind == "sheet":
        image_format = "png" if output.lower().endswith(".png") else "jpeg"
    image_format = image_format or IMAGE_FORMATS[0]
    if jpeg_quality is not None and (kind == "array" or image_format != "jpeg"):
        raise UserError(f"--jpeg_quality does nothing for --output={output} without JPEGs: leave it out")
    files = [pathlib.Path(output)]
    if num_shards is not None:
        prefix = output.removesuffix(_RECORDS)
        files = [pathlib.Path(f"{prefix}-{i:05d}-of-{num_shards:05d}{_RECORDS}") for i in range(num_shards)]
        if files[0].parent.is_dir():
            names = [file.name for file in files]
            refuse_other_set(files[0].parent, os.path.basename(prefix), names)
    beside = {"array": ".csv", "records": ".idx"}.get(kind)
    targets = [*files, *(pathlib.Path(f"{file}{beside}") for file in files if beside)]
    _check_targets(kind, targets, overwrite=overwrite, inputs=inputs)
    quality = jpeg_quality or JPEG_QUALITY
    return Output(output, kind, files, image_format, quality, is_bgr, label_names, has_labels)


def _kind(output: str, num_shards: int | None) -> str:
    if not output or "\0" in output:
        raise UserError(f"--output={output!r}: name {ACCEPTED}")
    suffix = os.path.splitext(output)[1].lower()
    if output.endswith("/") or os.path.isdir(output):
        return "directory"
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if suffix == _RECORDS or num_shards is not None:
        return "records"
    if re.fullmatch(r"\.[a-z][a-z0-9]{0,7}", suffix):
        raise UserError(f"--output={output}: name {ACCEPTED} (add a / to {os.path.basename(output)})")
    return "directory"


def _check_targets(
    kind: str, targets: Sequence[pathlib.Path], *, overwrite: bool, inputs: Sequence[str | os.PathLike]
) -> None:
    """UserError where `targets`, files or one directory, exist or are the input."""
    for target in filter(os.path.lexists, targets):
        if os.path.isdir(target) and not glob.glob("*", root_dir=target, include_hidden=True):
            continue
        real = pathlib.Path(os.path.realpath(target))
        for given in inputs:
            path = pathlib.Path(os.path.realpath(given))
            lies_in = kind == "directory" and real in path.parents
            if path == real or lies_in or (path in real.parents and path.is_dir()):
                raise UserError(f"--output={target} is or holds a file of the input ({given}): name another")
        if not overwrite:
            raise UserError(f"{target} exists: name another --output, or replace it by --overwrite")


def _counted(samples: Iterable[Sample], total: int) -> Iterator[Sample]:
    """The same samples, with a progress bar."""
    bar = progress.Bar("Preprocessing", total)
    for sample in samples:
        bar.step()
        yield sample


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)


@contextlib.contextmanager
def _array_stream(path: pathlib.Path) -> Iterator[BinaryIO]:
    if path.suffix.lower() == ".npy":
        with path.open("wb") as stream:
            yield stream
        return
    with (
        zipfile.ZipFile(path, "w") as archive,
        # A member of unknown size may grow beyond 2 GiB only if it is announced.
        archive.open("images.npy", "w", force_zip64=True) as stream,
    ):
        yield stream
