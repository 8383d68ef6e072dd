"""Tests outputs.py."""

import runpy
import sys

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import PIL.Image
import pytest
from nvidia.dali import Pipeline, fn

from examples.preprocessing import outputs
from tests.commands import run
from tests.conftest import ROOT

TORCH = ROOT / ".venv/torch/bin/python"
EXAMPLE = ROOT / "examples/preprocessing/outputs.py"
PATHS = [str(path) for path in sorted((ROOT / "examples/shapes").glob("*.jpg"))]


def pipeline():
    return outputs.example_pipeline(PATHS, **outputs.THREADS)


def test_outputs_example_hands_dali_images_to_numpy_pytorch_tensorflow_and_files(
    tmp_path, monkeypatch, capsys
):
    arguments = ["outputs.py", f"--input={ROOT}/examples/shapes", f"--output_dir={tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", arguments)
    outputs.main()
    lines = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["NumPy", "PyTorch", "TensorFlow", "TensorFlow", "DLPack", "files"]
    images = np.load(tmp_path / "out/images.npz")["images"]
    assert images.shape == (6, 64, 48, 3)
    np.testing.assert_array_equal(images[:4], outputs.numpy_batch(pipeline())[0])
    for image, path in zip(images, sorted((tmp_path / "out/pictures").iterdir()), strict=True):
        np.testing.assert_array_equal(PIL.Image.open(path), image)


def test_outputs_example_reports_a_directory_with_too_few_images_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["outputs.py", f"--input={tmp_path}"])
    with pytest.raises(SystemExit, match=r"^error: --input=.*: 4 images \(.jpg, .png\) are needed$"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.slow
def test_pytorch_loader_of_the_outputs_example_gives_each_image_once(tmp_path):
    if not TORCH.exists():
        pytest.skip("no PyTorch: make torch")
    output = run(TORCH, EXAMPLE, f"--input={ROOT}/examples/shapes", f"--output_dir={tmp_path}").stdout
    assert "PyTorch: 2 batches, torch.uint8" in output


def test_numpy_images_of_several_sizes_are_in_the_order_of_the_files():
    graph = Pipeline(4, 1, None)
    with graph:
        encoded, _ = fn.readers.file(files=PATHS)
        graph.set_outputs(fn.decoders.image(encoded))
    for image, path in zip(outputs.numpy_images(graph, 6), PATHS, strict=True):
        assert image.shape[:2] == PIL.Image.open(path).size[::-1]


def test_numpy_view_of_a_dali_batch_stays_valid_after_later_runs_of_the_pipeline():
    graph = pipeline()
    views = [outputs.numpy_view(graph) for _ in range(6)]
    expected, _ = outputs.numpy_batch(pipeline())
    np.testing.assert_array_equal(views[0], expected)
    assert not views[0].flags.writeable


def test_dlpack_views_share_memory_with_their_arrays():
    import tensorflow as tf

    pixels = np.arange(64 * 48 * 3, dtype=np.uint8).reshape(64, 48, 3)
    for array in (pixels, tf.constant(pixels)):
        view = outputs.dali_view(array)
        assert np.from_dlpack(view).ctypes.data == np.from_dlpack(array).ctypes.data
    assert np.from_dlpack(ndd.tensor(pixels)).ctypes.data != pixels.ctypes.data
    tensor = pipeline().run()[0].as_tensor()
    assert np.from_dlpack(outputs.tensorflow_view(tensor)).ctypes.data == tensor.data_ptr()


def test_writing_images_of_two_sizes_to_an_npz_file_is_refused_and_leaves_no_file(tmp_path):
    images = [np.zeros((4, 5, 3), np.uint8), np.zeros((5, 4, 3), np.uint8)]
    with pytest.raises(ValueError, match=r"image 1 has shape \(5, 4, 3\), image 0 \(4, 5, 3\)"):
        outputs.write_npz(f"{tmp_path}/x.npz", images, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_npz_file_of_the_outputs_example_is_read_by_numpy_with_equal_images(tmp_path, dtype):
    images = np.random.default_rng(0).uniform(0, 255, (5, 4, 6, 3)).astype(dtype)
    assert outputs.write_npz(f"{tmp_path}/x.npz", iter(images), 5) == images.shape
    loaded = np.load(tmp_path / "x.npz")["images"]
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(loaded, images)


def test_png_files_of_the_outputs_example_have_the_image_pixels_and_numbers_in_repeated_names(tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (7, 9, channels), np.uint8) for channels in (3, 1, 3, 3)]
    outputs.write_pictures(tmp_path, images, ["a/x", "a/x", "a/x-2", "v.0001"])
    for image, name in zip(images, ["a/x", "a/x-2", "a/x-2-2", "v.0001"], strict=True):
        picture = np.asarray(PIL.Image.open(tmp_path / f"{name}.png"))
        np.testing.assert_array_equal(picture, image[..., 0] if image.shape[2] == 1 else image)
