"""All images as one NumPy array, .npy or .npz, and beside it a table of what the rows are."""

import contextlib
import csv
import dataclasses
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np

from common.errors import UserError
from tools.preprocessing.output_sample import Sample, counted, describe, label_name, write_files

ARRAY = "images"  # its name in an .npz
COLUMNS = ("position", "name", "label", "class")


@dataclasses.dataclass(frozen=True)
class ArrayOutput:
    """One array (N, ...) of all images in their order, of the images' own dtype.

    It is written as it comes and never held in memory: an .npy file as NumPy's format has it
    (numpy/lib/format.py), or the only member of an .npz. Beside it, in `<path>.csv`, every row has its
    position in the source, name, label (empty: none) and the label's name.

    Attributes:
        path: ends in .npy or .npz.
        label_names: by label; may be empty.
    """

    path: pathlib.Path
    label_names: Sequence[str] = ()

    @property
    def table(self) -> pathlib.Path:
        return table_of(self.path)

    def write(self, samples: Iterable[Sample], total: int) -> str:
        shape: tuple[int, ...] = ()

        def write(staged: pathlib.Path) -> None:
            nonlocal shape
            with (
                _array_stream(staged / self.path.name) as stream,
                (staged / self.table.name).open("w", newline="", encoding="utf-8", errors="replace") as table,
            ):
                rows = csv.writer(table)
                rows.writerow(COLUMNS)
                first = None
                for sample in counted(samples, total):
                    if first is None:
                        first = sample
                        _write_header(stream, (total, *sample.image.shape), sample.image.dtype)
                    _check_same(first, sample)
                    stream.write(np.ascontiguousarray(sample.image).data)
                    rows.writerow(_row(sample, self.label_names))
                shape = (total, *first.image.shape)

        write_files(self.path.parent, write, output=str(self.path))
        return f"{total} images, {' x '.join(map(str, shape))}: {self.path}; their names: {self.table}"


def table_of(path: pathlib.Path) -> pathlib.Path:
    """The table that goes with an array."""
    return path.with_name(f"{path.name}.csv")


@contextlib.contextmanager
def _array_stream(path: pathlib.Path) -> Iterator[BinaryIO]:
    if path.suffix.lower() == ".npy":
        with path.open("wb") as stream:
            yield stream
        return
    with (
        zipfile.ZipFile(path, "w") as archive,
        # A member of unknown size may grow beyond 2 GiB only if it is told before.
        archive.open(f"{ARRAY}.npy", "w", force_zip64=True) as stream,
    ):
        yield stream


def _write_header(stream: BinaryIO, shape: tuple[int, ...], dtype: np.dtype) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})


def _check_same(first: Sample, sample: Sample) -> None:
    if sample.image.shape != first.image.shape or sample.image.dtype != first.image.dtype:
        raise UserError(
            f"{describe(first)}, {describe(sample)}: an array needs all of one size and type; a resize, crop "
            "or letterbox to one size at the end of --ops makes them so"
        )


def _row(sample: Sample, label_names: Sequence[str]) -> tuple[int | str, ...]:
    label = sample.label if sample.label >= 0 else ""
    return sample.position, sample.name, label, label_name(sample.label, label_names)
