"""What holds for every input, looked for by hypothesis: boxes, letterbox, encoding, indexes, sharding."""

import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from nvidia import dali
from nvidia.dali import fn

from common import box_encoder, boxes, dali_ops, letterbox, tfrecord
from common.anchors import Anchors
from common.errors import UserError
from common.loader import steps_per_epoch
from tests.common.test_box_encoder import encode_boxes_tf
from tests.oracle import numpy_boxes, numpy_images

# The same examples on every run: a failure in CI is a failure here.
FIXED = settings(deadline=None, derandomize=True, database=None, max_examples=75)
EXHAUSTIVE = settings(FIXED, max_examples=200)  # where an example costs nothing

PIXELS = st.integers(1, 70_000)  # sides of images
SIZES = st.tuples(st.integers(1, 2048), st.integers(1, 2048))  # of network inputs: height, width


def corners(values: st.SearchStrategy[float], min_rows: int = 0) -> st.SearchStrategy[np.ndarray]:
    """float64 (N, 4) ltrb with left <= right and top <= bottom."""
    arrays = st_numpy.arrays(np.float64, st.tuples(st.integers(min_rows, 8), st.just(4)), elements=values)
    return arrays.map(lambda a: np.sort(a.reshape(-1, 2, 2), axis=1).reshape(-1, 4))


SHARES = st.integers(0, 2**24).map(lambda n: n / 2**24)  # exact in float32
ON_A_GRID = st.integers(0, 24).map(lambda n: n / 24)  # many equal edges, areas and overlaps
ANY_BOXES = corners(st.one_of(SHARES, ON_A_GRID))
FAR_BOXES = corners(st.floats(-10, 10, width=32))


# --- boxes ---


@FIXED
@given(FAR_BOXES)
def test_conversions_undo_each_other(ltrb):
    there, back = boxes.ltrb_to_cxcywh, boxes.cxcywh_to_ltrb
    np.testing.assert_allclose(back(there(ltrb)), ltrb, atol=1e-12)
    np.testing.assert_allclose(there(back(ltrb)), ltrb, atol=1e-12)  # any four numbers will do


@FIXED
@given(FAR_BOXES)
def test_clipping_again_changes_nothing_and_takes_only_what_is_outside(ltrb):
    clipped = np.asarray(boxes.clip(ltrb))
    assert ((clipped >= 0) & (clipped <= 1)).all()
    np.testing.assert_array_equal(boxes.clip(clipped), clipped)
    inside = (ltrb >= 0) & (ltrb <= 1)
    np.testing.assert_array_equal(clipped[inside], ltrb[inside])
    assert (np.asarray(boxes.area(clipped)) <= np.asarray(boxes.area(ltrb))).all()


def iou_by_counting(a, b) -> float:
    """IoU of two boxes whose corners are whole numbers of 24ths: cells that both have, or either has."""
    cells = []
    for box in (a, b):
        left, top, right, bottom = np.rint(np.multiply(box, 24)).astype(int)
        grid = np.zeros((24, 24), bool)
        grid[top:bottom, left:right] = True
        cells.append(grid)
    union = (cells[0] | cells[1]).sum()
    return (cells[0] & cells[1]).sum() / union if union else 0.0


@FIXED
@given(corners(ON_A_GRID), corners(ON_A_GRID))
def test_iou_is_the_share_of_common_cells(a, b):
    expected = [[iou_by_counting(one, other) for other in b] for one in a]
    got = boxes.iou(a[:, None], b[None])
    np.testing.assert_allclose(got, np.reshape(expected, (len(a), len(b))), atol=1e-12)


