"""What all sources of images have in common, and how their images are checked."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from common.dali_ops import check_shards
from common.datacheck import images
from common.datacheck.images import ImageFacts, ImagePolicy
from common.datacheck.issues import Issues
from common.errors import UserError
from common.files import load_cached, save_cached
from common.labels import LabelMap
from tools.preprocessing.reading import Call, Part, PythonCall, ReaderCall

NO_LABEL = -1
_MAX_NAMED = 2**20  # a label map with a higher label would need a table of that size
_VERSION = 2  # of Image and of the checks: raise it when they change


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSource:
    """Images in a fixed order, from files or containers, each with a name and perhaps a label.

    All were checked before, and can be used.

    Attributes:
        kind: as in --source.
        names: one for each image, for messages and output files: as the data have it, so it may be repeated,
            or lead out of a directory.
        labels: int32 (size,), NO_LABEL where the source has none.
        load: position -> uint8 (bytes,), the encoded image; or an array (H, W, C). Without DALI.
        reader: DALI's reader of these images; None where no reader of DALI reads them correctly.
        label_names: of the labels 0, 1, ...; () where they have none.
        is_decoded: images are arrays.
        files: the files that are read.
        can_shuffle: the images can be read in any order.
    """

    kind: str
    names: Sequence[str]
    labels: np.ndarray
    load: Callable[[int], np.ndarray]
    reader: ReaderCall | None = None
    label_names: Sequence[str] = ()
    is_decoded: bool = False
    files: Sequence[str] = ()
    can_shuffle: bool = True

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.names)

    def call(self, *, shard_id: int = 0, num_shards: int = 1, training: bool = False, seed: int = 0) -> Call:
        """What `reading.in_graph` and `in_dynamic` take to read the images.

        Args:
            shard_id: the part to read, the rank.
            num_shards: number of parts, the number of ranks.
            training: shuffled without end, or in order (common/readers.py).
            seed: of the shuffling, the same on all ranks.

        Raises:
            UserError: fewer images than shards; an iterable that cannot be shuffled.
        """
        check_shards(self.size, num_shards, seed)
        part = Part(shard_id, num_shards, training, seed)
        if self.reader is not None:
            return self.reader.of_part(part)
        if training and not self.can_shuffle:
            raise UserError(
                f"--source={self.kind}: an iterable cannot be shuffled: give a sequence, or a function that"
                " takes SampleInfo"
            )
        return PythonCall(self.load, self.labels, part, "HWC" if self.is_decoded else "")


class SourceFlags(NamedTuple):
    """The flags that describe a source.

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
    on_report: Callable[[Issues], None]


