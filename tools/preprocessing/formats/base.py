"""What all sources of images have in common, and how their images are judged."""

import abc
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from common.datacheck.images import ImageFacts, ImagePolicy
from common.errors import UserError
from common.issues import Findings
from common.labels import LabelMap
from common.reader_calls import Call, ExternalCall
from common.shards import check_shards

NO_LABEL = -1


class ImageSource(abc.ABC):
    """Images in a fixed order, from files or containers, each with a name and perhaps a label.

    All were looked at before, and can be used.

    Attributes:
        kind: as in --source.
        names: one an image, for messages and output files: what the data call it, so it may be repeated, or
            lead out of a directory.
        labels: int32 (size,), NO_LABEL where the source has none.
        label_names: of the labels 0, 1, ...; () where they have none.
        is_decoded: images are arrays (H, W, C) already.
    """

    kind: str
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str] = ()
    is_decoded: bool = False

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.names)

    @abc.abstractmethod
    def encoded(self, i: int) -> bytes:
        """Image i as it is stored, read by Python alone; TypeError where images are arrays.

        Raises:
            UserError: it cannot be read any more.
        """

    def call(self, *, shard_id: int = 0, num_shards: int = 1, training: bool = False, seed: int = 0) -> Call:
        """What reads the images by DALI: `reader_calls.in_graph` and `in_dynamic` take it.

        Args:
            shard_id: which part to read, the rank.
            num_shards: how many parts, the number of ranks.
            training: shuffled without end, or in order (readers.py).
            seed: of the shuffling, the same on all ranks.

        Raises:
            UserError: fewer images than shards.
        """
        check_shards(self.size, shard_id, num_shards, seed)
        return self._call(Part(shard_id, num_shards, training, seed))

    @abc.abstractmethod
    def _call(self, part: "Part") -> Call:
        """`call`, its arguments checked."""

    def sample(self, i: int) -> tuple[np.ndarray, int]:
        """Image i, uint8 (bytes,) or an array (H, W, C), and its label, by Python alone."""
        return np.frombuffer(self.encoded(i), np.uint8), int(self.labels[i])

    def _external_call(self, part: "Part") -> ExternalCall:
        """The call where no reader of DALI would do."""
        return ExternalCall(self.sample, self.size, *part, layout="HWC" if self.is_decoded else "")


class Part(NamedTuple):
    """What a shard reads, and in which order: the arguments of `ImageSource.call`."""

    shard_id: int
    num_shards: int
    training: bool
    seed: int

    @property
    def shard(self) -> dict[str, int]:
        """DALI's arguments of the same name."""
        return {"shard_id": self.shard_id, "num_shards": self.num_shards}


class Seen(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a look at one image of a source saw.

    Attributes:
        name: of the image.
        facts: of image_files.inspect.
        label: None where it has none.
        form: of its record, where a container has several.
        place: of its record in its file, where names do not lead to it.
    """

    name: str
    facts: ImageFacts
    label: int | None = None
    form: str = ""
    place: tuple[int, ...] = ()


class Given(NamedTuple):
    """What the user said of a source.

    Attributes:
        path: --input.
        policy: about images that cannot be used.
        annotations, images, label_map: flags of these names.
        on_report: gets what was left out, mended or is remarkable.
    """

    path: str
    policy: ImagePolicy
    annotations: str | None
    images: str | None
    label_map: str | None
    on_report: Callable[[Findings], None]


def judge(
    seen: Sequence[Seen],
    findings: Findings,
    policy: ImagePolicy,
    describe: Callable[[int], str],
) -> np.ndarray:
    """Which images can be used: int64 (K,), their rows.

    Args:
        seen: of all images of the source.
        findings: what was found before; gets the faulty images.
        policy: whether these stop or are left out.
        describe: gives the name of an image, by its row, in messages.

    Raises:
        DataError: images that cannot be used, and the policy is to stop; or none is left.
    """
    kept = []
    for row, image in enumerate(seen):
        fault, detail = image.facts.fault, image.facts.detail
        if fault:
            findings.add(fault, f"{describe(row)}: {detail}" if detail else describe(row))
        else:
            kept.append(row)
    if policy.on_bad_image == "skip":
        findings.skip_images()
        if not kept:
            findings.add("no-images", f"none of {len(seen)} can be read")
    findings.raise_if_stopping()
    return np.array(kept, np.int64)


def check_label(label: int | float | None, whose: str) -> int | None:
    """The label as a whole number; UserError where it is no int32, which is what labels are from here on."""
    if label is None:
        return None
    if not (-(2**31) <= label < 2**31 and label == int(label)):  # a NaN is neither
        raise UserError(f"{whose} has the label {label}: labels are whole numbers within 32 bits")
    return int(label)


def check_one_kind(arrays: Sequence[Seen], origin: str) -> None:
    """UserError where images are arrays of several dtypes (`form`): a batch of DALI has one."""
    first = arrays[0]
    for image in arrays:
        if image.form != first.form:
            raise UserError(
                f"{origin}: {image.name!r} is {image.form} and {first.name!r} is {first.form}: give images of"
                " one kind"
            )


def is_labelled(labels: Sequence[int | None]) -> bool | None:
    """Whether all images have a label; None where some have and some have not, which DALI's readers get
    wrong."""
    found = {label is not None for label in labels}
    return found.pop() if len(found) == 1 else None


def column_of(labels: Sequence[int | None]) -> np.ndarray:
    """int32 (N,), NO_LABEL in place of None."""
    return np.array([NO_LABEL if label is None else label for label in labels], np.int32)


def names_of(labels: np.ndarray, label_map: str | None) -> tuple[str, ...]:
    """The names of labels 0, 1, ... up to the highest of a file; "" for numbers that it leaves out.

    Raises:
        UserError: a label that the file does not name, or numbers that are no labels.
    """
    if label_map is None:
        return ()
    loaded = LabelMap.load(label_map)
    known = dict(zip(loaded.category_ids, loaded.names, strict=True))
    if unknown := sorted(set(labels.tolist()) - known.keys() - {NO_LABEL}):
        raise UserError(f"--label_map={label_map} has no name for the label {unknown[0]}")
    if max(known) > _MAX_NAMED:
        raise UserError(f"--label_map={label_map}: {max(known)} is too high for a label (up to {_MAX_NAMED})")
    return tuple(known.get(i, "") for i in range(max(known) + 1))


def read_file(path: str) -> bytes:
    """A file's content; UserError where it cannot be read."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def is_text(path: str) -> bool:
    """Whether DALI can be given a path: one that is no UTF-8 it cannot."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


_MAX_NAMED = 2**20
