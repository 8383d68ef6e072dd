"""Hands images from DALI to other libraries, and writes them: NumPy, PyTorch, TensorFlow, DLPack, files.

    python outputs.py --input=DIR    # runs every function on the images in DIR

The file needs DALI, NumPy and Pillow, and for its examples PyTorch or TensorFlow. A pipeline never ends:
count its batches, or give the number of steps. Its results stay valid after the next `run()`.
"""

import argparse
import glob
import os
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import Pipeline, fn, pipeline_def
from PIL import Image

SIZE, BATCH_SIZE = (64, 48), 4  # (height, width): not square, so that a swap is seen
THREADS = {"batch_size": BATCH_SIZE, "num_threads": 2, "device_id": None}  # device_id=None: without a GPU


@pipeline_def
def example_pipeline(paths: Sequence[str]):
    """Returns images, uint8 (64, 48, 3), and labels, int32 (1,), the numbers of the files."""
    encoded, labels = fn.readers.file(files=paths, labels=list(range(len(paths))), name="reader")
    return fn.resize(fn.decoders.image(encoded), size=SIZE), labels


# --- NumPy ---


def numpy_batch(pipeline: Pipeline) -> list[np.ndarray]:
    """Runs a pipeline once. Returns each output as one array; its samples must have one shape."""
    return [output.as_cpu().as_array() for output in pipeline.run()]  # as_cpu copies from a GPU


def numpy_images(pipeline: Pipeline, count: int) -> Iterator[np.ndarray]:
    """Yields the first `count` images, of any shapes: the first output of a built pipeline."""
    for begin in range(0, count, pipeline.max_batch_size):
        images = pipeline.run()[0].as_cpu()
        for number in range(min(len(images), count - begin)):
            yield np.array(images[number])


# --- PyTorch ---


def torch_loader(pipeline: Pipeline):
    """Returns an iterator over epochs of {"images": tensor, "labels": tensor}, each image once."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    names = ["images", "labels"]
    policy = LastBatchPolicy.PARTIAL  # the last batch is smaller; FILL repeats images
    batches = DALIGenericIterator(
        pipeline, names, reader_name="reader", last_batch_policy=policy, auto_reset=True
    )
    return (batch[0] for batch in batches)  # one dict for each pipeline


# --- TensorFlow ---


def tensorflow_dataset(paths: Sequence[str]):
    """Returns an endless tf.data.Dataset of (images, labels). Keras' `fit` takes it, with steps_per_epoch."""
    import nvidia.dali.plugin.tf as dali_tf
    import tensorflow as tf

    with tf.device("/cpu:0"):
        return dali_tf.DALIDataset(
            pipeline=example_pipeline(paths, **THREADS),
            output_shapes=((BATCH_SIZE, *SIZE, 3), (BATCH_SIZE, 1)),
            output_dtypes=(tf.uint8, tf.int32),
            **THREADS,
        )


# --- DLPack: libraries share memory without a copy, also on a GPU ---


def numpy_view(pipeline: Pipeline) -> np.ndarray:
    """Returns the images of a batch, read-only. `torch.from_dlpack` takes the same tensor."""
    return np.from_dlpack(pipeline.run()[0].as_tensor())


def tensorflow_view(tensor):
    """Returns a DALI tensor as a TensorFlow tensor. TensorFlow takes the capsule, not the tensor."""
    import tensorflow as tf

    return tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())


def dali_view(array) -> ndd.Tensor:
    """Returns an array (height, width, channels) of NumPy, TensorFlow or PyTorch as a tensor for DALI."""
    return ndd.as_tensor(array, layout="HWC")  # `ndd.tensor` copies


# --- files ---


