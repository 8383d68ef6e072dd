import numpy as np
import pytest
import tensorflow as tf
from nvidia.dali import Pipeline, fn, types

from common import box_encoder, dali_ops, tf_readers
from common.anchors import Anchors

RATIOS = [1.0, 2.0, 0.5]
D0 = Anchors(3, 7, 3, RATIOS, 4.0, (128, 128))
WIDE = Anchors(3, 7, 3, RATIOS, 4.0, (96, 160))
ODD = Anchors(3, 7, 3, RATIOS, 5.0, (130, 77))  # no multiple of any stride, and the anchor scale of d7
D7X = Anchors(3, 8, 3, RATIOS, 4.0, (160, 128))  # one level more
SPARSE = Anchors(3, 5, 1, [1.0], 0.1, (128, 96))  # most boxes touch no anchor
ALL_ANCHORS = pytest.mark.parametrize("anchors", [D0, WIDE, ODD, D7X], ids=["d0", "wide", "odd", "d7x"])

NO_BOXES = np.zeros((0, 4), np.float32)
INF, NAN = np.inf, np.nan


# --- inputs ---


def random_boxes(rng, count, largest=0.4):
    center, size = rng.random((count, 2)), rng.uniform(0.01, largest, (count, 2))
    return np.float32(np.concatenate([center - size / 2, center + size / 2], axis=1).clip(0, 1))


def grid_boxes(rng, count):
    """Corners on a coarse grid: many anchors are equally good, and many boxes too."""
    cells = rng.choice([4, 8, 16])
    left_top = rng.integers(0, cells, (count, 2))
    return np.float32(np.concatenate([left_top, left_top + rng.integers(1, 4, (count, 2))], axis=1) / cells)


def hard_images(rng, anchors):
    """Boxes of many images, all of a kind that has gone wrong somewhere."""
    images = [
        NO_BOXES,
        np.float32([[0, 0, 1, 1]]),
        random_boxes(rng, 1),
        random_boxes(rng, 500, largest=0.1),
        np.repeat(random_boxes(rng, 3), 4, axis=0),  # identical
        random_boxes(rng, 30, largest=0.011),  # tiny: every match is a forced one
        np.float32([[0.3, 0.3, 0.3 + 1e-6, 0.3 + 1e-6], [0.3, 0.3, 0.3 + 1e-4, 0.9]]),
        np.float32([[1.5, 1.5, 1.6, 1.6]]),  # no overlap with any anchor
        anchors.boxes_normalized[rng.integers(0, anchors.num_anchors, 20)],  # perfect matches
        np.float32([[-0.3, -0.2, 1.1, 1.4], [-0.01, 0.5, 0.2, 0.6]]),  # reaching outside
    ]
    images += [random_boxes(rng, int(count)) for count in rng.integers(1, 60, 6)]
    images += [grid_boxes(rng, int(count)) for count in rng.integers(1, 60, 6)]
    return images


def random_labels(rng, images):
    return [rng.integers(1, 91, len(boxes)).astype(np.int32) for boxes in images]


# --- what the rule says, in NumPy ---


def largest(boxes, count):
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order = sorted(range(len(boxes)), key=lambda i: (-areas[i], i))
    return sorted(order[:count])


def overlaps(boxes, anchors):
    """float32 (N, A): the IoU of every box with every anchor."""
    a, b = boxes[:, np.newaxis], anchors.boxes_normalized
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    intersection = np.where((width > 0) & (height > 0), width * height, np.float32(0))
    area_a, area_b = [(x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1]) for x in (a, b)]
    return intersection / (area_a + area_b - intersection)


def owners_by_the_rule(boxes, anchors):
    """(A,) the index of the box that owns each anchor, -1 for background."""
    owners = np.full(anchors.num_anchors, -1)
    if not len(boxes):
        return owners
    iou = overlaps(boxes, anchors)
    for anchor, column in enumerate(iou.T):
        if column.max() > 0.5:
            owners[anchor] = np.flatnonzero(column == column.max())[-1]
    for i, row in enumerate(iou):
        owners[np.flatnonzero(row == row.max())[-1]] = i
    return owners


