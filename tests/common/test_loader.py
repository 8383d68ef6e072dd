"""What loaders share: --pipeline_type, placement, noise, and DALI pipelines as tf.data.

Steps per epoch are tested with the shards in test_dali_ops.py, saved iterators in test_readers.py.
"""

import types

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common import args
from common import loader as loaders
from common.errors import UserError


@pytest.mark.parametrize("gpu, expected", [(True, "dali_gpu"), (False, "dali_cpu")])
def test_auto_is_what_the_machine_has(monkeypatch, gpu, expected):
    monkeypatch.setattr(loaders, "gpu_visible", lambda: gpu)
    assert loaders.resolve_type("auto") == expected
    for pipeline_type in set(args.PIPELINE_TYPES) - {"auto", "dali_gpu"}:
        assert loaders.resolve_type(pipeline_type) == pipeline_type


def test_types_that_cannot_be(monkeypatch):
    monkeypatch.setattr(loaders, "gpu_visible", lambda: False)
    with pytest.raises(UserError, match=r"=dali_gpu needs a GPU .*use --pipeline_type=dali_cpu"):
        loaders.resolve_type("dali_gpu")
    with pytest.raises(UserError, match="for training speed only"):
        loaders.refuse_synthetic("synthetic")
    loaders.refuse_synthetic("auto")


def test_placement_of_a_gpu_loader(monkeypatch):
    monkeypatch.setattr(loaders.tf, "device", lambda name: name)
    assert loaders.placement(types.SimpleNamespace(pipeline_type="dali_gpu"), 1) == "/gpu:1"
    assert loaders.placement(types.SimpleNamespace(pipeline_type="tensorflow"), 1) == "/cpu:0"


def test_synthetic_boxes_are_boxes():
    boxes, classes, count = loaders.synthetic_boxes(np.random.default_rng(0), 3, 9)
    assert boxes.shape == (9, 4) and boxes.dtype == np.float32
    assert classes.shape == (9,) and classes.dtype == np.int32
    assert count == loaders.SYNTHETIC_BOXES and (boxes[count:] == -1).all() and (classes[count:] == -1).all()
    boxes = boxes[:count]
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= 1).all() and (boxes[:, 2:] > boxes[:, :2]).all()
    many = np.concatenate([loaders.synthetic_boxes(np.random.default_rng(i), 3, 7)[1] for i in range(20)])
    assert set(many) == {0, 1, 2}


def random_pipeline() -> dali.Pipeline:
    """Outputs random (2, 3) images, (1,) numbers from 10 on, and scalars from 20 on."""
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
