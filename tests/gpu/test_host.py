"""Tests the host: driver, libraries, TensorFlow's XLA, Horovod's NCCL. These tests never ran on a GPU."""

import ctypes
import subprocess

import pytest

pytestmark = pytest.mark.gpu


def test_nvidia_smi_finds_the_driver():
    assert subprocess.run(["nvidia-smi"]).returncode == 0


def test_nvidia_video_library_libnvcuvid_can_be_loaded_on_this_host():
    """Without it no JPEG engine works. In a container, add `video` to NVIDIA_DRIVER_CAPABILITIES."""
    ctypes.CDLL("libnvcuvid.so.1")


def test_tensorflow_compiles_for_the_gpu_with_xla():
    import tensorflow as tf

    assert tf.config.list_physical_devices("GPU"), (
        "TensorFlow sees no GPU: pip install 'tensorflow[and-cuda]'"
    )
    with tf.device("/gpu:0"):
        result = tf.function(lambda x: tf.atan2(x, x**x), jit_compile=True)(tf.ones(8))
    assert result.device.endswith("GPU:0")


def test_horovod_was_built_with_nccl():
    from horovod.common.util import nccl_built

    assert nccl_built()
