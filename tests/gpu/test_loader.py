"""Tests that batches of a GPU loader stay on the GPU. No test with the mark `gpu` ever ran on a GPU."""

import ctypes
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context

from common import hparams
from common.data import loader
from common.data.open import open_coco
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.training import input_feed
from common.training.checkpoints import RunState
from tests.apps.conftest import APPS

INPUT = (64, 96)
NUM_CLASSES = 3


@pytest.fixture(scope="module", params=APPS)
def app(request):
    return APPS[request.param]


@pytest.fixture(scope="module")
def source(drawn):
    return open_coco(drawn / "images", drawn / "instances.json")


@pytest.fixture
def config(app):
    published = app.package.config.get_config(app.model_name)
    return hparams.override(published, f"{app.tiny},image_size={INPUT[0]}x{INPUT[1]}")


@pytest.fixture
def feed(app, config, source):
    def run(pipeline_type: str) -> input_feed.InputFeed:
        options = {"source": source, "config": config, "batch_size": 2, "training": True}

        def open_loader(device_index: int = 0, seed: int = 0):
            outputs = {"device_id": device_index, "seed": seed, "count_lost": True, "name_images": True}
            return app.make_loader(pipeline_type, **options, **outputs)

        return input_feed.InputFeed(
            Ranks(), open_loader, lambda epochs_done: {"seed": epochs_done}, RunState(), 3, 1
        )

    return run


@pytest.mark.gpu
def test_gpu_loader_gives_all_tensors_on_the_gpu_and_none_of_type_int32(feed):
    images, targets = next(feed("dali_gpu"))
    for name, tensor in {"images": images, **targets}.items():
        assert tensor.device.endswith("GPU:0"), name
        assert tensor.backing_device.endswith("GPU:0"), name
        assert tensor.dtype != tf.int32, name  # TensorFlow would copy int32 to the host before the step


@pytest.mark.gpu
def test_no_tensor_is_copied_to_the_host_between_gpu_loader_and_loss(app, feed, config):
    images, targets = next(feed("dali_gpu"))
    with tf.device("/gpu:0"):
        model = app.package.train.build_model(app.model_name, NUM_CLASSES, config=config)
        loss = tf.function(lambda *batch: app.package.train.loss_values(model, config, *batch)["loss"])
        graphs = graphs_of(loss, images, targets)
    assert [name for graph in graphs for name in sent_to_host(graph)] == []


@pytest.mark.gpu
def test_gpu_loader_opened_twenty_times_needs_no_more_memory_than_opened_five_times(feed):
    cuda, free, total = ctypes.CDLL("libcudart.so.12"), ctypes.c_size_t(), ctypes.c_size_t()
    free_bytes = []
    for _ in range(20):
        opened = feed("dali_gpu")
        next(opened)
        opened.close()
        del opened
        assert cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
        free_bytes.append(free.value)
    assert (
        free_bytes[-1] > free_bytes[4] - 2**27
    )  # each GPU pipeline of this test needs more than 1/15 of this


@pytest.mark.parametrize("pipeline_type", [pytest.param("dali_gpu", marks=pytest.mark.gpu), "dali_cpu"])
def test_damaged_jpeg_ends_the_loader_with_an_error_that_names_the_loader(
    app, config, drawn, tmp_path, pipeline_type
):
    shutil.copytree(drawn, tmp_path, dirs_exist_ok=True)
    source = open_coco(tmp_path / "images", tmp_path / "instances.json")
    for path in (tmp_path / "images").glob("0[0-9].jpg"):
        path.write_bytes(path.read_bytes()[:64])
    feed = input_feed.InputFeed(
        Ranks(),
        lambda **_: app.make_loader(pipeline_type, source=source, config=config, batch_size=2, training=True),
        lambda epochs_done: {},
        RunState(),
        3,
        1,
    )
    with pytest.raises(UserError, match=rf"the loader \({pipeline_type}\) stopped|{tmp_path.name}"):
        for _ in range(6):
            next(feed)


def graphs_of(function: Callable, *arguments) -> list[graph_pb2.GraphDef]:
    """Returns the graphs that the devices run."""
    context.context().enable_graph_collection()
    try:
        function(*arguments)
        return list(context.context().export_run_metadata().partition_graphs)
    finally:
        context.context().disable_graph_collection()


def sent_to_host(graph: graph_pb2.GraphDef) -> list[str]:
    """Returns the names of the tensors that are copied from a GPU to the host."""
    names = []
    for node in graph.node:
        if node.op not in ("_Send", "_HostRecv"):
            continue
        sender, receiver = (node.attr[name].s.decode() for name in ("send_device", "recv_device"))
        to_cpu = node.op == "_Send" and "GPU" in sender and "CPU" in receiver
        if to_cpu or (node.op == "_HostRecv" and "GPU" in sender):
            names.append(node.attr["tensor_name"].s.decode())
    return names