@FIXED
@given(ANY_BOXES, ANY_BOXES)
def test_iou_is_symmetric_and_a_share(a, b):
    overlap = np.asarray(boxes.iou(a[:, None], b[None]))
    assert overlap.shape == (len(a), len(b))
    assert ((overlap >= 0) & (overlap <= 1 + 1e-12)).all()
    np.testing.assert_allclose(boxes.iou(b[:, None], a[None]), overlap.T, atol=1e-12)
    same = np.asarray(boxes.iou(a, a))
    large = np.asarray(boxes.area(a)) > 2 * boxes.TINY
    np.testing.assert_allclose(same[large], 1)


@FIXED
@given(corners(SHARES, min_rows=1), corners(SHARES, min_rows=1))
def test_the_other_overlaps_take_something_away(a, b):
    a, b = a[:, np.newaxis], b[np.newaxis]
    iou, diou, ciou = (np.asarray(f(a, b)) for f in (boxes.iou, boxes.diou, boxes.ciou))
    slack = 1e-9
    assert (ciou <= diou + slack).all() and (diou <= iou + slack).all() and (diou >= -1 - slack).all()


@FIXED
@given(
    corners(ON_A_GRID, min_rows=1),
    corners(ON_A_GRID, min_rows=1),
    st.floats(0.01, 1000),
    st.floats(-1000, 1000),
    st.floats(-1000, 1000),
)
def test_overlaps_stay_when_both_boxes_move_and_grow_alike(a, b, scale, x, y):
    a, b = a[:, np.newaxis], b[np.newaxis]
    shift = np.array([x, y, x, y])
    for overlap in (boxes.iou, boxes.diou, boxes.ciou):
        before = np.asarray(overlap(a, b))
        after = np.asarray(overlap(a * scale + shift, b * scale + shift))
        flat = ((a[..., 2:] == a[..., :2]) | (b[..., 2:] == b[..., :2])).any(-1)
        np.testing.assert_allclose(after[~flat], before[~flat], atol=1e-6)


# --- letterbox ---


