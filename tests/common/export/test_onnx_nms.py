"""Tests onnx_nms.py and onnx_graphs.py against NMS by loops in NumPy."""

import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf

from common.export import onnx_graphs, onnx_nms
from common.export.export_graph import Exportable
from tests.common.test_nms import suppress_numpy

CANDIDATES, DETECTIONS, CLASSES, IOU, THRESHOLD = 40, 6, 5, 0.5, 0.1


def _parts(class_agnostic: bool = False) -> Exportable:
    """The network is left out: its raw output is the candidates, (B, K, 6)."""

    def candidates(raw):
        return raw[0][..., :4], raw[0][..., 4], tf.cast(raw[0][..., 5], tf.int32)

    def not_called(*_):
        raise AssertionError("not part of suppression")

    return Exportable(
        model=None,
        image_size=(100, 200),
        num_classes=CLASSES,
        score_threshold=THRESHOLD,
        nms_iou=IOU,
        nms_class_agnostic=class_agnostic,
        max_detections=DETECTIONS,
        resize=not_called,
        place=lambda image_sizes: tf.concat([tf.zeros_like(image_sizes), image_sizes], axis=1),
        normalize=not_called,
        network=not_called,
        candidates=candidates,
        decode_all=lambda raw: (raw[0][..., :4], tf.one_hot(tf.cast(raw[0][..., 5], tf.int32), CLASSES)),
    )


RAW = [tf.TensorSpec([None, CANDIDATES, 6], tf.float32, "raw_0")]


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    return _open_session(_parts())


def _open_session(exportable: Exportable) -> onnxruntime.InferenceSession:
    parts = onnx_nms.standard(exportable, RAW)
    model = onnx_graphs.join(parts, ["raw_0", "image_sizes"], onnx_nms.OUTPUTS)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString())


def _run(session, raw):
    sizes = np.tile(np.array([[100, 200]], np.int32), (len(raw), 1))
    return dict(zip(onnx_nms.OUTPUTS, session.run(None, {"raw_0": raw, "image_sizes": sizes}), strict=True))


def _by_loop(candidates: np.ndarray, class_agnostic: bool = False) -> list[np.ndarray]:
    rows = candidates[np.isfinite(candidates).all(axis=1)]
    limits = {"num_classes": CLASSES, "max_detections": DETECTIONS, "class_agnostic": class_agnostic}
    limits |= {"score_threshold": THRESHOLD, "iou_threshold": IOU}
    picked, _ = suppress_numpy(rows[:, :4], rows[:, 4], rows[:, 5], "hard", **limits)
    return list(rows[picked])


def _random_candidates(seed: int) -> np.ndarray:
    """Many boxes overlap, many scores are equal, and some boxes reach outside."""
    random = np.random.default_rng(seed)
    corners = random.uniform(-0.2, 0.7, (CANDIDATES, 2))
    boxes = np.concatenate([corners, corners + random.uniform(0.2, 0.6, (CANDIDATES, 2))], axis=1)
    scores = np.sort(random.choice([0.9, 0.7, 0.4, 0.3, 0.05], CANDIDATES))[::-1]
    classes = random.integers(0, 3, CANDIDATES)
    return np.concatenate([boxes, scores[:, None], classes[:, None]], axis=1).astype(np.float32)


def _assert_detections(results, raw, class_agnostic=False):
    """Compares the outputs of the session for `raw`, a batch of candidates, with those of loops."""
    for number, candidates in enumerate(raw):
        expected = _by_loop(candidates, class_agnostic)
        padding = DETECTIONS - len(expected)
        assert results["count"][number] == len(expected)
        assert results["classes"][number].tolist() == [int(row[5]) for row in expected] + [-1] * padding
        scores = [row[4] for row in expected] + [0.0] * padding
        np.testing.assert_array_equal(results["scores"][number], np.array(scores, np.float32))
        boxes = np.zeros((DETECTIONS, 4))
        for i, row in enumerate(expected):
            boxes[i] = np.clip(row[:4], 0, 1) * (200, 100, 200, 100)
        np.testing.assert_allclose(results["boxes"][number], boxes, atol=1e-4)


def test_onnx_nms_equals_loops_in_numpy(session):
    raw = np.stack([_random_candidates(seed) for seed in range(20)])
    results = _run(session, raw)
    assert DETECTIONS in results["count"]
    _assert_detections(results, raw)


def test_class_agnostic_onnx_nms_equals_loops_in_numpy(session):
    raw = np.stack([_random_candidates(seed) for seed in range(20)])
    results = _run(_open_session(_parts(class_agnostic=True)), raw)
    _assert_detections(results, raw, class_agnostic=True)
    assert (results["boxes"] != _run(session, raw)["boxes"]).any()


def test_onnx_nms_of_batch_with_empty_sparse_and_nonfinite_candidates_equals_loops(session):
    empty, sparse, nonfinite = (_random_candidates(seed) for seed in range(3))
    empty[:, 4] = THRESHOLD
    sparse[2:, 4] = 0.0
    nonfinite[0, 1], nonfinite[3, 2], nonfinite[1, 4] = np.nan, np.inf, np.nan
    raw = np.stack([empty, sparse, nonfinite])
    results = _run(session, raw)
    assert results["count"][0] == 0
    _assert_detections(results, raw)


@pytest.mark.parametrize("class_agnostic", [False, True])
def test_efficientnms_trt_node_has_the_attributes_and_graph_position_that_tensorrt_needs(class_agnostic):
    parts = onnx_nms.efficientnms_trt(_parts(class_agnostic), RAW)
    model = onnx_graphs.join(parts, ["raw_0", "image_sizes"], onnx_nms.OUTPUTS)
    (node,) = [node for node in model.graph.node if node.op_type == "EfficientNMS_TRT"]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    expected = {"box_coding": 0, "score_activation": 0, "class_agnostic": int(class_agnostic)}
    expected |= {"plugin_version": b"1", "background_class": -1, "max_output_boxes": DETECTIONS}
    expected |= {"iou_threshold": pytest.approx(IOU), "score_threshold": pytest.approx(THRESHOLD)}
    assert attributes == expected
    # The NMS node reads outputs of earlier nodes, and later nodes read its outputs.
    position = list(model.graph.node).index(node)
    before = {name for other in list(model.graph.node)[:position] for name in other.output}
    after = {name for other in list(model.graph.node)[position + 1 :] for name in other.input}
    assert set(node.input) <= before | {port.name for port in model.graph.input}
    assert set(node.output) <= after
