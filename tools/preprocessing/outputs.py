"""Writes preprocessed images to the file or directory that --output names.

x.npz, x.npy            one array of all images, and x.npz.csv with names and labels of the images
x.png, x.jpg            one contact sheet of the first images
x.tfrecord              records and an index; with --output_shards=4: x-00000-of-00004.tfrecord, ...
a directory             one image file for each source image, with the same name

output = check_output("small.npz", overwrite=False, inputs=files)   # UserError before anything runs
print(output.write(samples, total))
"""

import contextlib
import csv
import io
import itertools
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from common import progress
from common.data.check.tfrecord_scan import name_files
from common.data.sharding import shard_range
from common.data.tfrecord import framed, write_index
from common.errors import UserError
from common.evaluation import drawing
from common.files import TEMPORARY, write_into
from tools.conversion.coco_to_tfrecord import refuse_other_set, serialized
from tools.preprocessing.options import ACCEPTED
from tools.preprocessing.samples import FileNames, Sample

JPEG_QUALITY = 95
SHEET_IMAGES = 64
_SHEET_COLUMNS = 8
_SHEET_WIDTH = 1280  # pixels


class Output(NamedTuple):
    """An output for samples, checked before anything runs.

    Attributes:
        files: the files to write. For one file per image: only the directory.
        encoding: options of Pillow's `save` for image files and records.
        is_bgr: whether images with three channels are BGR.
        label_names: label -> name; may be empty.
        has_labels: whether records contain labels.
    """

    path: str
    kind: "Kind"
    files: Sequence[pathlib.Path]
    encoding: Mapping[str, Any]
    is_bgr: bool
    label_names: Mapping[int, str]
    has_labels: bool

    def write(self, samples: Iterable[Sample], total: int) -> str:
        """Writes all samples, in order of position, or nothing if anything fails.

        `total` is the number of samples. Returns one line that states what was written.

        Raises:
            UserError: a sample does not fit this output, or the files cannot be written.
        """
        if total < len(self.files):
            raise UserError(f"--output_shards={len(self.files)} is more than the {total} images: give fewer")
        told = []
        shown = min(total, SHEET_IMAGES) if self.kind is SHEET else total
        counted = _counted(itertools.islice(samples, shown), shown)
        directory = self.files[0] if self.kind is PICTURES else self.files[0].parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_into(directory, lambda staged: told.append(self.kind.write(self, staged, counted, total)))
        except BaseException as error:
            progress.log("")
            if not isinstance(error, OSError):
                raise
            name = os.path.basename(error.filename2 or error.filename or "")
            where = f"{name}: " if name and not name.startswith(TEMPORARY) else ""
            raise UserError(f"--output={self.path}: {where}{error.strerror or error}") from error
        return told[0]

    def encode(self, picture: np.ndarray) -> bytes:
        """Encodes a picture, uint8 (H, W, 3) RGB or (H, W)."""
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, **self.encoding)
        return stream.getvalue()


def check_output(
    output: str,
    *,
    overwrite: bool,
    inputs: Sequence[str | os.PathLike],
    has_labels: bool = False,
    label_names: Mapping[int, str] = {},
    image_format: str | None = None,
    jpeg_quality: int | None = None,
    output_shards: int | None = None,
    is_bgr: bool = False,
) -> Output:
    """Checks the flags, and returns the output that they describe. Does not write anything.

    Args:
        overwrite: whether existing files may be replaced.
        inputs: files that are read, or their directories. They are never replaced.
        has_labels, label_names, is_bgr: as in `Output`.
        image_format: one of IMAGE_FORMATS, for image files and records; None: png.
        jpeg_quality: 1 to 100; None: JPEG_QUALITY.
        output_shards: number of record files; None: one file with exactly the name `output`.

    Raises:
        UserError: the output cannot be written, exists or is an input; or a flag has no effect.
    """
    stem, suffix = os.path.splitext(output)
    kind = PICTURES if output.endswith("/") or os.path.isdir(output) else KINDS.get(suffix.lower())
    if kind is None and (not output or re.fullmatch(r"\.[A-Za-z]\w{0,7}", suffix)):
        raise UserError(f"--output={output}: use {ACCEPTED}. End the name of a directory with /")
    kind = kind or PICTURES
    is_jpeg = image_format == "jpeg" or (kind is SHEET and suffix.lower() != ".png")
    flags = {"image_format": image_format, "jpeg_quality": jpeg_quality, "output_shards": output_shards}
    for name, value in flags.items():
        if value is not None and (name not in kind.flags or (name == "jpeg_quality" and not is_jpeg)):
            raise UserError(f"--{name} has no effect on --output={output}: remove the flag")
    files = [pathlib.Path(output)]
    if output_shards is not None:
        ends = [f"-{shard:05d}-of-{output_shards:05d}{suffix}" for shard in range(output_shards)]
        files = [pathlib.Path(f"{stem}{end}") for end in ends]
        if files[0].parent.is_dir():
            refuse_other_set(files[0].parent, os.path.basename(stem), [file.name for file in files])
    for target in [f"{file}{end}" for file in files for end in ("", kind.beside)]:
        _check_target(pathlib.Path(target), kind, overwrite=overwrite, inputs=inputs)
    encoding = {"format": "jpeg", "quality": jpeg_quality or JPEG_QUALITY} if is_jpeg else {"format": "png"}
    return Output(output, kind, files, encoding, is_bgr, label_names, has_labels)