@EXHAUSTIVE
@given(PIXELS, PIXELS, SIZES, st.booleans())
def test_letterbox_shows_the_whole_image_as_large_as_fits(height, width, image_size, centered):
    top, left, new_height, new_width = letterbox.geometry(height, width, image_size, centered)
    for start, length, limit in ((top, new_height, image_size[0]), (left, new_width, image_size[1])):
        assert start >= 0 and length >= 1 and start + length <= limit
        assert start == ((limit - length) // 2 if centered else 0)
    assert new_height == image_size[0] or new_width == image_size[1]
    # Either side is what the scale of the other makes of it, to half a pixel, and never less than one.
    scale = min(image_size[0] / height, image_size[1] / width)
    assert abs(new_height - max(height * scale, 1)) <= 0.5 + 1e-6
    assert abs(new_width - max(width * scale, 1)) <= 0.5 + 1e-6
    place = numpy_images.letterbox((height, width), image_size, centered=centered)
    assert (top, left, new_height, new_width) == place
    turned = letterbox.geometry(width, height, image_size[::-1], centered)
    assert turned == (left, top, new_width, new_height)


@FIXED
@given(corners(SHARES), PIXELS, PIXELS, SIZES, st.booleans())
def test_letterboxed_boxes_come_back(ltrb, height, width, image_size, centered):
    place = letterbox.geometry(height, width, image_size, centered)
    there = np.asarray(letterbox.boxes_to_letterbox(ltrb, place, image_size))
    assert ((there >= -1e-6) & (there <= 1 + 1e-6)).all()
    back = np.asarray(letterbox.boxes_from_letterbox(there, place, image_size))
    # The network input holds float32: where the image is squeezed to a few pixels each counts for more.
    squeeze = np.tile([image_size[1] / place[3], image_size[0] / place[2]], 2)
    assert (np.abs(back - ltrb) <= 5e-7 * squeeze).all()
    corners_px = np.asarray(letterbox.boxes_to_letterbox([0, 0, 1, 1], place, image_size))
    expected = [place[1], place[0], place[1] + place[3], place[0] + place[2]]
    np.testing.assert_allclose(corners_px * [*image_size[::-1], *image_size[::-1]], expected, atol=1e-3)


# --- encoding and decoding ---

ANCHORS = Anchors(3, 6, 2, [1.0, 2.0, 0.5], 3.0, (48, 80))
MAX_INSTANCES = 6  # fewer than there may be boxes


@pytest.fixture(scope="module")
def encode():
    """float32 (N, 4), int32 (N,) -> what the DALI graph makes of them: padded boxes and flat targets."""
    pipe = dali.Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipe:
        nodes = [fn.external_source(name=name) for name in ("boxes", "labels")]
        encoded = box_encoder.encode_boxes(*nodes, ANCHORS, MAX_INSTANCES)
        pipe.set_outputs(*tf.nest.flatten(encoded))
    pipe.build()

    def call(ltrb, labels):
        pipe.feed_input("boxes", [ltrb])
        pipe.feed_input("labels", [labels])
        return flat([np.array(output.at(0)) for output in pipe.run()])

    return call


def flat(values):
    """(positives, padded boxes, padded classes, class targets (A,), box targets (A, 4))."""
    levels = len(ANCHORS.levels)
    classes, offsets = values[3 : 3 + levels], values[3 + levels :]
    return (
        *values[:3],
        np.concatenate([level.reshape(-1) for level in classes]),
        np.concatenate([level.reshape(-1, 4) for level in offsets]),
    )


# Of several kinds, so that boxes compete for anchors: any, on a grid, equal to anchors, without area.
ROWS = st.one_of(
    *[corners(values, 1).map(lambda a: a[0]) for values in (SHARES, ON_A_GRID)],
    st.integers(0, ANCHORS.num_anchors - 1).map(lambda i: ANCHORS.boxes_normalized[i]),
)
ENCODABLE = st.lists(ROWS, max_size=10).map(lambda rows: np.float32(rows).reshape(-1, 4))


@EXHAUSTIVE
@given(ltrb=ENCODABLE, labels=st.lists(st.integers(1, 9), min_size=10, max_size=10))
def test_targets_say_where_the_boxes_are(encode, ltrb, labels):
    labels = np.array(labels[: len(ltrb)], np.int32)
    positives, padded, padded_classes, classes, offsets = encode(ltrb, labels)
    kept, kept_classes = padded[padded_classes >= 0], padded_classes[padded_classes >= 0]

    # The largest of those with an area.
    areas, kept_areas = ((x[:, 2:] - x[:, :2]).prod(1) for x in (ltrb, kept))
    largest = np.sort(areas[areas > 0])[::-1][:MAX_INSTANCES]
    np.testing.assert_array_equal(np.sort(kept_areas)[::-1], largest)
    pairs = {(*box, label - 1) for box, label in zip(ltrb.tolist(), labels.tolist(), strict=True)}
    assert pairs >= {(*box, number) for box, number in zip(kept.tolist(), kept_classes.tolist(), strict=True)}

    is_positive = classes >= 0
    assert positives == is_positive.sum() and not offsets[~is_positive].any()
    owners = numpy_boxes.match(kept, ANCHORS.boxes_normalized)
    np.testing.assert_array_equal(is_positive, owners >= 0)
    np.testing.assert_array_equal(classes[is_positive], kept_classes[owners[is_positive]])
    decoded = np.asarray(box_encoder.decode_boxes(offsets, ANCHORS))
    np.testing.assert_allclose(decoded[is_positive], kept[owners[is_positive]], atol=1e-5)
    np.testing.assert_allclose(decoded[~is_positive], ANCHORS.boxes_normalized[~is_positive], atol=1e-6)

    # A box without an anchor has lost the one that it overlaps most.
    if len(kept):
        overlap = np.asarray(boxes.iou(kept[:, None], ANCHORS.boxes_normalized[None]))
        for index in set(range(len(kept))) - set(owners.tolist()):
            best = overlap[index] >= overlap[index].max() - 1e-5
            assert (owners[best] >= 0).any()


@FIXED
@given(ltrb=ENCODABLE)
def test_the_loader_without_dali_gives_the_same_targets(encode, ltrb):
    labels = np.arange(1, len(ltrb) + 1, dtype=np.int32)
    encoded = encode_boxes_tf(tf.constant(ltrb), tf.constant(labels), ANCHORS, MAX_INSTANCES)
    other = flat([value.numpy() for value in tf.nest.flatten(encoded)])
    for one, two in zip(encode(ltrb, labels), other, strict=True):
        assert one.shape == two.shape
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


# --- indexes ---

HEADER, FOOTER = 12, 4  # bytes of a record before and after its data: length, two checksums


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("records") / "data.tfrecord"


def write_records(path: pathlib.Path, sizes: list[int]) -> list[int]:
    """Writes records of so many bytes; returns where each begins, and the end."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number, size in enumerate(sizes):
            writer.write(bytes(number + i & 255 for i in range(size)))
    return np.cumsum([0, *(size + HEADER + FOOTER for size in sizes)]).tolist()


def spans_of(path: pathlib.Path) -> list[tuple[int, int]]:
    return [(int(offset), int(size)) for offset, size in tfrecord.record_spans(path)]


RECORDS = st.lists(st.integers(0, 300), min_size=1, max_size=12)


@FIXED
@given(sizes=RECORDS)
def test_spans_tile_the_file_and_the_index_says_so(path, sizes):
    starts = write_records(path, sizes)
    expected = list(zip(starts[:-1], np.diff(starts).tolist(), strict=True))
    assert spans_of(path) == expected
    index = tfrecord.write_index(path)
    lines = pathlib.Path(index).read_text().splitlines()
    assert [tuple(map(int, line.split())) for line in lines] == expected


@FIXED
@given(sizes=RECORDS, data=st.data())
def test_a_file_cut_off_anywhere_is_found_or_whole_records_are_left(path, sizes, data):
    starts = write_records(path, sizes)
    end = data.draw(st.integers(0, starts[-1] - 1))
    path.write_bytes(path.read_bytes()[:end])
    if end in starts[1:]:
        left = starts[: starts.index(end) + 1]
        assert spans_of(path) == list(zip(left[:-1], np.diff(left).tolist(), strict=True))
    else:
        with pytest.raises(UserError):
            tfrecord.record_spans(path)


@FIXED
@given(sizes=RECORDS, data=st.data())
def test_any_flipped_bit_of_a_header_is_found(path, sizes, data):
    starts = write_records(path, sizes)
    content = bytearray(path.read_bytes())
    place = data.draw(st.sampled_from(starts[:-1])) + data.draw(st.integers(0, HEADER - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(UserError):
        tfrecord.record_spans(path)


# --- sharding ---


def test_shards_are_disjoint_complete_and_nearly_equal():
    for size in range(1, 51):
        for ranks in range(1, 9):
            parts = [range(*dali_ops.shard_range(size, rank, ranks)) for rank in range(ranks)]
            assert [image for part in parts for image in part] == list(range(size))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@EXHAUSTIVE
@given(st.integers(1, 200_000), st.integers(1, 512), st.integers(1, 300))
def test_every_rank_takes_the_same_steps_and_no_image_is_left_out(size, ranks, batch_size):
    assume(ranks <= size)
    lengths = np.diff([dali_ops.shard_range(size, rank, ranks)[0] for rank in range(ranks)] + [size])
    assert lengths.sum() == size and lengths.min() >= 1
    steps = steps_per_epoch(size, ranks * batch_size, training=False)
    # As many batches as the longest part needs, and no rank makes more.
    assert steps == max(math.ceil(length / batch_size) for length in lengths.tolist())
    training = steps_per_epoch(size, ranks * batch_size, training=True)
    assert training == 1 or training * ranks * batch_size <= size < (training + 1) * ranks * batch_size
