"""Suppression inside an ONNX graph: by ONNX's own operation, or by TensorRT's plugin."""

import numpy as np
import onnx
import tensorflow as tf
from onnx import helper

from common import boxes as box_ops
from common import nms
from tools.exporting import export_graph, onnx_graphs
from tools.exporting.export_graph import Exportable

OUTPUTS = ("boxes", "scores", "classes", "count")
RAW_OUTPUTS = ("boxes", "scores")
PLUGIN_DOMAIN = "TRT"  # TensorRT's parser finds plugins by the operation's name, whatever the domain


def standard(parts: Exportable, raw: list[tf.TensorSpec], opset: int) -> list[onnx.ModelProto]:
    """Raw outputs and image_sizes -> boxes, scores, classes, count: equal to parts.detect.

    ONNX's operation keeps the best, but the order of what it returns is open: so it says which candidates
    stay, and these are taken in the candidates' own order. Of equal scores both take the first
    (https://onnx.ai/onnx/operators/onnx__TopK.html).
    """

    def candidates(*raw):
        boxes, scores, classes = parts.candidates(list(raw))
        boxes, scores = nms.only_finite(boxes, scores)
        return boxes, scores, classes, nms.moved_apart(boxes, classes, parts.num_classes)

    def pick(boxes, scores, classes, kept, image_sizes):
        most = tf.minimum(parts.max_detections, tf.shape(scores)[1])
        scores, places = tf.math.top_k(scores * kept, most)
        shape, missing = [-1, parts.max_detections], [[0, 0], [0, parts.max_detections - most]]
        scores = tf.reshape(tf.pad(scores, missing), shape)
        places = tf.reshape(tf.pad(places, missing), shape)
        is_detection = scores > 0
        found = nms.Detections(
            boxes=box_ops.clip(tf.gather(boxes, places, batch_dims=1)),
            scores=scores,
            classes=tf.where(is_detection, tf.gather(classes, places, batch_dims=1), -1),
            count=tf.reduce_sum(tf.cast(is_detection, tf.int32), axis=1),
        )
        return list(export_graph.name_outputs(parts, found, image_sizes).values())

    count = tf.function(candidates).get_concrete_function(*raw).structured_outputs[0].shape[1]
    boxes = tf.TensorSpec([None, count, 4], tf.float32, "candidate_boxes")
    scores = tf.TensorSpec([None, count], tf.float32, "candidate_scores")
    classes = tf.TensorSpec([None, count], tf.int32, "candidate_classes")
    apart = tf.TensorSpec([None, count, 4], tf.float32, "candidates_apart")
    kept = tf.TensorSpec([None, count], tf.float32, "candidate_kept")
    image_sizes = export_graph.signature(parts, None)[1]
    found = [boxes.name, scores.name, classes.name, apart.name]
    return [
        onnx_graphs.convert(candidates, raw, found, opset),
        _keep(parts, apart, scores, kept, opset),
        onnx_graphs.convert(pick, [boxes, scores, classes, kept, image_sizes], OUTPUTS, opset),
    ]


def efficientnms_trt(parts: Exportable, raw: list[tf.TensorSpec], opset: int) -> list[onnx.ModelProto]:
    """The same by TensorRT's plugin EfficientNMS_TRT, which nothing but TensorRT can run.

    It suppresses among all predictions, not among the best only. Its inputs, outputs and attributes:
    https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin
    """

    def finish(count, boxes, scores, classes, image_sizes):
        is_detection = tf.sequence_mask(count[:, 0], parts.max_detections)
        found = nms.Detections(
            boxes=box_ops.clip(boxes),
            scores=tf.where(is_detection, scores, 0.0),
            classes=tf.where(is_detection, classes, -1),
            count=count[:, 0],
        )
        return list(export_graph.name_outputs(parts, found, image_sizes).values())

    detections = parts.max_detections
    found = [
        tf.TensorSpec([None, 1], tf.int32, "num_detections"),
        tf.TensorSpec([None, detections, 4], tf.float32, "detection_boxes"),
        tf.TensorSpec([None, detections], tf.float32, "detection_scores"),
        tf.TensorSpec([None, detections], tf.int32, "detection_classes"),
    ]
    plugin = helper.make_node(
        "EfficientNMS_TRT",
        ["all_boxes", "all_scores"],
        [spec.name for spec in found],
        name="suppression",
        domain=PLUGIN_DOMAIN,
        plugin_version="1",
        background_class=-1,
        box_coding=0,  # corners; which axis comes first does not matter to it
        class_agnostic=0,
        iou_threshold=float(parts.nms_iou),
        max_output_boxes=detections,
        score_activation=0,
        score_threshold=float(parts.score_threshold),
    )
    decoded = onnx_graphs.convert(
        lambda *raw: parts.decode_all(list(raw)), raw, ["all_boxes", "all_scores"], opset
    )
    inputs, outputs = list(decoded.graph.output), [onnx_graphs.port(spec) for spec in found]
    return [
        decoded,
        onnx_graphs.by_hand([plugin], inputs, outputs, {}, opset, PLUGIN_DOMAIN),
        onnx_graphs.convert(finish, [*found, export_graph.signature(parts, None)[1]], OUTPUTS, opset),
    ]


def none(parts: Exportable, raw: list[tf.TensorSpec], opset: int) -> list[onnx.ModelProto]:
    """Raw outputs and image_sizes -> all boxes and scores: equal to parts.detect_raw."""

    def finish(*tensors):
        *raw, image_sizes = tensors
        boxes, scores = parts.decode_all(list(raw))
        return export_graph.to_pixels(parts, boxes, image_sizes), scores

    return [onnx_graphs.convert(finish, [*raw, export_graph.signature(parts, None)[1]], RAW_OUTPUTS, opset)]


def _keep(
    parts: Exportable, apart: tf.TensorSpec, scores: tf.TensorSpec, kept: tf.TensorSpec, opset: int
) -> onnx.ModelProto:
    """Boxes apart by class (B, K, 4), their scores (B, K) -> (B, K): 1 for those that stay."""
    nodes = [
        helper.make_node("Unsqueeze", [scores.name, "one"], ["scores_of_one_class"]),  # (B, 1, K)
        helper.make_node(
            "NonMaxSuppression",
            [apart.name, "scores_of_one_class", "most", "iou", "threshold"],
            ["selected"],  # (n, 3): image, class, candidate
        ),
        helper.make_node("Gather", ["selected", "image_and_candidate"], ["where"], axis=1),  # (n, 2)
        helper.make_node("Shape", ["selected"], ["n_and_3"]),
        helper.make_node("Gather", ["n_and_3", "zero"], ["n"]),  # (1,)
        helper.make_node("Expand", ["kept", "n"], ["ones"]),
        helper.make_node("Sub", [scores.name, scores.name], ["zeros"]),
        helper.make_node("ScatterND", ["zeros", "where", "ones"], [kept.name]),
    ]
    constants = {
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "most": np.array([parts.max_detections], np.int64),
        "iou": np.array([parts.nms_iou], np.float32),
        "threshold": np.array([parts.score_threshold], np.float32),
        "image_and_candidate": np.array([0, 2], np.int64),
        "kept": np.array([1.0], np.float32),
    }
    inputs = [onnx_graphs.port(apart), onnx_graphs.port(scores)]
    return onnx_graphs.by_hand(nodes, inputs, [onnx_graphs.port(kept)], constants, opset)