def targets_by_the_rule(boxes, labels, anchors):
    """Flat class targets (A,) and box targets (A, 4), float64."""
    owners = owners_by_the_rule(boxes, anchors)
    positive = owners >= 0
    classes = np.full(anchors.num_anchors, -1)
    classes[positive] = labels[owners[positive]] - 1
    deltas = np.zeros((anchors.num_anchors, 4))
    left, top, right, bottom = boxes[owners[positive]].astype(np.float64).T
    prior_left, prior_top, prior_right, prior_bottom = anchors.boxes_normalized[positive].astype(np.float64).T
    height, width = prior_bottom - prior_top, prior_right - prior_left
    deltas[positive, 0] = ((top + bottom) - (prior_top + prior_bottom)) / 2 / height
    deltas[positive, 1] = ((left + right) - (prior_left + prior_right)) / 2 / width
    deltas[positive, 2] = np.log((bottom - top) / height)
    deltas[positive, 3] = np.log((right - left) / width)
    return classes, deltas


# --- running the code ---


def run_graph(function, *inputs, device="cpu"):
    """Calls `function` in a DALI graph on lists of one array per sample; the outputs of each sample."""
    pipeline = Pipeline(
        batch_size=len(inputs[0]),
        num_threads=2,
        device_id=0 if device == "gpu" else None,
        prefetch_queue_depth=1,
    )
    with pipeline:
        nodes = [fn.external_source(source=[batch], cycle=True, batch=True) for batch in inputs]
        if device == "gpu":
            nodes = [node.gpu() for node in nodes]
        pipeline.set_outputs(*function(*nodes))
    pipeline.build()
    outputs = [output.as_cpu() for output in pipeline.run()]
    return [[np.array(output.at(i)) for output in outputs] for i in range(len(inputs[0]))]


def as_encoded(values, anchors):
    count = len(anchors.levels)
    return box_encoder.EncodedBoxes(*values[:3], values[3 : 3 + count], values[3 + count :])


def encode(images, labels, anchors, max_instances=100, device="cpu"):
    def graph(boxes, labels):
        encoded = box_encoder.encode_boxes(boxes, labels, anchors, max_instances)
        return *encoded[:3], *encoded.class_targets, *encoded.box_targets

    return [as_encoded(values, anchors) for values in run_graph(graph, images, labels, device=device)]


def encode_boxes_tf(boxes, labels, anchors, max_instances=100):
    """`encode_boxes` for one image, as the loader without DALI does it."""
    boxes, labels = tf_readers.keep_largest_tf(*tf_readers.drop_small_boxes_tf(boxes, labels), max_instances)
    boxes, classes = tf_readers.pad_boxes_tf(boxes, labels, max_instances)
    batch = box_encoder.encode_batch_tf(boxes[tf.newaxis], classes[tf.newaxis], anchors)
    return tf.nest.map_structure(lambda tensor: tensor[0], batch)


def encode_tf(images, labels, anchors, max_instances=100):
    """Through tf.data, as the loader without DALI does."""

    def generate():
        yield from zip(images, labels, strict=True)

    signature = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature).map(
        lambda boxes, labels: encode_boxes_tf(boxes, labels, anchors, max_instances)
    )
    for spec, shape in zip(
        tf.nest.flatten(dataset.element_spec), expected_shapes(anchors, max_instances), strict=True
    ):
        assert tuple(spec.shape) == shape
    return [tf.nest.map_structure(np.asarray, encoded) for encoded in dataset]


def expected_shapes(anchors, max_instances):
    k = anchors.anchors_per_location
    cells = anchors.feature_sizes
    return [
        (),
        (max_instances, 4),
        (max_instances,),
        *[(*s, k) for s in cells],
        *[(*s, 4 * k) for s in cells],
    ]


def flat_targets(encoded):
    classes = np.concatenate([level.reshape(-1) for level in encoded.class_targets])
    deltas = np.concatenate([level.reshape(-1, 4) for level in encoded.box_targets])
    return classes, deltas


# --- encoding ---


