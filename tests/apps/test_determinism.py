"""Tests that a training step gives equal bits on a CPU if it is repeated, or run in another process."""

import dataclasses
import hashlib
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context

from common.distributed import start
from common.training.ema import AveragedWeights
from tests.conftest import ROOT

# {app: (model name, image side, batch size, fields)}
MODELS = {
    "efficientdet": ("efficientdet-d0", 128, 16, {"fpn_cells": 1, "head_repeats": 1}),
    "yolov4": ("yolov4-tiny", 128, 4, {}),
}
REPEATS = 12
UPDATES = 4


@pytest.mark.slow
@pytest.mark.parametrize(("app_name", "onednn"), [("efficientdet", "1"), ("yolov4", "1"), ("yolov4", "0")])
def test_training_steps_repeated_or_in_another_process_give_equal_bits(app_name, onednn, monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    command = [sys.executable, "-m", "tests.apps.test_determinism", app_name]
    processes = [
        subprocess.Popen([*command, str(repeats)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for repeats in (REPEATS, 1)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    assert first["moved"] and first["unordered_sums"] == first["differing"] == []


def test_sums_of_three_terms_and_of_their_gradients_are_added_in_pairs(monkeypatch):
    monkeypatch.setattr(start.gen_math_ops, "add_n", start._add_in_pairs)
    x = tf.constant([[2.0**24, 1.0, 1.0], [-1.0, 1.0, 2.0**-30]])

    @tf.function
    def sums(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.add_n([x[:, 0], x[:, 1], x[:, 2]])
            result = tf.reduce_sum(total * [1.0, 2.0]) + tf.reduce_sum(x * x) + tf.reduce_sum(3.0 * x)
        return total, tape.gradient(result, x)

    graph = sums.get_concrete_function(x).graph.as_graph_def()
    assert any(node.op == "AddN" for node in graph.node)
    assert _unordered_sums([graph]) == []
    total, gradient = sums(x)
    assert total.numpy().tolist() == [2.0**24, 2.0**-30]  # summed in order; 2**24 + 1 is rounded to 2**24
    np.testing.assert_allclose(gradient, 2.0 * x + 3.0 + [[1.0], [2.0]], rtol=1e-6)
    assert tf.add_n([x[0]]).numpy().tolist() == x[0].numpy().tolist()


@pytest.mark.parametrize(("gpus", "sum_function"), [([], start._add_in_pairs), (["GPU:0"], start._add_n)])
def test_reproducible_replaces_the_sum_of_tensors_only_without_a_gpu(monkeypatch, gpus, sum_function):
    monkeypatch.setattr(start.gen_math_ops, "add_n", start._add_n)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    start.reproducible()
    assert start.gen_math_ops.add_n is sum_function


def _unordered_sums(graphs: Iterable[graph_pb2.GraphDef]) -> list[str]:
    """Returns the nodes that may add their terms in a different order each time."""

    def is_long(node) -> bool:
        terms = [name for name in node.input if not name.startswith("^")]
        return node.op in ("AccumulateNV2", "TemporaryVariable") or (node.op == "AddN" and len(terms) > 2)

    return [node.name for graph in graphs for node in graph.node if is_long(node)]


def _repeat_steps(app_name: str, repeats: int) -> dict:
    """Returns which values differed when a step was repeated, and a hash of later weights."""
    keras.utils.set_random_seed(0)
    train = importlib.import_module(f"{app_name}.train")
    model_name, side, batch_size, changes = MODELS[app_name]
    config = importlib.import_module(f"{app_name}.config").get_config(model_name)
    config = dataclasses.replace(config, image_size=(side, side), **changes)
    config = dataclasses.replace(config, clip_norm=0.1)
    model = train.build_model(model_name, num_classes=3, config=config)
    optimizer = train.make_optimizer(config, 0.01, precision="float32")
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, 0.9)
    loader = importlib.import_module(f"{app_name}.loaders").make_loader(
        "synthetic", source=None, config=config, batch_size=batch_size, training=True, num_classes=3
    )
    images, targets = next(iter(loader.dataset()))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = train.loss_values(model, config, images, targets)["loss"]
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        averaged.update()
        return gradients

    variables = [v.value for v in [*model.variables, *optimizer.variables]] + list(averaged.variables)
    initial = [variable.numpy() for variable in variables]
    context.context().enable_graph_collection()
    step()
    graphs = context.context().export_run_metadata().partition_graphs
    context.context().disable_graph_collection()
    first, differing = None, set()
    done = threading.Event()
    busy = threading.Thread(target=_keep_busy, args=[done], daemon=True)
    busy.start()
    for _ in range(repeats):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        gradients = step()
        named = {v.path: gradient for v, gradient in zip(model.trainable_variables, gradients, strict=True)}
        named |= {f"{i} {variable.name} after": variable for i, variable in enumerate(variables)}
        values = {name: np.asarray(value).tobytes() for name, value in named.items()}
        first = first or values
        differing |= {name for name in values if values[name] != first[name]}
    for _ in range(UPDATES):
        step()
    done.set()
    busy.join()
    final = [variable.numpy() for variable in variables]
    return {
        "unordered_sums": _unordered_sums(graphs),
        "differing": sorted(differing),
        "moved": any(not np.array_equal(a, b) for a, b in zip(initial, final, strict=True)),
        "weights": hashlib.sha256(b"".join(value.tobytes() for value in final)).hexdigest(),
    }


def _keep_busy(done: threading.Event) -> None:
    data = bytes(1_000_000)
    while not done.is_set():
        hashlib.sha256(data)


if __name__ == "__main__":
    start.reproducible()
    print(json.dumps(_repeat_steps(sys.argv[1], int(sys.argv[2]))))
