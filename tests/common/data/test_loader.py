import types

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common import args, progress
from common.data import loader as loaders
from common.errors import UserError


@pytest.mark.parametrize(
    ("gpu", "expected"), [(True, "dali_gpu"), (False, "dali_cpu")], ids=["gpu", "no gpu"]
)
def test_pipeline_type_auto_becomes_the_dali_pipeline_of_the_device(monkeypatch, gpu, expected):
    monkeypatch.setattr(loaders, "gpu_visible", lambda: gpu)
    assert loaders.resolve_type("auto") == expected
    for pipeline_type in set(args.PIPELINE_TYPES) - {"auto", "dali_gpu"}:
        assert loaders.resolve_type(pipeline_type) == pipeline_type


def test_dali_gpu_pipeline_without_a_visible_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(loaders, "gpu_visible", lambda: False)
    with pytest.raises(UserError, match=r"=dali_gpu needs a GPU .*use dali_cpu"):
        loaders.resolve_type("dali_gpu")


def test_tensorflow_device_is_numbered_among_the_visible_gpus(monkeypatch):
    for visible, device_id, expected in (([0, 1], 1, "/gpu:1"), ([3], 3, "/gpu:0"), ([], None, "/cpu:0")):
        gpus = [types.SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in visible]
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind, gpus=gpus: gpus)
        assert loaders.tensorflow_device(device_id) == expected


# (cores of the host, cores that the process may use, loaders on the host, threads)
THREADS = {
    "each loader has half": (8, 8, 2, 4),
    "at least one": (2, 2, 4, 1),
    "at most sixteen": (64, 64, 2, 16),
    "each rank has its own cores": (64, 6, 2, 6),
    "ranks share a part of the host": (64, 48, 8, 6),
}


@pytest.mark.parametrize(("installed", "usable", "num_loaders", "expected"), THREADS.values(), ids=THREADS)
def test_default_number_of_loader_threads_divides_the_cores_of_the_host_among_its_loaders(
    monkeypatch, installed, usable, num_loaders, expected
):
    monkeypatch.setattr(args.os, "sched_getaffinity", lambda _: range(usable))
    monkeypatch.setattr(args.os, "cpu_count", lambda: installed)
    assert args.default_threads(num_loaders) == expected


def test_pipeline_type_auto_is_dali_cpu_with_one_warning_if_only_dali_sees_a_gpu(monkeypatch, capsys):
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


def test_tf_dataset_of_a_dali_pipeline_has_the_given_spec_and_the_outputs_of_the_pipeline():
    data = loaders.from_pipeline(random_pipeline(), SPEC, device_id=None)
    assert data.element_spec == SPEC
    pipe = random_pipeline()
    for images, targets in data.take(3):
        expected = [np.asarray(output.as_tensor()) for output in pipe.run()]
        np.testing.assert_array_equal(images, expected[0])
        np.testing.assert_array_equal(targets["tens"], expected[1].reshape(4))
        np.testing.assert_array_equal(targets["twenties"], expected[2].reshape(4))
