import types

import numpy as np
import pytest

from common import loading
from common.errors import UserError


@pytest.mark.parametrize("gpu, expected", [(True, "dali_gpu"), (False, "dali_cpu")])
def test_auto_is_what_the_machine_has(monkeypatch, gpu, expected):
    monkeypatch.setattr(loading, "gpu_visible", lambda: gpu)
    assert loading.resolve_type("auto") == expected
    for pipeline_type in ("dali_cpu", "tensorflow", "synthetic"):
        assert loading.resolve_type(pipeline_type) == pipeline_type


def test_types_that_cannot_be(monkeypatch):
    with pytest.raises(UserError, match="unknown pipeline type 'dali': did you mean"):
        loading.resolve_type("dali")
    monkeypatch.setattr(loading, "gpu_visible", lambda: False)
    with pytest.raises(UserError, match=r"=dali_gpu needs a GPU .*use --pipeline_type=dali_cpu"):
        loading.resolve_type("dali_gpu")
    with pytest.raises(UserError, match="for training speed only"):
        loading.refuse_synthetic("synthetic")
    loading.refuse_synthetic("auto")


def test_dali_device_that_cannot_be(monkeypatch):
    loading.check_dali_device(None, "tensorflow", "horovod")
    monkeypatch.setattr(loading, "gpu_visible", lambda: False)
    with pytest.raises(UserError, match=r"--dali_device_id=1 is for .*=dali_gpu, and this is dali_cpu"):
        loading.check_dali_device(1, "auto")
    monkeypatch.setattr(loading, "gpu_visible", lambda: True)
    monkeypatch.setattr(loading.tf.config, "list_physical_devices", lambda kind: ["GPU:0", "GPU:1"])
    monkeypatch.setattr(loading.backend, "GetCUDADeviceCount", lambda: 3)
    loading.check_dali_device(1, "auto")
    with pytest.raises(UserError, match=r"--dali_device_id=2: there is no such GPU; .* 0 to 1$"):
        loading.check_dali_device(2, "dali_gpu")
    with pytest.raises(UserError, match=r"--dali_device_id=1 does not go with --strategy=horovod"):
        loading.check_dali_device(1, "dali_gpu", "horovod")


@pytest.mark.parametrize("chosen, expected", [(None, "/gpu:1"), (0, "/gpu:0"), (3, "/gpu:3")])
def test_placement_of_a_gpu_loader(monkeypatch, chosen, expected):
    monkeypatch.setattr(loading.tf, "device", lambda name: name)
    loader = types.SimpleNamespace(pipeline_type="dali_gpu", dali_device_id=chosen)
    assert loading.placement(loader, 1) == expected
    assert loading.placement(types.SimpleNamespace(pipeline_type="tensorflow"), 1) == "/cpu:0"


def test_synthetic_boxes_are_boxes():
    boxes, labels = loading.synthetic_boxes(np.random.default_rng(0), 3)
    assert boxes.shape == (loading.SYNTHETIC_BOXES, 4) and boxes.dtype == np.float32
    assert labels.shape == (loading.SYNTHETIC_BOXES,) and labels.dtype == np.int32
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= 1).all() and (boxes[:, 2:] > boxes[:, :2]).all()
    many = np.concatenate([loading.synthetic_boxes(np.random.default_rng(i), 3)[1] for i in range(20)])
    assert set(many) == {1, 2, 3}
