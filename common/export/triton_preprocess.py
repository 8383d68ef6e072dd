"""The preprocessing of a detector in DALI: bytes of an image file -> pixels of the network input.

Triton's DALI backend builds and serializes this pipeline. Its pixels are those that eval.py feeds to the
network: the whole image, not rotated by EXIF, resized and padded. DALI runs on the GPU if there is one.
"""

from typing import Any

from nvidia.dali import backend, fn, math, pipeline_def, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.plugin.triton import autoserialize

HEIGHT = 512  # of the network input
WIDTH = 512
KEEP_ASPECT = True  # False: the image is stretched over the network input
CENTERED = False  # False: the image is in the top left corner
ANTIALIAS = True
BATCH_SIZE = 16
ON_GPU = backend.GetCUDADeviceCount() > 0
DEVICE_ID: Any = 0 if ON_GPU else None


def int32(values: DataNode) -> DataNode:
    return fn.cast(values, dtype=types.INT32)


@autoserialize
@pipeline_def(batch_size=BATCH_SIZE, num_threads=4, device_id=DEVICE_ID)
def preprocess() -> tuple[DataNode, DataNode]:
    """Returns uint8 (HEIGHT, WIDTH, 3) RGB, and int32 (2,), height and width of the original image."""
    encoded = fn.external_source(device="cpu", name="image", dtype=types.UINT8, ndim=1)
    size = int32(fn.peek_image_shape(encoded, adjust_orientation=False)[0:2])
    new_size = fn.stack(0 * size[0] + HEIGHT, 0 * size[1] + WIDTH)
    if KEEP_ASPECT:  # one side fills the input, the other is rounded to whole pixels, halves up
        height, width = size[0], size[1]
        new_height = math.clamp((2 * WIDTH * height + width) // (2 * width), 1, HEIGHT)
        new_width = math.clamp((2 * HEIGHT * width + height) // (2 * height), 1, WIDTH)
        new_size = int32(fn.stack(new_height, new_width))
    top_left = (fn.stack(HEIGHT - new_size[0], WIDTH - new_size[1]) // 2) * int(CENTERED)
    images: Any = fn.decoders.image(
        encoded, device="mixed" if ON_GPU else "cpu", output_type=types.RGB, adjust_orientation=False
    )
    images = fn.resize(images, size=fn.cast(new_size, dtype=types.FLOAT), antialias=ANTIALIAS)
    images = fn.slice(
        images,
        start=int32(-top_left),
        shape=[HEIGHT, WIDTH],
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=0.0,
    )
    return images, size