# --- without a GPU ---


def test_loss_of_a_batch_with_int64_targets_equals_its_loss_with_int32_targets(app, feed, config):
    images, targets = next(feed("dali_cpu"))
    _, gpu_targets = loader._without_int32((images, targets))
    assert tf.int32 in {tensor.dtype for tensor in targets.values()}
    assert {tensor.dtype for tensor in gpu_targets.values()} == {tf.float32, tf.int64}
    model = app.package.train.build_model(app.model_name, NUM_CLASSES, config=config)
    losses = [
        app.package.train.loss_values(model, config, images, each)["loss"] for each in (targets, gpu_targets)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


@pytest.mark.parametrize(("device_id", "dtype"), [(0, tf.int64), (None, tf.int32)], ids=["gpu", "cpu"])
def test_synthetic_loader_for_a_gpu_gives_int64_classes_and_the_same_tensors_in_all_batches(
    app, config, monkeypatch, device_id, dtype
):
    monkeypatch.setattr(loader, "tensorflow_device", lambda _: "/cpu:0")
    options = {"source": None, "config": config, "batch_size": 2, "training": True, "num_classes": 3}
    batches = app.package.loaders.SyntheticLoader(device_id=device_id, **options).iterator()
    (images, targets), (next_images, next_targets) = next(batches), next(batches)
    assert targets["classes"].dtype == dtype
    assert targets["boxes"].dtype == tf.float32
    is_shared = {images is next_images, *(targets[name] is next_targets[name] for name in targets)}
    assert is_shared == {device_id == 0}


# --- the graph for a GPU, which can be defined without one ---


@pytest.fixture
def operators(app, config, source):
    """Gives operators(**options): (name, device, arguments, input devices) of each operator."""

    def define(**options):
        fixed = {"source": source, "config": config, "batch_size": 2, "training": True, "device_id": 0}
        pipeline = app.package.loaders.LOADERS["dali"](**fixed, **options)
        queue = list(pipeline._define(list(pipeline.element_spec))._graph_out)
        assert {node.device for node in queue} == {"gpu"}
        operators = {}
        while queue:
            instance = queue.pop().source
            if id(instance) not in operators:  # not instance.id: DALI numbers operators by two counters
                inputs, operator = instance._inputs or [], instance._op
                arguments = operator._init_args | operator._call_args
                devices = [node.device for node in inputs]
                operators[id(instance)] = (type(operator).__name__, operator._device, arguments, devices)
                queue += inputs
        return list(operators.values())

    return define


def test_gpu_graph_decodes_complete_images_into_memory_for_the_largest_image_of_the_data(operators):
    decoders = [x for x in operators(hw_decoder_load=0.3) if x[0] in ("Image", "ImageSlice")]
    assert [(name, device) for name, device, *_ in decoders] == [("Image", "mixed")] * len(decoders) != []
    for _, _, arguments, _ in decoders:
        assert arguments["hw_decoder_load"] == 0.3
        assert arguments["jpeg_fancy_upsampling"] and not arguments["adjust_orientation"]
        size = arguments["preallocate_height_hint"], arguments["preallocate_width_hint"]
        assert size == (137, 151)


def test_gpu_graph_without_fancy_upsampling_decodes_images_without_it(operators):
    decoders = [x for x in operators(fancy_upsampling=False) if x[0] == "Image"]
    assert [arguments["jpeg_fancy_upsampling"] for _, _, arguments, _ in decoders] == [False] * len(decoders)


def test_gpu_graph_with_roi_decoding_decodes_crops(operators):
    assert "ImageSlice" in {name for name, *_ in operators(roi_decoding=True)}


def test_crop_window_of_each_slice_operator_on_the_gpu_comes_from_the_cpu(operators):
    """A constant on the GPU would make each batch wait for its copy."""
    for name, device, _, inputs in operators():
        if device == "gpu" and name == "Slice":
            assert "gpu" not in inputs[1:], name


def test_making_and_reading_a_dali_loader_never_calls_the_build_method_of_a_pipeline(
    app, config, source, monkeypatch
):
    monkeypatch.setattr(dali.Pipeline, "build", lambda self: pytest.fail("built"))
    loader = app.make_loader("dali_cpu", source=source, config=config, batch_size=2, training=True)
    images, _ = next(loader.iterator())
    assert images.shape == (2, *INPUT, 3)