def _check_target(
    target: pathlib.Path, kind: "Kind", *, overwrite: bool, inputs: Sequence[str | os.PathLike]
) -> None:
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return
    real = pathlib.Path(os.path.realpath(target))
    for given in inputs:
        path = pathlib.Path(os.path.realpath(given))
        lies_in = kind is PICTURES and real in path.parents
        if path == real or lies_in or (path in real.parents and path.is_dir()):
            raise UserError(f"--output={target} could replace a file of the input {given}: use another path")
    if not overwrite:
        raise UserError(f"{target} exists: choose another --output, or replace it with --overwrite")


def _counted(samples: Iterable[Sample], total: int) -> Iterator[Sample]:
    bar = progress.Bar("Preprocessing", total)
    for sample in samples:
        bar.step()
        yield sample


# --- writers: write files into the directory `staged`, and return a line about them ---


def _write_array(output: Output, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
    """Writes one array (N, ...) image by image to save memory (numpy/lib/format.py).

    Also writes a table with the position, name, label and label's name of each image.
    """
    path, table = output.files[0], pathlib.Path(f"{output.files[0]}.csv")
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
                first, shape = sample, (total, *image.shape)
                descr = np.lib.format.dtype_to_descr(image.dtype)
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
            if image.shape != first.image.shape or image.dtype != first.image.dtype:
                raise UserError(
                    f"{first.describe()}, but {sample.describe()}. One array needs images of one size and"
                    " dtype: add a resize, crop or letterbox to one size at the end of --ops"
                )
            stream.write(np.ascontiguousarray(image).data)
            label = sample.label if sample.label >= 0 else ""
            rows.writerow((sample.position, sample.name, label, output.label_names.get(sample.label, "")))
    return f"{total} images, {' x '.join(map(str, shape))}: {path}; their names: {table}"


@contextlib.contextmanager
def _array_stream(path: pathlib.Path) -> Iterator[IO[bytes]]:
    if path.suffix.lower() == ".npy":
        with path.open("wb") as stream:
            yield stream
        return
    # Without force_zip64 the size would be limited to 2 GiB.
    with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w", force_zip64=True) as stream:
        yield stream


def _write_pictures(output: Output, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
    names = FileNames({"png": ".png", "jpeg": ".jpg"}[output.encoding["format"]])
    for sample in samples:
        path = staged / names.of(sample.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(output.encode(sample.picture(is_bgr=output.is_bgr)))
    return f"{total} pictures ({output.encoding['format']}): {output.path}"


def _write_sheet(output: Output, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
    pictures = []
    for sample in samples:
        image = Image.fromarray(sample.picture(is_bgr=output.is_bgr))
        if total > 1:
            image = image.convert("RGB")
            image.thumbnail((_SHEET_WIDTH, _SHEET_WIDTH))  # else 64 photographs could take gigabytes
        pictures.append(np.asarray(image))
    columns = min(math.ceil(math.sqrt(len(pictures))), _SHEET_COLUMNS)
    sheet = drawing.contact_sheet(pictures, columns, _SHEET_WIDTH) if total > 1 else pictures[0]
    (staged / output.files[0].name).write_bytes(output.encode(sheet))
    return f"contact sheet of {len(pictures)} of {total} images: {output.path}"


def _write_records(output: Output, staged: pathlib.Path, samples: Iterator[Sample], total: int) -> str:
    for shard, file in enumerate(output.files):
        begin, end = shard_range(total, shard, len(output.files))
        with (staged / file.name).open("wb") as stream:
            for sample in itertools.islice(samples, end - begin):
                stream.write(framed(_record(output, sample)))
        write_index(staged / file.name)
    return f"{total} images in {name_files(output.files)}, with indexes"


def _record(output: Output, sample: Sample) -> bytes:
    """Makes a tf.train.Example with the keys of slim's image_to_tfexample (tensorflow/models)."""
    picture = sample.picture(is_bgr=output.is_bgr)
    strings = {
        "image/encoded": [output.encode(picture)],
        "image/format": [output.encoding["format"].encode()],
        "image/filename": [os.fsencode(sample.name)],
        "image/source_id": [str(sample.position).encode()],
    }
    integers = {"image/height": [picture.shape[0]], "image/width": [picture.shape[1]]}
    if output.has_labels:
        integers["image/class/label"] = [sample.label]
    if output.label_names:
        strings["image/class/text"] = [output.label_names.get(sample.label, "").encode()]
    return serialized({"bytes_list": strings, "int64_list": integers})


class Kind(NamedTuple):
    """A kind of output.

    Attributes:
        write: function (output, directory, samples, number of samples) -> a line about the files.
        beside: suffix of the index or table beside each file; "" for none.
        flags: flags that have an effect on this kind of output.
    """

    write: Callable[[Output, pathlib.Path, Iterator[Sample], int], str]
    beside: str = ""
    flags: tuple[str, ...] = ()


ARRAY = Kind(_write_array, ".csv")
SHEET = Kind(_write_sheet, flags=("jpeg_quality",))
RECORDS = Kind(_write_records, ".idx", ("image_format", "jpeg_quality", "output_shards"))
PICTURES = Kind(_write_pictures, flags=("image_format", "jpeg_quality"))
KINDS = {  # by suffix; any other output is a directory
    **dict.fromkeys((".npz", ".npy"), ARRAY),
    **dict.fromkeys((".png", ".jpg", ".jpeg"), SHEET),
    ".tfrecord": RECORDS,
}