@ALL_ANCHORS
@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_targets_follow_the_rule(run, anchors):
    rng = np.random.default_rng(0)
    images = hard_images(rng, anchors)
    labels = random_labels(rng, images)
    for boxes, boxes_labels, encoded in zip(images, labels, run(images, labels, anchors), strict=True):
        kept = largest(boxes, 100)
        boxes, boxes_labels = boxes[kept], boxes_labels[kept]

        arrays = [*encoded[:3], *encoded.class_targets, *encoded.box_targets]
        assert [array.shape for array in arrays] == expected_shapes(anchors, 100)
        is_integer = [False, False, True] + [True] * len(anchors.levels) + [False] * len(anchors.levels)
        assert [a.dtype for a in arrays] == [np.int32 if integer else np.float32 for integer in is_integer]

        expected_classes, expected_offsets = targets_by_the_rule(boxes, boxes_labels, anchors)
        classes, deltas = flat_targets(encoded)
        np.testing.assert_array_equal(classes, expected_classes)
        np.testing.assert_allclose(deltas, expected_offsets, rtol=1e-5, atol=2e-6)
        assert encoded.num_positives == np.sum(expected_classes >= 0)

        np.testing.assert_array_equal(encoded.boxes[: len(boxes)], boxes)
        np.testing.assert_array_equal(encoded.boxes[len(boxes) :], -1)
        np.testing.assert_array_equal(encoded.classes[: len(boxes)], boxes_labels - 1)
        np.testing.assert_array_equal(encoded.classes[len(boxes) :], -1)