class Image(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One image of a source, and what a check of it found.

    Attributes:
        name: of the image.
        file: path of the file that holds it; "" where there is none.
        label: None where it has none.
        place: where it lies in its file; what the numbers mean depends on the source.
        form: of its record or array, where a source has several.
        fault: a kind of issues.KINDS; "" for an image that can be used.
        detail: which image it is and what is wrong with it.
    """

    name: str
    file: str = ""
    label: int | None = None
    place: tuple[int, ...] = ()
    form: str = ""
    fault: str = ""
    detail: str = ""

    def judged(self, facts: ImageFacts, description: str) -> "Image":
        """The same with what is wrong with it; `description` names it in messages."""
        if not facts.fault:
            return self
        detail = f"{description}: {facts.detail}" if facts.detail else description
        return msgspec.structs.replace(self, fault=facts.fault, detail=detail)

    def checked(self, encoded: bytes | memoryview, description: str, policy: ImagePolicy) -> "Image":
        """The same with what is wrong with its encoded bytes."""
        facts = images.inspect(encoded, decode=policy.decode, max_megapixels=policy.max_megapixels)
        return self.judged(facts, description)


def make_source(
    kind: str,
    flags: SourceFlags,
    found: Sequence[Image],
    load: Callable[[Image], np.ndarray],
    make_reader: Callable[[Sequence[Image]], ReaderCall | None],
    *,
    issues: Issues | None = None,
    label_names: Sequence[str] = (),
    is_decoded: bool = False,
    can_shuffle: bool = True,
) -> ImageSource:
    """The source of the images that can be used; reports the others.

    Args:
        kind: as in --source.
        flags: of the source.
        found: all its images.
        load: reads one by Python.
        make_reader: makes DALI's reader of the images that are kept; None where there is none.
        issues: what was found before.
        label_names, is_decoded, can_shuffle: as in `ImageSource`; names come from --label_map by default.

    Raises:
        DataError: images that cannot be used, where --on_bad_image=stop; or none can.
        UserError: arrays of several dtypes.
    """
    issues = issues or Issues(flags.path)
    for image in found:
        if image.fault:
            issues.add(image.fault, image.detail)
    kept = [image for image in found if not image.fault]
    if flags.policy.on_bad_image == "skip":
        issues.skip_images()
        if not kept:
            issues.add("no-images", f"none of {len(found)} can be read")
    issues.raise_if_stopping()
    flags.on_report(issues)
    for image in kept if is_decoded else ():
        if image.form != kept[0].form:  # a batch of DALI has one dtype
            raise UserError(
                f"{flags.path}: {image.name!r} is {image.form} and {kept[0].name!r} is {kept[0].form}: give"
                " images of one kind"
            )
    labels = np.array([NO_LABEL if image.label is None else image.label for image in kept], np.int32)
    files = list(dict.fromkeys(image.file for image in kept if image.file))
    return ImageSource(
        kind,
        [image.name for image in kept],
        labels,
        lambda i: load(kept[i]),
        make_reader(kept) if are_utf8(files) else None,
        label_names or _label_names(labels, flags.label_map),
        is_decoded,
        files,
        can_shuffle,
    )


def remembered(
    file: str, policy: ImagePolicy, check: Callable[[str, ImagePolicy], Sequence[Image]]
) -> list[Image]:
    """`check(file, policy)`, kept in the cache until the file changes; UserError where it is no file."""
    try:
        status = os.stat(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    if not os.path.isfile(file):
        raise UserError(f"{file} is no regular file")
    if not status.st_size:
        raise UserError(f"{file} is empty (0 bytes): copy or write it again")
    state = (status.st_size, status.st_mtime_ns, status.st_ino, policy.decode, policy.max_megapixels)
    key = f"{os.path.abspath(file)} {state}"
    if not are_utf8([file]):  # which the cache cannot hold
        return list(check(file, policy))
    name = f"images-{hashlib.sha256(f'{_VERSION} {key}'.encode()).hexdigest()[:32]}.msgpack"
    content = load_cached(name)
    if content:
        return msgspec.msgpack.decode(content, type=list[Image])
    found = list(check(file, policy))
    save_cached(name, msgspec.msgpack.encode(found))
    return found


def check_label(label: int | float | None, owner: str) -> int | None:
    """The label as a whole number; UserError where it is not an int32."""
    if label is None:
        return None
    if not (-(2**31) <= label < 2**31 and label == int(label)):  # a NaN is neither
        raise UserError(f"{owner} has the label {label}: labels are whole numbers within 32 bits")
    return int(label)


def _label_names(labels: np.ndarray, label_map: str | None) -> tuple[str, ...]:
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


def read_bytes(path: str, offset: int = 0, size: int = -1) -> np.ndarray:
    """Part of a file, uint8 (size,); UserError where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return np.frombuffer(stream.read(size), np.uint8)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def mapped(path: str) -> memoryview:
    """The content of a file that is not empty, read when it is used."""
    return memoryview(np.memmap(pathlib.Path(path), np.uint8, mode="r"))


def are_utf8(paths: Sequence[str]) -> bool:
    """Whether DALI can open the paths: it takes UTF-8 only."""
    try:
        "".join(paths).encode()
    except UnicodeEncodeError:
        return False
    return True


def are_labelled(found: Sequence[Image]) -> bool | None:
    """Whether all images have a label; None where some have and some have not, which DALI's readers get
    wrong."""
    labelled = {image.label is not None for image in found}
    return labelled.pop() if len(labelled) == 1 else None
