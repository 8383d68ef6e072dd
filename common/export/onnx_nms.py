"""Builds the NMS of an ONNX graph, with ONNX's own operation or with TensorRT's plugin."""

import numpy as np
import onnx
import tensorflow as tf
from onnx import helper

from common import boxes as box_ops
from common import nms
from common.export import export_graph, onnx_graphs
from common.export.export_graph import Exportable, Outputs

OUTPUTS = ("boxes", "scores", "classes", "count")
RAW_OUTPUTS = ("boxes", "scores")
PLUGIN_DOMAIN = "TRT"  # TensorRT's parser finds plugins by the operation's name, in any domain


def standard(parts: Exportable, raw: list[tf.TensorSpec]) -> list[onnx.ModelProto]:
    """Returns ONNX models that turn raw outputs and image_sizes into the outputs of export_graph.detect.

    ONNX's NonMaxSuppression selects the candidates, and TopK sorts them by score. TopK keeps the order of
    candidates with equal scores (https://onnx.ai/onnx/operators/onnx__TopK.html).
    """

    def candidates(*raw: tf.Tensor) -> Outputs:
        boxes, scores, classes = parts.candidates(list(raw))
        boxes, scores = nms.only_finite(boxes, scores)
        groups = nms.groups_of(classes, parts.nms_class_agnostic)
        return {
            "candidate_boxes": boxes,  # (B, K, 4)
            "candidate_scores": scores,  # (B, K)
            "candidate_classes": classes,
            "boxes_apart": nms.moved_apart(boxes, groups, parts.num_classes),
            "scores_of_one_class": scores[:, tf.newaxis],
        }

    def pick(
        boxes: tf.Tensor, scores: tf.Tensor, classes: tf.Tensor, selected: tf.Tensor, image_sizes: tf.Tensor
    ) -> Outputs:
        rows = tf.gather(selected, [0, 2], axis=1)  # (n, 2): image, candidate
        is_selected = tf.scatter_nd(rows, tf.ones_like(rows[:, 0], tf.float32), tf.shape(scores, tf.int64))
        most = tf.minimum(parts.max_detections, tf.shape(scores)[1])
        scores, places = tf.math.top_k(scores * is_selected, most)
        shape, missing = [-1, parts.max_detections], [[0, 0], [0, parts.max_detections - most]]
        scores = tf.reshape(tf.pad(scores, missing), shape)
        places = tf.reshape(tf.pad(places, missing), shape)
        is_detection = scores > 0
        detections = nms.Detections(
            boxes=box_ops.clip(tf.gather(boxes, places, batch_dims=1)),
            scores=scores,
            classes=tf.where(is_detection, tf.gather(classes, places, batch_dims=1), -1),
            count=tf.reduce_sum(tf.cast(is_detection, tf.int32), axis=1),
        )
        return export_graph.name_outputs(parts, detections, image_sizes)

    specs = onnx_graphs.output_specs(candidates, raw)
    selected = tf.TensorSpec([None, 3], tf.int64, "selected")  # image, class, candidate
    constants: dict[str, np.ndarray] = {
        "most": np.array([parts.max_detections], np.int64),
        "iou": np.array([parts.nms_iou], np.float32),
        "threshold": np.array([parts.score_threshold], np.float32),
    }
    nms_inputs = [specs["boxes_apart"], specs["scores_of_one_class"]]
    names = [*(spec.name for spec in nms_inputs), *constants]
    suppression = helper.make_node("NonMaxSuppression", names, [selected.name], name="suppression")
    candidate_specs = [specs[f"candidate_{name}"] for name in ("boxes", "scores", "classes")]
    return [
        onnx_graphs.convert(candidates, raw),
        onnx_graphs.by_hand(suppression, nms_inputs, [selected], constants),
        onnx_graphs.convert(pick, [*candidate_specs, selected, export_graph.signature(parts, None)[1]]),
    ]


def efficientnms_trt(parts: Exportable, raw: list[tf.TensorSpec]) -> list[onnx.ModelProto]:
    """Returns ONNX models that do the same as `standard`, but use the plugin EfficientNMS_TRT of TensorRT.

    The plugin takes all predictions. Only TensorRT can run it. Its documentation:
    https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin
    """

    def decode(*raw: tf.Tensor) -> Outputs:
        return dict(zip(("all_boxes", "all_scores"), parts.decode_all(list(raw)), strict=True))

    def finish(
        count: tf.Tensor, boxes: tf.Tensor, scores: tf.Tensor, classes: tf.Tensor, image_sizes: tf.Tensor
    ) -> Outputs:
        is_detection = tf.sequence_mask(count[:, 0], parts.max_detections)
        result = nms.Detections(
            boxes=box_ops.clip(boxes),
            scores=tf.where(is_detection, scores, 0.0),
            classes=tf.where(is_detection, classes, -1),
            count=count[:, 0],
        )
        return export_graph.name_outputs(parts, result, image_sizes)

    detections = parts.max_detections
    plugin_outputs = [
        tf.TensorSpec([None, 1], tf.int32, "num_detections"),
        tf.TensorSpec([None, detections, 4], tf.float32, "detection_boxes"),
        tf.TensorSpec([None, detections], tf.float32, "detection_scores"),
        tf.TensorSpec([None, detections], tf.int32, "detection_classes"),
    ]
    plugin_inputs = onnx_graphs.output_specs(decode, raw)
    plugin = helper.make_node(
        "EfficientNMS_TRT",
        list(plugin_inputs),
        [spec.name for spec in plugin_outputs],
        name="suppression",
        domain=PLUGIN_DOMAIN,
        plugin_version="1",
        background_class=-1,
        box_coding=0,
        class_agnostic=int(parts.nms_class_agnostic),
        iou_threshold=float(parts.nms_iou),
        max_output_boxes=detections,
        score_activation=0,
        score_threshold=float(parts.score_threshold),
    )
    return [
        onnx_graphs.convert(decode, raw),
        onnx_graphs.by_hand(plugin, list(plugin_inputs.values()), plugin_outputs, {}),
        onnx_graphs.convert(finish, [*plugin_outputs, export_graph.signature(parts, None)[1]]),
    ]


def none(parts: Exportable, raw: list[tf.TensorSpec]) -> list[onnx.ModelProto]:
    """Returns a part that computes export_graph.detect_raw's outputs."""

    def finish(*tensors: tf.Tensor) -> Outputs:
        *raw, image_sizes = tensors
        return export_graph.name_raw_outputs(parts, list(raw), image_sizes)

    return [onnx_graphs.convert(finish, [*raw, export_graph.signature(parts, None)[1]])]
