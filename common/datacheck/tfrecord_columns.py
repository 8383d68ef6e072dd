"""Some records of a file, read and taken apart: columns of numbers, and all that is wrong with them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from common.datacheck import images
from common.datacheck.images import ImageFacts
from common.datacheck.tfrecord_example import Example, parse
from common.datacheck.tfrecord_walk import RecordFile
from common.issues import Findings

_PART_BYTES = 2**24  # of data that are in memory at a time, for each thread
_PART_RECORDS = 2048
_BUFFER = 2**18  # bytes, of TensorFlow's reader
_FARTHEST = 2  # fraction of an image: boxes that reach farther are in pixels


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of some records, as in `Annotations` unless said."""

    image_ids: np.ndarray
    image_sizes: np.ndarray
    counts: np.ndarray  # int64 (R,), boxes of each record
    boxes: np.ndarray  # float32 (N, 4) ltrb normalised, as stored
    category_ids: np.ndarray
    is_crowd: np.ndarray
    areas: np.ndarray  # NaN where there is none
    absent: np.ndarray
    is_usable: np.ndarray
    file_names: np.ndarray
    formats: np.ndarray


def parts(file: RecordFile) -> Iterator[tuple[int, int]]:
    """A file's records in runs, [begin, end), that are read at once."""
    begin, offsets = 0, file.spans[:, 0]
    while begin < len(offsets):
        end = int(np.searchsorted(offsets, offsets[begin] + _PART_BYTES))
        end = min(end, begin + _PART_RECORDS)
        yield begin, end
        begin = end


def scan(
    file: RecordFile, begin: int, end: int, known: frozenset[int], inspect: Callable[[bytes], ImageFacts]
) -> tuple[Columns, Findings]:
    """The records [begin, end) of a file as columns, and what is wrong with them.

    Args:
        file: what `tfrecord_walk.walk` found.
        begin, end: records, by their numbers in the file.
        known: the category ids of the label map.
        inspect: looks at an encoded image.
    """
    findings = Findings(file.path)
    examples, facts = [], []
    for number, record in enumerate(contents(file, begin, end, findings), begin):
        name = file.name(number)
        if record is None:
            examples.append(Example(name))
            continue
        example, encoded = parse(record, name, known, findings)
        if encoded is not None:
            facts.append((len(examples), inspect(encoded)))
        examples.append(example)
    columns = columns_of(examples)
    _check_boxes(examples, columns, findings)
    _check_images(examples, columns, facts, findings)
    return columns, findings


def contents(file: RecordFile, begin: int, end: int, findings: Findings) -> list[bytes | None]:
    """The data of the records [begin, end) of a file; None where they are damaged, which is reported."""
    try:
        dataset = tf.raw_ops.TFRecordDatasetV2(
            filenames=[file.path],
            compression_type="",
            buffer_size=_BUFFER,
            byte_offsets=file.spans[begin : begin + 1, 0],
        )
        records = tf.data.experimental.from_variant(dataset, tf.TensorSpec((), tf.string))
        found = records.take(end - begin).batch(end - begin).get_single_element().numpy().tolist()
        if len(found) == end - begin:
            return found
        findings.add("record-file-unreadable", f"{file.path} has changed while it was read")
    except tf.errors.DataLossError:
        if end - begin > 1:
            middle = (begin + end) // 2
            return [
                *contents(file, begin, middle, findings),
                *contents(file, middle, end, findings),
            ]
        place = f"{file.name(begin)} at byte {file.spans[begin, 0]}"
        findings.add(
            "record-damaged", f"{place} has the checksum {file.checksums[begin]:#010x}, not that of its data"
        )
    except tf.errors.OpError as error:  # the file has gone
        findings.add("record-file-unreadable", f"{file.path}: {error.message}")
    return [None] * (end - begin)


def columns_of(examples: Sequence[Example]) -> Columns:
    """The columns of examples; nothing is known about their images yet."""

    def chain(lists: Iterable[Sequence], dtype: type) -> np.ndarray:
        return np.array(list(itertools.chain.from_iterable(lists)), dtype)

    sides = [chain((example.sides[side] for example in examples), np.float32) for side in range(4)]
    return Columns(
        image_ids=np.array([example.image_id for example in examples], np.int64),
        image_sizes=np.array([example.image_size for example in examples], np.int32).reshape(-1, 2),
        counts=np.array([len(example.category_ids) for example in examples], np.int64),
        boxes=np.stack(sides, axis=1),
        category_ids=chain((example.category_ids for example in examples), np.int64),
        is_crowd=chain((example.is_crowd for example in examples), np.bool_),
        areas=chain((example.areas for example in examples), np.float64),
        absent=np.array([example.absent for example in examples], np.uint8),
        is_usable=np.ones(len(examples), np.bool_),
        file_names=np.array([example.file_name for example in examples], object),
        formats=np.full(len(examples), "", object),
    )


def _check_boxes(examples: Sequence[Example], columns: Columns, findings: Findings) -> None:
    box_example = np.repeat(np.arange(len(examples)), columns.counts)
    boxes = columns.boxes
    is_finite = np.isfinite(boxes).all(axis=1)
    is_negative = is_finite & np.any(boxes[:, 2:] < boxes[:, :2], axis=1)
    is_far = is_finite & ~is_negative & np.any(boxes > _FARTHEST, axis=1)
    for kind, which in (
        ("box-not-finite", ~is_finite),
        ("box-negative", is_negative),
        ("box-in-pixels", is_far),
    ):
        for box in np.flatnonzero(which).tolist():
            findings.add(kind, f"{examples[box_example[box]].name} has {box_name(boxes[box])}")


def _check_images(
    examples: Sequence[Example],
    columns: Columns,
    facts: Sequence[tuple[int, ImageFacts]],
    findings: Findings,
) -> None:
    """Fills in the columns `is_usable` and `formats`."""
    rows = [row for row, _ in facts]
    # A size that was reported already is not compared.
    sizes = [
        examples[row].image_size if any(examples[row].image_size) else (fact.height, fact.width)
        for row, fact in facts
    ]
    columns.is_usable[rows] = images.check_images(
        [fact for _, fact in facts],
        np.array(sizes, np.int32).reshape(-1, 2),
        [examples[row].file_name for row in rows],
        lambda i: examples[rows[i]].name,
        findings,
    )
    columns.formats[rows] = [fact.image_format for _, fact in facts]


def box_name(box: np.ndarray) -> str:
    """float32 (4,), a box as records store it, in words."""
    return f"the box xmin, ymin, xmax, ymax = {np.round(box.astype(np.float64), 6).tolist()}"
