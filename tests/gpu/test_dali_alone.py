"""Compares what DALI computes on a GPU with what it computes on a CPU, without TensorFlow.

No test with the mark `gpu` ever ran on a GPU. The others run the same comparison with two CPU graphs.
"""

import pathlib

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, types

from common.dali_ops import Decoder
from examples import efficientdet_pipeline, yolov4_pipeline
from tests.gpu import pictures
from tests.gpu.pictures import BATCH, SIZE, kind_of

LOADS = (0.0, 0.3, 0.45, 0.65, 1.0)
EXAMPLES = {"efficientdet": efficientdet_pipeline, "yolov4": yolov4_pipeline}
UNITS = {"efficientdet": np.array(efficientdet_pipeline.STDDEV, np.float32), "yolov4": 255.0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("pictures")
    pictures.draw(directory)
    return directory


def decode(directory: pathlib.Path, decoder: Decoder) -> list[np.ndarray]:
    """Decodes the middle 3/4 of all images."""
    files = sorted(map(str, (directory / "images").iterdir()))
    with Pipeline(BATCH, 4, None if decoder.device == "cpu" else 0, exec_dynamic=True) as pipeline:
        jpegs, _ = fn.readers.file(files=files)
        size = fn.cast(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2], dtype=types.INT32)
        pipeline.set_outputs(decoder.crop(jpegs, fn.cat(size // 8, size - size // 4)))
    batches = [pipeline.run()[0].as_cpu() for _ in range(SIZE // BATCH)]
    return [np.array(image) for batch in batches for image in batch]


def decoding_faults(directory: pathlib.Path, decoder: Decoder) -> list[str]:
    kinds = [kind_of(image_id) for image_id in range(1, SIZE + 1)]
    return pictures.pixel_faults(decode(directory, Decoder()), decode(directory, decoder), kinds)


def example_faults(directory: pathlib.Path, app: str, **options) -> list[str]:
    example = EXAMPLES[app]
    data = {"images": f"{directory}/images", "annotations": f"{directory}/instances.json"}
    cpu, gpu = (
        example.make_pipeline(example.Config(**data, batch_size=BATCH, image_size=(128, 192), **more))
        for more in ({}, options)
    )
    faults = []
    for _ in range(SIZE // BATCH):
        (images, *tensors), (others, *rest) = (
            [np.asarray(output.as_cpu().as_tensor()) for output in pipeline.run()] for pipeline in (cpu, gpu)
        )
        faults += pictures.pixel_faults(images, others, ["batch"] * BATCH, UNITS[app])
        faults += pictures.tensor_faults(dict(enumerate(tensors)), dict(enumerate(rest)))
    return faults


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
def test_mixed_decoding_of_whole_images_equals_the_cpu(directory, load):
    assert decoding_faults(directory, Decoder("gpu", load)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("app", EXAMPLES)
def test_single_file_pipeline_on_a_gpu_equals_the_cpu(directory, app):
    assert example_faults(directory, app, device_id=0) == []


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
def test_mixed_decoding_of_windows_equals_the_cpu(directory, load):
    """The last GPU test, because it may crash: github.com/NVIDIA/nvImageCodec/issues/55."""
    assert decoding_faults(directory, Decoder("gpu", load, roi=True)) == []


# --- without a GPU ---


def test_decoding_twice_on_a_cpu_has_no_faults(directory):
    assert decoding_faults(directory, Decoder()) == []


@pytest.mark.parametrize("app", EXAMPLES)
def test_single_file_pipeline_twice_on_a_cpu_has_no_faults(directory, app):
    assert example_faults(directory, app) == []
    assert example_faults(directory, app, seed=1)


def test_pictures_have_the_formats_of_their_names(directory):
    files = sorted((directory / "images").iterdir())
    opened = {kind_of(number): pictures.Image.open(path) for number, path in enumerate(files[:8], start=1)}
    assert [opened[kind].mode for kind in ("4:2:0", "grey", "CMYK", "grey PNG")] == ["RGB", "L", "CMYK", "L"]
    # Sampling factors of the first component: 2x2 is 4:2:0, 1x1 is 4:4:4.
    assert [opened[kind].layer[0][1:3] for kind in ("4:2:0", "4:4:4")] == [(2, 2), (1, 1)]
    assert opened["progressive"].info["progressive"] and opened["EXIF"].getexif()[0x0112] == 6


def test_differences_above_the_limits_are_reported():
    black = np.zeros((3, 4, 4, 3))
    kinds = ["PNG", "4:2:0", "PNG"]
    faults = pictures.pixel_faults(black, black + [[[[1.5 / 255]]], [[[1.4 / 255]]], [[[0]]]], kinds, 255.0)
    assert faults == ["PNG is 0.75 levels off, more than 0.5"]
    assert pictures.pixel_faults(black, black * np.nan, kinds)[1] == "4:2:0 is nan levels off, more than 1.5"
    assert "nan levels" in pictures.pixel_faults(black[:1], black[:1, :2], kinds[:1])[0]
    boxes = {"boxes": np.zeros((2, 4)), "none": np.zeros((0, 4))}
    assert pictures.tensor_faults(boxes, boxes) == []
    assert pictures.tensor_faults(boxes, boxes | {"boxes": np.full((2, 4), 0.25)}) == [
        "boxes differs by up to 0.25"
    ]
    assert "nan" in pictures.tensor_faults(boxes, boxes | {"boxes": np.full((2, 4), np.nan)})[0]
