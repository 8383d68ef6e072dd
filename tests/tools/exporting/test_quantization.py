"""FP16 and INT8 of a small network, the table of ranges, and TensorRT where there is none."""

import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf

from common.errors import UserError
from tools.exporting import onnx_graphs, quantization, tensorrt
from tools.exporting.onnx_file import NETWORK_INPUT

SHAPE = (2, 16, 24, 3)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A file of two convolutions, the first with kernels of very different sizes."""
    random = np.random.default_rng(1)
    sizes = np.geomspace(0.01, 10, 8)
    first = (random.standard_normal((3, 3, 3, 8)) * sizes).astype(np.float32)
    last = random.standard_normal((1, 1, 8, 4)).astype(np.float32)

    def function(x):
        x = tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME") / sizes.astype(np.float32))
        return [tf.nn.conv2d(x, last, 1, "SAME")]

    spec = tf.TensorSpec([None, *SHAPE[1:]], tf.float32, NETWORK_INPUT)
    path = tmp_path_factory.mktemp("network") / "float.onnx"
    onnx.save(onnx_graphs.convert(function, [spec], ["raw_0"], 17), path)
    return path


def _images(seed):
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def _relative_error(network, other):
    """By channel: the mean error as a share of the mean size."""
    sessions = [onnxruntime.InferenceSession(path) for path in (network, other)]
    one, two = (session.run(None, {NETWORK_INPUT: _images(9)})[0] for session in sessions)
    return np.abs(one - two).mean(axis=(0, 1, 2)) / np.abs(one).mean(axis=(0, 1, 2))


def test_int8_is_near(network, tmp_path):
    table = tmp_path / "table.json"
    quantize = quantization.make_int8(iter([_images(0), _images(1)]), 2, table, symmetric=False)
    quantize(network, tmp_path / "int8.onnx")
    error = _relative_error(network, tmp_path / "int8.onnx")
    assert 1e-4 < error.max() < 0.05  # INT8, and near
    graph = onnx.load(tmp_path / "int8.onnx").graph
    quantized = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    first, last = [node for node in graph.node if node.op_type == "Conv"]
    assert set(first.input[:2]) <= quantized
    assert not set(last.input) & quantized  # it gives the scores

    again = quantization.make_int8(iter(()), 0, table, symmetric=False)  # without images
    again(network, tmp_path / "again.onnx")
    assert _relative_error(tmp_path / "int8.onnx", tmp_path / "again.onnx").max() == 0


def test_convolutions_may_share_a_bias(tmp_path):
    """ONNX Runtime makes copies of it, whose names must not be those of other tensors."""
    random = np.random.default_rng(4)
    kernels = [random.standard_normal((3, 3, 1, 1)).astype(np.float32) for _ in range(8)]
    tensors = [NETWORK_INPUT, *(f"x{number}" for number in range(9)), "raw_0"]
    nodes = [
        onnx.helper.make_node("Conv", [tensors[number], f"kernel{number}", "bias"], [tensors[number + 1]])
        for number in range(8)
    ]
    nodes += [onnx.helper.make_node("Relu", [tensors[i]], [tensors[i + 1]]) for i in (8, 9)]
    constants = {"bias": np.zeros(3, np.float32)} | {f"kernel{i}": each for i, each in enumerate(kernels)}
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 3, 4, 4])
        for name in ("network_input", "raw_0")
    ]
    model = onnx_graphs.by_hand(nodes, ports[:1], ports[1:], constants, 17)
    model.ir_version = 8
    onnx.save(onnx_graphs.canonical(model), tmp_path / "float.onnx")
    images = random.standard_normal((2, 3, 4, 4)).astype(np.float32)
    quantize = quantization.make_int8(iter([images]), 1, tmp_path / "table.json", symmetric=False)
    quantize(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    found = [
        onnxruntime.InferenceSession(tmp_path / name).run(None, {NETWORK_INPUT: images})[0]
        for name in ("float.onnx", "int8.onnx")
    ]
    assert np.abs(found[0] - found[1]).mean() < 0.1 * np.abs(found[0]).mean()


def test_tensorrt_wants_no_zero_points(network, tmp_path):
    quantize = quantization.make_int8(iter([_images(0)]), 1, tmp_path / "table.json", symmetric=True)
    quantize(network, tmp_path / "int8.onnx")
    graph = onnx.load(tmp_path / "int8.onnx").graph
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    points = [values[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"]
    assert points
    assert all((point == 0).all() for point in points)


def test_a_table_of_something_else_is_refused(network, tmp_path):
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"network_sha256": "of another", "ranges": {}}))
    with pytest.raises(UserError, match="measured for another network"):
        quantization.make_int8(iter(()), 0, table, symmetric=True)(network, tmp_path / "x.onnx")
    table.write_text("no JSON")
    with pytest.raises(UserError, match="is not a calibration table"):
        quantization.make_int8(iter(()), 0, table, symmetric=True)(network, tmp_path / "x.onnx")
    assert not (tmp_path / "x.onnx").exists()


def test_fp16_keeps_the_ports(network, tmp_path):
    quantization.to_fp16(network, tmp_path / "half.onnx")
    model = onnx.load(tmp_path / "half.onnx")
    ports = [*model.graph.input, *model.graph.output]
    assert {port.type.tensor_type.elem_type for port in ports} == {onnx.TensorProto.FLOAT}
    assert {tensor.data_type for tensor in model.graph.initializer if tensor.dims} >= {
        onnx.TensorProto.FLOAT16
    }
    error = _relative_error(network, tmp_path / "half.onnx")
    assert 1e-6 < error.max() < 0.005


def test_without_tensorrt_the_command_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UserError, match=r"not installed.*trtexec --onnx=.*a\.onnx") as caught:
        tensorrt.build(tmp_path / "a.onnx", tmp_path / "a.engine", (64, 96), "int8")
    assert "\n" not in str(caught.value)


def _scrambled(model, seed):
    """The same network as another process might have written it: other inner names, another order."""
    random = np.random.default_rng(seed)
    graph = onnx.ModelProto.FromString(model.SerializeToString()).graph
    ports = {port.name for port in [*graph.input, *graph.output]}
    ready = {tensor.name for tensor in [*graph.input, *graph.initializer]}
    left, nodes = list(graph.node), []
    while left:
        possible = [node for node in left if ready.issuperset(node.input)]
        node = possible[random.integers(len(possible))]
        left.remove(node)
        nodes.append(node)
        ready.update(node.output)
    fresh = iter(random.permutation(10_000).tolist())
    names = {name: name if name in ports else f"x{next(fresh)}" for name in sorted(ready)}
    for node in nodes:
        node.name = f"n{next(fresh)}"
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
        attributes = list(node.attribute)[::-1]
        del node.attribute[:]
        node.attribute.extend(attributes)
    constants = [graph.initializer[i] for i in random.permutation(len(graph.initializer))]
    for constant in constants:
        constant.name = names[constant.name]
    other = onnx.ModelProto.FromString(model.SerializeToString())
    other.graph.CopyFrom(onnx.helper.make_graph(nodes, "other", graph.input, graph.output, constants))
    return other


def test_a_network_has_the_same_bytes_in_every_process():
    """The table of ranges is found again by them, and names its tensors as they do."""
    random = np.random.default_rng(2)
    kernels = random.standard_normal((3, 3, 3, 3, 3)).astype(np.float32)

    def function(x):
        one, two = (tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")) for kernel in kernels[:2])
        return [tf.nn.conv2d(one + two, kernels[2], 2, "SAME"), two]

    spec = tf.TensorSpec([None, *SHAPE[1:]], tf.float32, NETWORK_INPUT)
    model = onnx_graphs.convert(function, [spec], ["raw_0", "raw_1"], 17)
    expected = onnx_graphs.canonical(model)
    for seed in range(5):
        scrambled = _scrambled(model, seed)
        onnx.checker.check_model(scrambled)
        assert onnx_graphs.canonical(scrambled).SerializeToString() == expected.SerializeToString()
    found, wanted = (
        onnxruntime.InferenceSession(each.SerializeToString()).run(None, {NETWORK_INPUT: _images(0)})
        for each in (expected, model)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
