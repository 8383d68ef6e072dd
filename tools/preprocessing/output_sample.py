"""One preprocessed image on its way to an output, and what outputs ask of it."""

import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from common import progress
from common.errors import UserError
from common.files import TEMPORARY, write_into


class Sample(NamedTuple):
    """One preprocessed image.

    Attributes:
        position: of its source image in the source, from 0.
        name: of the source image: "cats/a.jpg", a record's key, ...
        label: -1 for none.
        image: (H, W, C), (H, W), or (C, H, W); any dtype.
        layout: of the image as DALI names it: "HWC", "HW", "CHW"; "" leaves it to the shape.
    """

    position: int
    name: str
    label: int
    image: np.ndarray
    layout: str = ""


class Output(Protocol):
    """A place for samples, looked at before anything runs."""

    def write(self, samples: Iterable[Sample], total: int) -> str:
        """Writes all samples, or after any failure nothing.

        Args:
            samples: in the order of their positions; read one at a time, perhaps not to the end.
            total: how many there are.

        Returns:
            One line that says what is where.

        Raises:
            UserError: samples that this output cannot hold, the disk.
        """


def counted(samples: Iterable[Sample], total: int) -> Iterator[Sample]:
    """The same samples, with a progress bar.

    Raises:
        ValueError: there are not as many as promised.
    """
    bar = progress.Bar("Preprocessing", total)
    count = 0
    for sample in samples:
        if count == total:
            raise ValueError(f"more samples came than the {total} promised")
        yield sample
        count += 1
        bar.step()
    if count < total:
        raise ValueError(f"{count} samples came where {total} were promised")


def describe(sample: Sample) -> str:
    """A sample in a message: which, and what came of it."""
    shape = " x ".join(map(str, sample.image.shape))
    layout = f" ({layout_of(sample)})" if layout_of(sample) else ""
    return f"image {sample.position} ({sample.name!r}) is {sample.image.dtype} {shape}{layout}"


def write_files(directory: pathlib.Path, writer: Callable[[pathlib.Path], object], *, output: str) -> None:
    """atomic.write_into, with the disk's complaints in one line; what the samples raise passes through.

    Args:
        directory, writer: as there.
        output: --output, for messages.
    """
    try:
        write_into(directory, writer)
    except BaseException as error:
        progress.log("")  # a bar that stopped half-way has not ended its line
        if not isinstance(error, OSError):
            raise
        name = final_names(str(error.filename or ""))
        where = f" ({name})" if name and name != output else ""
        raise UserError(f"--output={output}{where}: {error.strerror or error}") from error


def final_names(text: str) -> str:
    """A message in which staged files are called what they were to become."""
    return re.sub(rf"{re.escape(TEMPORARY)}[^/]*/?", "", text)


def label_name(label: int, names: Sequence[str]) -> str:
    """The name of a label; "" where it has none."""
    return names[label] if 0 <= label < len(names) else ""


def layout_of(sample: Sample) -> str:
    """As DALI names it: what the sample says, or else what its shape suggests; "" for neither."""
    if sample.layout:
        return sample.layout
    shape = sample.image.shape
    if len(shape) == 3:
        return "CHW" if shape[0] in (1, 3) and shape[2] not in (1, 3) else "HWC"
    return "HW" if len(shape) == 2 else ""
