r"""Passes arrays from DALI to NumPy and TensorFlow, and back to DALI, by DLPack and without copies.

    python examples/preprocess_dlpack.py

Libraries share tensors in memory by DLPack (https://dmlc.github.io/dlpack). PyTorch, JAX and CuPy get tensors
in the same way. All except NumPy can use tensors on a GPU (`Preprocessor(..., device="gpu", device_id=0)`).
"""

import os
import pathlib
import sys
import tempfile

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import tensorflow as tf

from common import errors
from tools import synthetic
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.preprocessor import Preprocessor

OPS = "resize:short=72 | crop:64x48"
BATCH_SIZE = 4


def address(tensor: object) -> int:
    return np.from_dlpack(tensor).ctypes.data


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        synthetic.draw_dataset(directory, num_images=BATCH_SIZE, seed=0)
        source = open_image_source("files", os.path.join(directory, "images"))
        work = Preprocessor(source=source, ops=OPS, batch_size=BATCH_SIZE)
        images, _ = next(work.dynamic())
        outputs, _ = work.pipeline.run()

    # --- DALI to NumPy. A batch is a list of tensors, each of which is passed separately.
    first = np.from_dlpack(images.tensors[0])
    assert first.shape == (64, 48, 3) and address(images.tensors[0]) == first.ctypes.data
    assert not first.flags.writeable
    # If all images have the same size, `as_tensor` makes one tensor of the batch.
    batch = ndd.as_tensor(images)
    whole = np.from_dlpack(batch)
    np.testing.assert_array_equal(whole[0], first)
    print(f"NumPy: {whole.dtype} {whole.shape}, at the same address as in DALI")

    # --- DALI to TensorFlow, which needs the DLPack capsule instead of the tensor.
    tensor = tf.experimental.dlpack.from_dlpack(batch.__dlpack__())
    assert address(tensor) == address(batch)
    np.testing.assert_array_equal(tensor, whole)
    print(f"TensorFlow: {tensor.dtype.name} {tensor.shape}, at the same address")

    # --- The results of a pipeline are passed in the same way: by as_tensor(), or image by image.
    from_pipeline = np.from_dlpack(outputs.as_tensor())
    np.testing.assert_array_equal(from_pipeline, whole)

    # --- NumPy, TensorFlow to DALI. `as_tensor` shares the memory of a contiguous array; `tensor` copies it.
    mine = np.arange(64 * 48 * 3, dtype=np.uint8).reshape(64, 48, 3)
    theirs = tf.reverse(tf.constant(mine), axis=[1])  # swaps left and right
    for array in (mine, theirs):
        assert address(ndd.as_tensor(array)) == address(array)
    assert address(ndd.tensor(mine)) != address(mine)
    flipped = ndd.flip(ndd.as_tensor(mine, layout="HWC"), horizontal=1)
    np.testing.assert_array_equal(np.from_dlpack(flipped), theirs)
    print("DALI: arrays of NumPy and TensorFlow, without a copy; flipped, one equals the other")


if __name__ == "__main__":
    errors.run(main)
