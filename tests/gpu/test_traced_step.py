"""Tests the graph of a training step that is traced as for a GPU. A CPU suffices: the graph never runs.

The graph shows what TensorFlow's kernels for a GPU need: operations without a kernel would run on the CPU. An
argument in the host's memory that depends on the batch or on a variable makes the host wait for the GPU.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator
from unittest import mock

import keras
import pytest
import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from common import hparams
from common.distributed.ranks import Ranks
from common.training.ema import AveragedWeights
from tests.small_apps import TINY

# app, model, precision, whether --xla, --accumulate_steps
FAST = ("efficientdet", "efficientdet-nano", "mixed_float16", False, 2)
# With --xla, only what is outside the compiled functions is examined: one case per app shows it.
CASES = [
    (app, model_name, precision, xla, 1 if xla or model_name != f"{app}-nano" else 2)
    for app, large in (("efficientdet", "efficientdet-d0"), ("yolov4", "yolov4"))
    for model_name, precision, xla in (
        (f"{app}-nano", "float32", False),
        (f"{app}-nano", "mixed_float16", False),
        (f"{app}-nano", "mixed_float16", True),
        (large, "mixed_bfloat16", False),
    )
]
STEPS = [case if case == FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
SHAPES = ("Shape", "ShapeN", "Size", "Rank")
CALLS = ("PartitionedCall", "StatefulPartitionedCall", "StatelessWhile", "While")


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    real, gpu = tf.config.list_physical_devices, tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    devices = mock.patch.object(
        tf.config, "list_physical_devices", lambda kind=None: [gpu] if kind == "GPU" else real(kind)
    )
    with devices, tf.device("/gpu:0"):
        yield


def trace(app: str, model_name: str, precision: str, xla: bool, accumulate_steps: int) -> tf.Graph:
    """Returns the graph of the app's training step, for batches as `iterator` of a GPU loader gives them."""
    config, optimization, train, loaders = (
        importlib.import_module(f"{app}.{name}") for name in ("config", "optimization", "train", "loaders")
    )
    config = hparams.override(config.get_config(model_name), f"{TINY[app]},image_size=64x96")
    keras.mixed_precision.set_global_policy(precision)
    try:
        with pretended_gpu():
            model = train.make_model(config, 3)
            optimizer = optimization.make_optimizer(
                config,
                optimization.make_schedule(config, 4, 10),
                precision=precision,
                accumulate_steps=accumulate_steps,
            )
            optimizer.build(model.trainable_variables)
            averages = AveragedWeights(model, 0.9)
            step = train.make_train_step(
                Ranks(), model, config, optimizer, averages, precision=precision, xla=xla
            )
            options = {"num_classes": 3, "training": True, "count_lost": True, "name_images": True}
            loader = loaders.SyntheticLoader(source=None, config=config, batch_size=2, **options)
            specs = {
                name: tf.TensorSpec(spec.shape, tf.int64 if spec.dtype == tf.int32 else spec.dtype)
                for name, spec in loader.element_spec.items()
            }
            return step.get_concrete_function(specs.pop("images"), specs, tf.TensorSpec([])).graph
    finally:
        keras.mixed_precision.set_global_policy("float32")


@dataclasses.dataclass
class Findings:
    """What is wrong in a graph for a GPU: names of operations."""

    without_kernel: list[str] = dataclasses.field(default_factory=list)
    waiting: list[str] = dataclasses.field(default_factory=list)


def examine(graph: tf.Graph) -> Findings:
    """Examines a graph and its functions, except those that XLA compiles to one program."""
    findings = Findings()
    for each in graphs_in(graph, graph, set()):
        on_host: dict[object, bool] = {}
        known: dict[object, bool] = {}  # whether grappler can compute a tensor before the step
        for operation in each.get_operations():
            types = tuple((n, a.type) for n, a in operation.node_def.attr.items() if a.HasField("type"))
            kernel = kernel_of(operation.type, types)
            if kernel is None:
                findings.without_kernel.append(f"{operation.name}: {operation.type}")
                continue
            definition = op_def_registry.get(operation.type)
            for tensor, needs_host in zip(
                operation.inputs, host_arguments(definition.input_arg, operation, kernel), strict=True
            ):
                if needs_host and not on_host[tensor.ref()] and not known[tensor.ref()]:
                    findings.waiting.append(f"{operation.name}: {operation.type} reads {tensor.name}")
            is_known = operation.type == "Const" or (
                bool(operation.inputs)
                and all(
                    known[tensor.ref()] or (operation.type in SHAPES and tensor.shape.is_fully_defined())
                    for tensor in operation.inputs
                )
            )
            outputs = host_arguments(definition.output_arg, operation, kernel)
            for tensor, host in zip(operation.outputs, outputs, strict=True):
                if operation.type in ("Placeholder", *CALLS):  # TensorFlow keeps int32 of calls on the host
                    host = tensor.dtype == tf.int32
                on_host[tensor.ref()] = host or tensor.dtype in (tf.resource, tf.variant)
                known[tensor.ref()] = is_known
    return findings


def graphs_in(graph: tf.Graph, root: tf.Graph, seen: set[str]) -> Iterator[tf.Graph]:
    yield graph
    for operation in graph.get_operations():
        if operation.node_def.attr["_XlaMustCompile"].b:
            continue
        for attribute in operation.node_def.attr.values():
            for function in [attribute.func, *attribute.list.func]:
                if function.name and function.name not in seen:
                    seen.add(function.name)
                    body = root._get_function(function.name) or graph._get_function(function.name)
                    if body.definition.attr["_XlaMustCompile"].b:
                        continue
                    yield from graphs_in(function_def_to_graph(body.cached_definition), root, seen)


@functools.cache
def kernel_of(operation_type: str, types: tuple[tuple[str, int], ...]) -> kernel_def_pb2.KernelDef | None:
    """Returns the kernel that a GPU uses for an operation with these types, or None."""
    registered = kernels.get_registered_kernels_for_op(operation_type).kernel
    for device in ("GPU", "DEFAULT"):
        for kernel in registered:
            fits = (
                not constraint.allowed_values.list.type
                or dict(types).get(constraint.name) in (None, *constraint.allowed_values.list.type)
                for constraint in kernel.constraint
            )
            if kernel.device_type == device and all(fits):
                return kernel
    return None


def host_arguments(arguments, operation: tf.Operation, kernel: kernel_def_pb2.KernelDef) -> list[bool]:
    """Returns for each tensor of an operation's inputs or outputs whether it is in the host's memory."""
    places = []
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        places += [argument.name in kernel.host_memory_arg] * count
    return places


@pytest.mark.parametrize(("app", "model_name", "precision", "xla", "accumulate_steps"), STEPS)
def test_every_operation_of_a_training_step_has_a_gpu_kernel_and_none_makes_the_host_wait(
    app, model_name, precision, xla, accumulate_steps
):
    findings = examine(trace(app, model_name, precision, xla, accumulate_steps))
    assert findings == Findings([], [])


def test_examination_of_a_graph_finds_a_branch_an_int32_comparison_and_a_missing_kernel():
    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> tf.Tensor:
        tf.strings.as_string(x, name="text")
        count = tf.math.count_nonzero(x, dtype=tf.int32, name="count")
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * tf.ones(tf.shape(x)), lambda: -x) + tf.zeros([count])

    with tf.device("/gpu:0"):
        findings = examine(function.get_concrete_function(tf.TensorSpec([3])).graph)
    assert findings.without_kernel == ["text: AsString"]
    branch, shape = findings.waiting
    assert "StatelessIf reads Greater" in branch and "zeros" in shape
