"""Tests quantization.py with ONNX Runtime and onnx's reference evaluator."""

import numpy as np
import onnx.reference
import onnxruntime
import pytest
import tensorflow as tf

from common import layers
from common.export import onnx_graphs, quantization
from common.export.quantization import NETWORK_INPUT

SHAPE = (2, 16, 24, 3)


@pytest.fixture
def network():
    """The kernels of the first convolution have very different magnitudes."""
    random = np.random.default_rng(1)
    sizes = np.geomspace(0.01, 10, 8)
    first = (random.standard_normal((3, 3, 3, 8)) * sizes).astype(np.float32)
    last = random.standard_normal((1, 1, 8, 4)).astype(np.float32)

    def function(x):
        x = tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME") / sizes.astype(np.float32))
        return {"raw_0": tf.nn.conv2d(x, last, 1, "SAME")}

    spec = tf.TensorSpec([None, *SHAPE[1:]], tf.float32, NETWORK_INPUT)
    return onnx_graphs.convert(function, [spec])


def _images(seed):
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def _run(model, images):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {NETWORK_INPUT: images})[0]


def _relative_error(network, other):
    one, two = (_run(model, _images(9)) for model in (network, other))
    return np.abs(one - two).mean(axis=(0, 1, 2)) / np.abs(one).mean(axis=(0, 1, 2))


def test_onnx_model_quantized_to_int8_has_near_equal_results_and_no_quantized_last_convolution(network):
    int8 = quantization.to_int8(network, iter([_images(0), _images(1)]), tensorrt=False)
    assert 1e-4 < _relative_error(network, int8).max() < 0.05
    nodes = int8.graph.node
    quantized = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    first, last = [node for node in nodes if node.op_type == "Conv"]
    assert set(first.input[:2]) <= quantized
    assert not set(last.input) & quantized  # the last convolution computes the scores, so it is not quantized


def test_onnx_convolutions_that_share_a_bias_have_near_equal_results_after_int8_quantization():
    """ONNX Runtime copies a shared bias. The copies must not get names of other tensors."""
    random = np.random.default_rng(4)
    tensors = [NETWORK_INPUT, *(f"x{number}" for number in range(9)), "raw_0"]
    nodes, constants = [], {"x": np.zeros(3, np.float32)}
    for i in range(10):
        inputs = [tensors[i]]
        if i < 8:
            inputs += [f"kernel{i}", "x"]
            constants[f"kernel{i}"] = random.standard_normal((3, 3, 1, 1)).astype(np.float32)
        kind = "Conv" if i < 8 else "Relu"
        nodes.append(onnx.helper.make_node(kind, inputs, [tensors[i + 1]], name=f"node{i}"))
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    ports = [
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 3, 4, 4])]
        for name in (NETWORK_INPUT, "raw_0")
    ]
    graph = onnx.helper.make_graph(nodes, "shared", *ports, initializer=initializers)
    opset = onnx.helper.make_opsetid("", onnx_graphs.OPSET)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    images = random.standard_normal((2, 3, 4, 4)).astype(np.float32)
    exact = _run(model, images)
    result = _run(quantization.to_int8(model, iter([images]), tensorrt=False), images)
    assert np.abs(exact - result).mean() < 0.1 * np.abs(exact).mean()


def test_int8_model_for_tensorrt_quantizes_no_bias_and_has_only_zero_points_of_0(network):
    """TensorRT refuses ranges between a convolution and its activation."""
    graph = quantization.to_int8(network, iter([_images(0)]), tensorrt=True).graph
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    points = [values[node.input[2]] for node in graph.node if node.op_type.endswith("quantizeLinear")]
    assert len(points) == 2  # for the input and the weights of the first convolution
    assert all((point == 0).all() and point.dtype == np.int8 for point in points)


def test_onnx_model_converted_to_fp16_has_near_equal_results_and_float32_inputs_and_outputs(network):
    exact = onnx.ModelProto.FromString(network.SerializeToString())
    model = quantization.to_fp16(network)
    ports = [*model.graph.input, *model.graph.output]
    assert {port.type.tensor_type.elem_type for port in ports} == {onnx.TensorProto.FLOAT}
    assert onnx.TensorProto.FLOAT16 in {tensor.data_type for tensor in model.graph.initializer if tensor.dims}
    assert 1e-6 < _relative_error(exact, model).max() < 0.005
    onnx.checker.check_model(model)  # also checks that the nodes are sorted


def test_mish_in_float16_equals_the_formula():
    """ONNX Runtime computes in float32 on CPUs; the reference evaluator computes in float16."""
    spec = tf.TensorSpec([None, 4], tf.float32, NETWORK_INPUT)
    model = quantization.to_fp16(onnx_graphs.convert(lambda x: {"raw_0": layers.mish(x)}, [spec]))
    values = np.float32([[-9.0, 0.5, 5.6, 90.0]])
    (result,) = onnx.reference.ReferenceEvaluator(model).run(None, {NETWORK_INPUT: values})
    np.testing.assert_allclose(result, values * np.tanh(np.logaddexp(0, values)), rtol=0.01)
