import types

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common import args, progress
from common.data import loader as loaders
from common.errors import UserError


@pytest.mark.parametrize("gpu, expected", [(True, "dali_gpu"), (False, "dali_cpu")])
def test_auto_is_what_the_machine_has(monkeypatch, gpu, expected):
    monkeypatch.setattr(loaders, "gpu_visible", lambda: gpu)
    assert loaders.resolve_type("auto") == expected
    for pipeline_type in set(args.PIPELINE_TYPES) - {"auto", "dali_gpu"}:
        assert loaders.resolve_type(pipeline_type) == pipeline_type


def test_types_that_cannot_be(monkeypatch):
    monkeypatch.setattr(loaders, "gpu_visible", lambda: False)
    with pytest.raises(UserError, match=r"=dali_gpu needs a GPU .*use dali_cpu"):
        loaders.resolve_type("dali_gpu")


def test_tensorflow_counts_the_gpus_that_it_sees(monkeypatch):
    """TensorFlow numbers only the visible GPUs."""
    for visible, device_id, expected in (([0, 1], 1, "/gpu:1"), ([3], 3, "/gpu:0"), ([], None, "/cpu:0")):
        gpus = [types.SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in visible]
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind, gpus=gpus: gpus)
        assert loaders.tensorflow_device(device_id) == expected


@pytest.mark.parametrize(
    "cores, loaders_here, expected", [(8, 2, 4), (2, 4, 1), (64, 2, 16), (6, 2, 6), (48, 8, 6)]
)
def test_a_loader_takes_its_share_of_the_cores(monkeypatch, cores, loaders_here, expected):
    monkeypatch.setattr(args.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(args.os, "cpu_count", lambda: 64 if cores in (6, 48) else cores)
    assert args.default_threads(loaders_here) == expected


def test_gpus_that_tensorflow_cannot_use_are_named_once(monkeypatch, capsys):
    monkeypatch.setattr(loaders.backend, "GetCUDADeviceCount", lambda: 2)
    progress.log_once.cache_clear()
    assert [loaders.resolve_type("auto") for _ in range(2)] == ["dali_cpu"] * 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "DALI sees a GPU, but TensorFlow does not" in line and "tensorflow[and-cuda]" in line


def random_pipeline() -> dali.Pipeline:
    """Builds a pipeline with random outputs: (2, 3) images, (1,) numbers in 10..20, and scalars in 20..30."""
    pipe = dali.Pipeline(4, num_threads=1, device_id=None, seed=1, exec_dynamic=True)
    with pipe:
        images = fn.random.uniform(range=(0.0, 1.0), shape=[2, 3])
        tens = fn.random.uniform(range=(10.0, 20.0), shape=[1])
        pipe.set_outputs(images, tens, fn.random.uniform(range=(20.0, 30.0)))
    return pipe


SPEC = (
    tf.TensorSpec((4, 2, 3), tf.float32),
    {"tens": tf.TensorSpec((4,), tf.float32), "twenties": tf.TensorSpec((4,), tf.float32)},
)


def test_from_pipeline_names_the_outputs():
    data = loaders.from_pipeline(random_pipeline(), SPEC, device_id=None)
    assert data.element_spec == SPEC
    pipe = random_pipeline()
    for images, targets in data.take(3):
        expected = [np.asarray(output.as_tensor()) for output in pipe.run()]
        np.testing.assert_array_equal(images, expected[0])
        np.testing.assert_array_equal(targets["tens"], expected[1].reshape(4))
        np.testing.assert_array_equal(targets["twenties"], expected[2].reshape(4))