@ALL_ANCHORS
def test_tensorflow_equals_dali(anchors):
    rng = np.random.default_rng(1)
    images = [boxes for _ in range(4) for boxes in hard_images(rng, anchors)]
    labels = random_labels(rng, images)
    both = zip(encode(images, labels, anchors), encode_tf(images, labels, anchors), strict=True)
    for dali, tensorflow in both:
        for a, b in zip(tf.nest.flatten(dali), tf.nest.flatten(tensorflow), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("anchors", [WIDE, SPARSE], ids=["wide", "sparse"])
def test_a_batch_is_its_images_one_by_one(anchors):
    """Equal boxes on several images do not compete."""
    rng = np.random.default_rng(12)
    images = [boxes for boxes in hard_images(rng, anchors) if not len(boxes) or boxes.max() <= 1]
    images = [boxes.clip(0, 1)[:40] for boxes in images] + [grid_boxes(rng, 40)] * 2
    labels = random_labels(rng, images)
    alone = encode(images, labels, anchors, max_instances=40)
    boxes, classes = np.stack([e.boxes for e in alone]), np.stack([e.classes for e in alone])
    together = box_encoder.encode_batch_tf(tf.constant(boxes), tf.constant(classes), anchors)
    for index, expected in enumerate(alone):
        for a, b in zip(tf.nest.flatten(expected), tf.nest.flatten(together), strict=True):
            np.testing.assert_allclose(a, b[index], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_each_target_stands_at_the_place_of_its_anchor(run):
    k = D7X.anchors_per_location
    places, images = [], []
    for level, (height, width) in enumerate(D7X.feature_sizes):
        row, column, anchor = height // 2, width - 1, 5
        start = sum(h * w * k for h, w in D7X.feature_sizes[:level])
        images.append(D7X.boxes_normalized[[start + (row * width + column) * k + anchor]])
        places.append((level, row, column, anchor))
    labels = [np.int32([7 + level]) for level, *_ in places]
    for (level, row, column, anchor), encoded in zip(places, run(images, labels, D7X), strict=True):
        assert encoded.class_targets[level][row, column, anchor] == 7 + level - 1
        deltas = encoded.box_targets[level][row, column, 4 * anchor : 4 * anchor + 4]
        np.testing.assert_allclose(deltas, 0, atol=1e-6)


@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_offsets_are_in_the_order_dy_dx_dh_dw(run):
    # An anchor of 32 x 32 pixels, and a box that lies 2 below and 4 right of it and is 30 tall and 36 wide.
    (index,) = np.flatnonzero(np.all(D0.boxes == [36, 44, 68, 76], axis=1))
    top, left, bottom, right = 36 + 2 + 1, 44 + 4 - 2, 68 + 2 - 1, 76 + 4 + 2
    box = np.float32([[left, top, right, bottom]]) / 128
    (encoded,) = run([box], [np.int32([1])], D0)
    np.testing.assert_allclose(
        flat_targets(encoded)[1][index], [2 / 32, 4 / 32, np.log(30 / 32), np.log(36 / 32)], atol=1e-5
    )


@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_an_iou_of_exactly_one_half_is_background(run):
    squares = Anchors(3, 3, 1, [1.0], 4.0, (128, 128))  # of 32 pixels, every 8 pixels
    # Two squares tall: five anchors inside it have an IoU of 1/2, and the last of them is forced.
    exactly = np.float32([[44, 36, 76, 100]]) / 128
    shorter = np.float32([[44, 36, 76, 99.9]]) / 128
    exactly, shorter = run([exactly, shorter], [np.int32([1])] * 2, squares)
    (positive,) = np.flatnonzero(flat_targets(exactly)[0] == 0)
    np.testing.assert_array_equal(squares.boxes[positive], [68, 44, 100, 76])
    positive = np.flatnonzero(flat_targets(shorter)[0] == 0)
    np.testing.assert_array_equal(squares.boxes[positive, 0], [36, 44, 52, 60])


@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_a_batch_without_any_box(run):
    for encoded in run([NO_BOXES] * 3, [np.zeros(0, np.int32)] * 3, WIDE):
        arrays = [*encoded[:3], *encoded.class_targets, *encoded.box_targets]
        assert [array.shape for array in arrays] == expected_shapes(WIDE, 100)
        assert encoded.num_positives == 0
        classes, deltas = flat_targets(encoded)
        assert (classes == -1).all()
        assert (deltas == 0).all()
        assert (encoded.boxes == -1).all()
        assert (encoded.classes == -1).all()


@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_degenerate_boxes_leave_no_trace(run):
    good = np.float32([[0.1, 0.1, 0.4, 0.4], [0.5, 0.5, 0.9, 0.8]])
    bad = np.float32([[0.5, 0.5, 0.5, 0.9], [0.8, 0.8, 0.2, 0.2], [NAN, 0, 1, 1], [0, 0, INF, 1]])
    mixed, labels = np.concatenate([bad[:2], good[:1], bad[2:], good[1:]]), np.int32([9, 9, 1, 9, 9, 2])
    (with_bad,) = run([mixed], [labels], D0)
    (without,) = run([good], [np.int32([1, 2])], D0)
    for a, b in zip(tf.nest.flatten(with_bad), tf.nest.flatten(without), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_padded_boxes_and_targets_keep_the_same_largest_boxes(run):
    rng = np.random.default_rng(2)
    boxes = random_boxes(rng, 40)
    labels = np.arange(1, 41, dtype=np.int32)
    (encoded,) = run([boxes], [labels], D0, max_instances=7)
    kept = largest(boxes, 7)
    np.testing.assert_array_equal(encoded.boxes, boxes[kept])
    np.testing.assert_array_equal(encoded.classes, kept)
    assert set(flat_targets(encoded)[0]) <= {-1, *kept}


# --- dropping and keeping ---


def run_filter_tf(function, images, labels):
    pairs = zip(map(tf.constant, images), map(tf.constant, labels), strict=True)
    return [[np.asarray(output) for output in function(*pair)] for pair in pairs]


def bits(array):
    return np.asarray(array, np.float32).view(np.int32)


FILTERS = pytest.mark.parametrize("run", ["dali", "tensorflow"])


def run_drop(run, images, labels, min_size=(0.0, 0.0)):
    if run == "dali":
        return run_graph(lambda b, n: dali_ops.drop_small_boxes(b, n, min_size), images, labels)
    return run_filter_tf(lambda b, n: tf_readers.drop_small_boxes_tf(b, n, min_size), images, labels)


def run_keep(run, images, labels, count):
    if run == "dali":
        return run_graph(lambda b, n: dali_ops.keep_largest(b, n, count), images, labels)
    return run_filter_tf(lambda b, n: tf_readers.keep_largest_tf(b, n, count), images, labels)


@FILTERS
def test_drop_small_boxes_drops_what_is_not_a_box(run):
    one_of_four = np.eye(4, dtype=bool)
    not_finite = [
        np.where(place, value, [0.2, 0.2, 0.8, 0.8]) for value in (NAN, INF, -INF) for place in one_of_four
    ]
    bad = [
        [0.2, 0.2, 0.2, 0.8],  # no width
        [0.2, 0.2, 0.8, 0.2],  # no height
        [0, 0, 0, 0],
        [0.8, 0.2, 0.2, 0.8],  # inverted
        [0.2, 0.8, 0.8, 0.2],
        *not_finite,
        [INF, INF, INF, INF],
        [-INF, -INF, INF, INF],
        [-3e38, 0, 3e38, 1],  # finite, but not its width
    ]
    good = [[-0.0, 0.0, 1.0, 1.0], [0.5, 0.5, np.nextafter(np.float32(0.5), 1), 0.6], [-2, -2, 3, 3]]
    mixed = np.float32(bad[:7] + good[:1] + bad[7:] + good[1:])
    is_good = np.isin(np.arange(len(mixed)), [7, len(mixed) - 2, len(mixed) - 1])
    labels = np.arange(1, len(mixed) + 1, dtype=np.int32)
    images = [mixed, np.float32(bad), np.float32(good), NO_BOXES]
    results = run_drop(run, images, [labels[: len(boxes)] for boxes in images])

    np.testing.assert_array_equal(bits(results[0][0]), bits(mixed[is_good]))  # bit by bit: -0.0 stays -0.0
    np.testing.assert_array_equal(results[0][1], labels[is_good])
    assert results[1][0].shape == (0, 4)
    np.testing.assert_array_equal(bits(results[2][0]), bits(good))
    assert results[3][0].shape == (0, 4)
    for boxes, boxes_labels in results:
        assert boxes_labels.shape == boxes.shape[:1]
        assert (boxes.dtype, boxes_labels.dtype) == (np.float32, np.int32)


@FILTERS
def test_drop_small_boxes_measures_height_and_width_apart(run):
    boxes = np.float32([[0, 0, 0.25, 0.5], [0, 0, 0.125, 0.5], [0, 0, 0.25, 0.25], [0.5, 0.5, 0.75, 1]])
    ((kept, labels),) = run_drop(
        run, [boxes], [np.int32([1, 2, 3, 4])], min_size=(0.5, 0.25)
    )  # height, width
    np.testing.assert_array_equal(labels, [1, 4])  # what is just large enough stays
    np.testing.assert_array_equal(kept, boxes[[0, 3]])


@FILTERS
@pytest.mark.parametrize("count", [1, 10, 100])
def test_keep_largest_is_stable(run, count):
    rng = np.random.default_rng(3)
    images = [random_boxes(rng, n) for n in (500, 101, 100, 99, 1)]
    images += [NO_BOXES, np.repeat(random_boxes(rng, 1), 150, axis=0), grid_boxes(rng, 300)]
    labels = random_labels(rng, images)
    results = run_keep(run, images, labels, count)
    for boxes, boxes_labels, (kept, kept_labels) in zip(images, labels, results, strict=True):
        expected = largest(boxes, count)
        np.testing.assert_array_equal(kept, boxes[expected].reshape(-1, 4))
        np.testing.assert_array_equal(kept_labels, boxes_labels[expected])


@FILTERS
def test_filters_on_a_batch_without_any_box(run):
    images, labels = [NO_BOXES] * 2, [np.zeros(0, np.int32)] * 2
    for boxes, boxes_labels in run_drop(run, images, labels) + run_keep(run, images, labels, 10):
        assert boxes.shape == (0, 4)
        assert boxes_labels.shape == (0,)


# --- decoding ---


@ALL_ANCHORS
def test_decoding_undoes_encoding(anchors):
    rng = np.random.default_rng(4)
    images = [random_boxes(rng, 20, largest=0.9) for _ in range(3)]
    encoded = encode(images, random_labels(rng, images), anchors)
    batched = [np.stack(levels) for levels in zip(*[one.box_targets for one in encoded], strict=True)]
    decoded = np.asarray(box_encoder.decode_boxes(batched, anchors))
    assert decoded.shape == (3, anchors.num_anchors, 4)
    for boxes, result in zip(images, decoded, strict=True):
        owners = owners_by_the_rule(boxes, anchors)
        positive = owners >= 0
        np.testing.assert_allclose(result[positive], boxes[owners[positive]], atol=1e-5)
        np.testing.assert_allclose(result[~positive], anchors.boxes_normalized[~positive], atol=1e-6)


def test_decoding_takes_any_leading_shape_and_computes_in_float32():
    deltas = np.random.default_rng(5).normal(size=(2, 3, WIDE.num_anchors, 4)).astype(np.float16)
    decoded = box_encoder.decode_boxes(deltas, WIDE)
    assert decoded.dtype == tf.float32
    np.testing.assert_allclose(decoded[1, 2], box_encoder.decode_boxes(deltas[1, 2].astype(np.float32), WIDE))


def test_split_anchors_keeps_each_anchors_values_together():
    per_level = [np.arange(2 * h * w * 9 * 5).reshape(2, h, w, 45) for h, w in WIDE.feature_sizes]
    flat = np.concatenate(box_encoder.split_anchors(per_level, 5), axis=1)
    assert flat.shape == (2, WIDE.num_anchors, 5)
    row, column, anchor = 3, 7, 4
    first_level_width = WIDE.feature_sizes[0][1]
    index = (row * first_level_width + column) * 9 + anchor
    np.testing.assert_array_equal(flat[1, index], per_level[0][1, row, column, anchor * 5 : anchor * 5 + 5])
    np.testing.assert_array_equal(flat[1, -1], per_level[-1][1, -1, -1, -5:])


# --- where it runs ---


def test_inside_a_dali_dataset():
    import nvidia.dali.plugin.tf as dali_tf

    batch_size, max_instances, most = 8, 5, 12
    pipeline = Pipeline(batch_size=batch_size, num_threads=2, device_id=None, seed=7)
    with pipeline:
        count = fn.random.uniform(range=[-4, most], dtype=types.INT32)
        count = count * fn.cast(count > 0, dtype=types.INT32)  # a third of the images without boxes
        boxes = fn.random.uniform(range=[0.0, 1.0], shape=fn.stack(count, 4))  # most of them inverted
        labels = fn.random.uniform(range=[1, 90], shape=fn.stack(count), dtype=types.INT32)
        encoded = box_encoder.encode_boxes(boxes, labels, WIDE, max_instances)
        raw = fn.pad(boxes, axes=[0], shape=[most], fill_value=-5), fn.pad(labels, axes=[0], shape=[most])
        pipeline.set_outputs(count, *raw, *tf.nest.flatten(encoded))
    outputs = [((), tf.int32), ((most, 4), tf.float32), ((most,), tf.int32)]
    shapes = expected_shapes(WIDE, max_instances)
    levels = len(WIDE.levels)
    dtypes = [tf.float32, tf.float32, tf.int32] + [tf.int32] * levels + [tf.float32] * levels
    outputs += zip(shapes, dtypes, strict=True)
    dataset = dali_tf.DALIDataset(
        pipeline=pipeline,
        batch_size=batch_size,
        output_shapes=tuple((batch_size, *shape) for shape, _ in outputs),
        output_dtypes=tuple(dtype for _, dtype in outputs),
        device_id=None,
    )
    counts = []
    for batch in dataset.take(3):
        for counted, boxes, labels, *values in zip(*[output.numpy() for output in batch], strict=True):
            expected = encode_boxes_tf(boxes[:counted], labels[:counted], WIDE, max_instances)
            for value, wanted in zip(values, tf.nest.flatten(expected), strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)
            counts.append(counted)
    assert min(counts) == 0 < max(counts)


@pytest.mark.gpu
@ALL_ANCHORS
def test_gpu_equals_cpu(anchors):
    rng = np.random.default_rng(8)
    images = hard_images(rng, anchors)
    labels = random_labels(rng, images)
    both = zip(encode(images, labels, anchors), encode(images, labels, anchors, device="gpu"), strict=True)
    for cpu, gpu in both:
        for a, b in zip(tf.nest.flatten(cpu), tf.nest.flatten(gpu), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_boxes_on_the_cpu_can_be_encoded_on_the_gpu():
    rng = np.random.default_rng(9)
    images = hard_images(rng, D0)
    labels = random_labels(rng, images)
    pipeline = Pipeline(batch_size=len(images), num_threads=2, device_id=0)
    with pipeline:
        nodes = [fn.external_source(source=[batch], cycle=True, batch=True) for batch in (images, labels)]
        encoded = tf.nest.flatten(box_encoder.encode_boxes(*nodes, D0, device="gpu"))
        assert {node.device for node in encoded} == {"gpu"}
        pipeline.set_outputs(*encoded)
    pipeline.build()
    outputs = [output.as_cpu() for output in pipeline.run()]
    for i, cpu in enumerate(encode(images, labels, D0)):
        for a, b in zip(tf.nest.flatten(cpu), outputs, strict=True):
            np.testing.assert_allclose(a, b.at(i), rtol=1e-6, atol=1e-6)
