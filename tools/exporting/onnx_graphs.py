"""From TensorFlow functions to one ONNX graph: parts converted one by one, joined by the names of ports.

Parts that are separate can be quantised separately, and what TensorFlow has no operation for is a part
written by hand.
"""

import collections
import contextlib
import io
import logging
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import tensorflow as tf
import tf2onnx


def convert(
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[tf.TensorSpec],
    output_names: Sequence[str],
    opset: int,
) -> onnx.ModelProto:
    """A TensorFlow function as an ONNX model.

    Args:
        function: takes one tensor per spec, returns one per output name.
        inputs: their names are those of the model's inputs.
        output_names: of the model's outputs.
        opset: of ONNX.
    """
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = tf2onnx.convert.from_function(
            tf.function(lambda *tensors: tuple(tf.identity(output) for output in function(*tensors))),
            input_signature=list(inputs),
            opset=opset,
            custom_op_handlers={"SelectV2": (_where, [])},
        )
    # inputs keep the names of their specs, and those that the function does not use are gone
    return _rename(
        model, {port.name: name for port, name in zip(model.graph.output, output_names, strict=True)}
    )


def join(models: Sequence[onnx.ModelProto], inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """One model of several, in the order in which they run: ports of the same name are one.

    Args:
        models: parts; all other names within them may coincide.
        inputs, outputs: ports of the whole.
    """
    graphs = [
        onnx.compose.add_prefix_graph(
            model.graph,
            f"part{number}/",
            rename_inputs=False,
            rename_outputs=False,
            rename_value_infos=False,
        )
        for number, model in enumerate(models)
    ]
    values = {port.name: port for graph in graphs for port in [*graph.input, *graph.output]}
    graph = onnx.helper.make_graph(
        [node for graph in graphs for node in graph.node],
        "detector",
        [values[name] for name in inputs],
        [values[name] for name in outputs],
        [initializer for graph in graphs for initializer in graph.initializer],
    )
    domains = {entry.domain: entry.version for model in models for entry in model.opset_import}
    return onnx.helper.make_model(
        graph,
        producer_name="dali-detection",
        ir_version=min(model.ir_version for model in models),
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()],
    )


def port(spec: tf.TensorSpec) -> onnx.ValueInfoProto:
    """An input or output of `by_hand`; its first side is the batch."""
    element_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype.as_numpy_dtype))
    return onnx.helper.make_tensor_value_info(spec.name, element_type, ["batch", *spec.shape[1:]])


def by_hand(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray],
    opset: int,
    domain: str | None = None,
) -> onnx.ModelProto:
    """A part written by hand; `domain` is that of operations that are not ONNX's."""
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = onnx.helper.make_graph(nodes, "by_hand", inputs, outputs, initializers)
    opsets = [onnx.helper.make_opsetid("", opset)]
    if domain:
        opsets.append(onnx.helper.make_opsetid(domain, 1))
    return onnx.helper.make_model(graph, opset_imports=opsets)


def canonical(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose bytes follow from what it computes: tf2onnx's order and inner names differ by process.

    Nodes stand in the order in which the outputs, from first to last, need them; what nobody needs is gone.
    """
    model = _rename(model, {})
    graph = model.graph
    ports = {port.name for port in [*graph.input, *graph.output]}
    nodes = _in_order_of_need(graph)
    biases = collections.Counter(
        node.input[2] for node in nodes if node.op_type == "Conv" and len(node.input) > 2
    )
    names: dict[str, str] = {}
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
        for name in filter(None, [*node.input, *node.output]):
            if name not in ports:
                # ONNX Runtime makes copies of a shared bias: tensor_6 and a number could be called tensor_69.
                end = "_" if biases[name] > 1 else ""
                names.setdefault(name, f"tensor_{len(names)}{end}")
    constants = {constant.name: constant for constant in graph.initializer}
    ordered = onnx.helper.make_graph(
        nodes,
        "network",
        graph.input,
        graph.output,
        [constants[name] for name in names if name in constants],
    )
    for node in ordered.node:
        attributes = sorted(node.attribute, key=lambda attribute: attribute.name)
        del node.attribute[:]
        node.attribute.extend(attributes)
    graph.CopyFrom(ordered)
    return _rename(model, names)


def _in_order_of_need(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Depth first from the outputs; without recursion, as networks are deeper than Python's stack."""
    makers = {name: node for node in graph.node for name in node.output}
    ordered, done = [], set()
    waiting = [port.name for port in reversed(graph.output)]
    while waiting:
        name = waiting[-1]
        node = makers.get(name)
        missing = [each for each in node.input if each in makers and each not in done] if node else []
        if missing:
            waiting.extend(reversed(missing))
            continue
        if node and name not in done:
            ordered.append(node)
            done.update(node.output)
        waiting.pop()
    return ordered


def _where(_, node, *__) -> None:
    """tf.where as ONNX's Where. tf2onnx would multiply by 0 and 1 and add, and 0 times a NaN is a NaN."""
    node.type = "Where"


def _rename(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    """A copy with other names of tensors and nodes. Not within the bodies of loops: our parts have none."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph = model.graph
    del graph.value_info[:]
    for port in [*graph.input, *graph.output, *graph.initializer]:
        port.name = names.get(port.name, port.name)
    for node in graph.node:
        if any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
            raise ValueError(f"{node.op_type} has a body, whose names would not be changed")
        node.name = names.get(node.name, node.name)
        for ports in (node.input, node.output):
            ports[:] = [names.get(name, name) for name in ports]
    return model
