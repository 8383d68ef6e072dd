"""Tests the host: driver, libraries, TensorFlow's XLA, Horovod's NCCL. These tests never ran on a GPU."""

import ctypes
import pathlib
import subprocess

import pytest

pytestmark = pytest.mark.gpu
HARDWARE = 3  # NVJPEG_BACKEND_HARDWARE of nvjpeg.h


def test_nvidia_smi_finds_the_driver():
    assert subprocess.run(["nvidia-smi"]).returncode == 0


def test_nvidia_video_library_libnvcuvid_can_be_loaded_on_this_host():
    """Without it no JPEG engine works. In a container, add `video` to NVIDIA_DRIVER_CAPABILITIES."""
    ctypes.CDLL("libnvcuvid.so.1")


def test_nvjpeg_reports_jpeg_engines_on_this_gpu_or_else_the_test_is_skipped():
    """Counts the engines as nvImageCodec does (hw_decoder.cpp)."""
    from nvidia import dali

    package = pathlib.Path(dali.__file__).parents[1] / "nvjpeg"
    nvjpeg = ctypes.CDLL(next(map(str, package.glob("lib/libnvjpeg.so.*")), "libnvjpeg.so.12"))
    handle, engines, cores = ctypes.c_void_p(), ctypes.c_uint(0), ctypes.c_uint(0)
    if not nvjpeg.nvjpegCreateEx(HARDWARE, None, None, 0, ctypes.byref(handle)):
        nvjpeg.nvjpegGetHardwareDecoderInfo(handle, ctypes.byref(engines), ctypes.byref(cores))
    if not engines.value:
        pytest.skip("no JPEG engine on this GPU: --hw_decoder_load changes nothing")


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
