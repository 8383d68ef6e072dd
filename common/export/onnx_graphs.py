"""Converts TensorFlow functions to ONNX models, and joins these models by the names of their tensors.

Each model is one part of the detector. So one part can be quantised alone.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
from onnx import helper

OPSET = 17  # version of ONNX's operators; tf2onnx 1.17 writes up to 18

Function = Callable[..., dict[str, tf.Tensor]]


def convert(function: Function, inputs: Sequence[tf.TensorSpec]) -> onnx.ModelProto:
    """Converts a TensorFlow function to an ONNX model.

    Args:
        function: takes one tensor for each of `inputs`, and returns a dict: name of an output -> tensor.
    """
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = tf2onnx.convert.from_function(
            tf.function(
                lambda *tensors: {name: tf.identity(tensor) for name, tensor in function(*tensors).items()}
            ),
            input_signature=list(inputs),
            opset=OPSET,
            custom_op_handlers={"SelectV2": (_where, [])},
        )
    return model


def output_specs(function: Function, inputs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
    """Returns name -> spec of a function's outputs, sorted by name."""
    outputs = tf.function(function).get_concrete_function(*inputs).structured_outputs
    return {name: tf.TensorSpec(outputs[name].shape, outputs[name].dtype, name) for name in sorted(outputs)}


def by_hand(
    node: onnx.NodeProto,
    inputs: Sequence[tf.TensorSpec],
    outputs: Sequence[tf.TensorSpec],
    constants: dict[str, np.ndarray],
) -> onnx.ModelProto:
    """Returns a part that consists of one ONNX operation."""
    graph = helper.make_graph(
        [node],
        "by_hand",
        list(map(_port, inputs)),
        list(map(_port, outputs)),
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    versions = {"": OPSET} | ({node.domain: 1} if node.domain else {})
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*each) for each in versions.items()])


def join(models: Sequence[onnx.ModelProto], inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """Joins models by connecting inputs and outputs of the same name.

    Args:
        models: the models, in the order in which they run.
        inputs, outputs: names of the inputs and outputs of the joined model.
    """
    renaming: dict[str, Any] = {"rename_inputs": False, "rename_outputs": False, "rename_value_infos": False}
    graphs = [
        onnx.compose.add_prefix_graph(model.graph, f"part{number}/", **renaming)
        for number, model in enumerate(models)
    ]
    values = {port.name: port for graph in graphs for port in [*graph.input, *graph.output]}
    graph = helper.make_graph(
        [node for graph in graphs for node in graph.node],
        "detector",
        [values[name] for name in inputs],
        [values[name] for name in outputs],
        [initializer for graph in graphs for initializer in graph.initializer],
    )
    versions = {entry.domain: entry.version for model in models for entry in model.opset_import}
    return helper.make_model(
        graph,
        producer_name="dali-detection",
        ir_version=min(model.ir_version for model in models),
        opset_imports=[helper.make_opsetid(*each) for each in versions.items()],
    )


def _port(spec: tf.TensorSpec) -> onnx.ValueInfoProto:
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype.as_numpy_dtype))
    return helper.make_tensor_value_info(spec.name, element_type, spec.shape.as_list())


def _where(_: Any, node: Any, *__: Any) -> None:
    """Converts tf.where to ONNX's Where. The conversion of tf2onnx is wrong for NaN."""
    node.type = "Where"