def write_npz(path: str, images: Iterable[np.ndarray], count: int) -> tuple[int, ...]:
    """Writes `count` images of one shape and dtype as the array `images`, one at a time to save memory.

    Returns the shape of the array. If it fails, no file is left.

    Raises:
        ValueError: the images have different shapes.
    """
    images = iter(images)
    first = next(images)
    header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False}
    header["shape"] = shape = (count, *first.shape)
    temporary = pathlib.Path(f"{path}.tmp")
    try:
        with (
            zipfile.ZipFile(temporary, "w") as archive,
            archive.open("images.npy", "w", force_zip64=True) as stream,
        ):
            np.lib.format.write_array_header_1_0(stream, header)
            stream.write(np.ascontiguousarray(first).data)
            for number, image in enumerate(images, 1):
                if image.shape != first.shape:
                    raise ValueError(f"image {number} has shape {image.shape}, image 0 {first.shape}")
                stream.write(np.ascontiguousarray(image).data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return shape


def write_pictures(directory: str | os.PathLike, images: Iterable[np.ndarray], names: Sequence[str]) -> None:
    """Writes uint8 images (height, width, 1 or 3) as PNG.

    `names` are paths in the directory without suffix. A repeated name gets a number: a.png, a-2.png.
    """
    last: dict[pathlib.Path, int] = {}  # path -> its last number
    for image, name in zip(images, names, strict=False):
        stem = path = pathlib.Path(directory, name)
        while path in last:
            last[stem] += 1
            path = stem.with_name(f"{stem.name}-{last[stem]}")
        last[path] = 1
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = image[..., 0] if image.shape[-1] == 1 else image
        Image.fromarray(pixels).save(path.with_name(f"{path.name}.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Hands images to other libraries.")
    parser.add_argument("--input", required=True, help="directory of at least four images")
    parser.add_argument("--output_dir", default="runs/outputs", help="directory for images.npz and pictures")
    arguments = parser.parse_args()
    paths = sorted(glob.glob(f"{arguments.input}/*.jpg") + glob.glob(f"{arguments.input}/*.png"))
    if len(paths) < BATCH_SIZE:
        raise SystemExit(f"error: --input={arguments.input}: {BATCH_SIZE} images (.jpg, .png) are needed")
    expected, numbers = numpy_batch(example_pipeline(paths, **THREADS))
    print(f"NumPy: {expected.dtype} {expected.shape}, labels {numbers.ravel().tolist()}")

    if find_spec("torch"):
        batches = list(torch_loader(example_pipeline(paths, **THREADS)))
        assert sum(len(batch["labels"]) for batch in batches) == len(paths)
        np.testing.assert_array_equal(batches[0]["images"], expected)
        print(f"PyTorch: {len(batches)} batches, {batches[0]['images'].dtype}")
    else:
        print("PyTorch: not installed")
    if find_spec("tensorflow"):
        import keras

        dataset = tensorflow_dataset(paths)
        np.testing.assert_array_equal(next(iter(dataset))[0], expected)
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(len(paths))])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        loss = model.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0).history["loss"][0]
        print(f"TensorFlow: {dataset.element_spec[0]}, loss of two steps {loss:.3g}")
        tensor = example_pipeline(paths, **THREADS).run()[0].as_tensor()
        view = tensorflow_view(tensor)
        assert np.from_dlpack(view).ctypes.data == tensor.data_ptr()
        print("TensorFlow: a view of DALI's tensor, at the same address")
    else:
        print("TensorFlow: not installed")

    view = numpy_view(example_pipeline(paths, **THREADS))
    flipped = ndd.flip(dali_view(view[0]), horizontal=1)
    np.testing.assert_array_equal(np.from_dlpack(flipped), expected[0][:, ::-1])
    print("DLPack: from DALI to NumPy and back without a copy; DALI has flipped an image")

    os.makedirs(arguments.output_dir, exist_ok=True)
    pipeline = example_pipeline(paths, **THREADS)
    shape = write_npz(f"{arguments.output_dir}/images.npz", numpy_images(pipeline, len(paths)), len(paths))
    pipeline = example_pipeline(paths, **THREADS)
    names = [pathlib.Path(path).stem for path in paths]
    write_pictures(f"{arguments.output_dir}/pictures", numpy_images(pipeline, len(paths)), names)
    print(f"files: {arguments.output_dir}/images.npz {shape}, {arguments.output_dir}/pictures")


if __name__ == "__main__":
    main()
