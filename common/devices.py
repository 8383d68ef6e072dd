"""GPU settings that have to be made before TensorFlow touches a GPU."""

import tensorflow as tf


def share_gpu_memory() -> None:
    """Lets TensorFlow take GPU memory as it needs it: by default it takes all, and DALI finds none left."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
