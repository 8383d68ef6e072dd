"""Stand-ins for TensorRT 10.16 and CUDA's runtime. ONNX Runtime runs a plan's ONNX file.

Only the names that our code uses from tensorrt_cu12_bindings 10.16.1.11 exist here. As in CUDA, queued work
is done only when its stream is synchronised.
"""
# ruff: noqa: N802 NVIDIA's names

import ctypes
import json
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime

from common.evaluation import exported

__version__ = "10.16.1.11"
STREAM = 77
NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
nptype = onnx.helper.tensor_dtype_to_np_dtype


class Cuda:
    def __init__(self):
        self.memory, self.stream, self.cudaGetErrorString = {}, [], lambda code: b""

    def cudaStreamCreate(self, stream):
        stream._obj.value = STREAM

    def cudaMalloc(self, address, size):
        array = np.full(size.value, 0xAB, np.uint8)
        address._obj.value = array.ctypes.data
        self.memory[array.ctypes.data] = array

    def cudaMemcpyAsync(self, to, source, size, kind, stream):
        (on_gpu,) = {to.value, source.value} & self.memory.keys()
        assert size.value <= self.memory[on_gpu].nbytes
        assert (kind, stream.value) == (4, STREAM)
        self.stream.append(lambda: ctypes.memmove(to.value, source.value, size.value))

    def cudaStreamSynchronize(self, stream):
        while self.stream:
            self.stream.pop(0)()


cuda = Cuda()


def install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", sys.modules[__name__])
    monkeypatch.setattr(exported, "CDLL", {"libcudart.so.12": cuda}.__getitem__)


class Logger:
    WARNING, ERROR = 2, 1

    def __init__(self, severity):
        self.has_plugins = False


def init_libnvinfer_plugins(logger, namespace):
    logger.has_plugins = True


def OnnxParser(network, logger):
    assert logger.has_plugins
    return SimpleNamespace(parse=lambda model: not network.append(model))


def Builder(logger):
    shapes, profiles = {}, []
    profile = SimpleNamespace(set_shape=lambda name, *bounds: shapes.update({name: bounds}))
    config = SimpleNamespace(add_optimization_profile=profiles.append)

    def build_serialized_network(network, config):
        assert profiles == [profile]
        return memoryview(json.dumps([__version__, shapes]).encode() + b"\n" + network[0])

    return SimpleNamespace(
        create_network={1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED: []}.__getitem__,
        create_builder_config=lambda: config,
        create_optimization_profile=lambda: profile,
        build_serialized_network=build_serialized_network,
    )


def Runtime(logger):
    assert logger.has_plugins

    def deserialize_cuda_engine(plan):
        head, _, model = plan.partition(b"\n")
        version, profile = json.loads(head)
        return _engine(profile, model) if version == __version__ else None

    return SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)


def _engine(profile, model):
    graph = onnx.load_from_string(model).graph
    types = {port.name: port.type.tensor_type for port in [*graph.input, *graph.output]}
    return SimpleNamespace(
        num_io_tensors=len(types),
        get_tensor_name=list(types).__getitem__,
        get_tensor_dtype=lambda name: types[name].elem_type,
        get_tensor_profile_shape=lambda name, index: [profile[name]][index],
        create_execution_context=lambda: _Context(profile, types, onnxruntime.InferenceSession(model)),
    )


class _Context:
    def __init__(self, profile, types, session):
        self._profile, self._types, self._session = profile, types, session
        self._shapes, self._memory = {}, {}

    def set_input_shape(self, name, shape):
        self._shapes[name] = tuple(shape)
        low, _, high = self._profile[name]
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name):
        (batch_size,) = {shape[0] for shape in self._shapes.values()}
        return (batch_size, *(dim.dim_value for dim in self._types[name].shape.dim[1:]))

    def set_tensor_address(self, name, memory):
        self._memory[name] = cuda.memory[memory]

    def execute_async_v3(self, stream_handle):
        assert stream_handle == STREAM and self._memory.keys() == self._types.keys()
        cuda.stream.append(self._run)
        return True

    def _run(self):
        views = {}
        for name, memory in self._memory.items():
            shape, dtype = self.get_tensor_shape(name), nptype(self._types[name].elem_type)
            views[name] = memory[: np.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        outputs = [name for name in views if name not in self._shapes]
        values = self._session.run(outputs, {name: views[name] for name in self._shapes})
        for name, value in zip(outputs, values, strict=True):
            views[name][:] = value
