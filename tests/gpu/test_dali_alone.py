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


def decode(pictures_dir: pathlib.Path, decoder: Decoder) -> list[np.ndarray]:
    """Decodes the middle 3/4 of all images."""
    files = sorted(map(str, (pictures_dir / "images").iterdir()))
    with Pipeline(BATCH, 4, None if decoder.device == "cpu" else 0, exec_dynamic=True) as pipeline:
        jpegs, _ = fn.readers.file(files=files)
        size = fn.cast(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2], dtype=types.INT32)
        pipeline.set_outputs(decoder.crop(jpegs, fn.cat(size // 8, size - size // 4)))
    batches = [pipeline.run()[0].as_cpu() for _ in range(SIZE // BATCH)]
    return [np.array(image) for batch in batches for image in batch]


def decoding_faults(pictures_dir: pathlib.Path, decoder: Decoder) -> list[str]:
    kinds = [kind_of(image_id) for image_id in range(1, SIZE + 1)]
    return pictures.pixel_faults(decode(pictures_dir, Decoder()), decode(pictures_dir, decoder), kinds)


def example_faults(pictures_dir: pathlib.Path, app: str, **options) -> list[str]:
    example = EXAMPLES[app]
    data = {"images": f"{pictures_dir}/images", "annotations": f"{pictures_dir}/instances.json"}
    cpu, gpu = (
        example.make_pipeline(example.Config(**data, batch_size=BATCH, image_size=(128, 192), **more))
        for more in ({}, options)
    )
    faults = []
    for _ in range(SIZE // BATCH):
        (cpu_images, *cpu_tensors), (gpu_images, *gpu_tensors) = (
            [np.asarray(output.as_cpu().as_tensor()) for output in pipeline.run()] for pipeline in (cpu, gpu)
        )
        faults += pictures.pixel_faults(cpu_images, gpu_images, ["batch"] * BATCH, UNITS[app])
        faults += pictures.tensor_faults(dict(enumerate(cpu_tensors)), dict(enumerate(gpu_tensors)))
    return faults


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
def test_dali_decodes_whole_images_on_a_gpu_to_the_pixels_of_a_cpu(pictures_dir, load):
    assert decoding_faults(pictures_dir, Decoder("gpu", load)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("app", EXAMPLES)
def test_single_file_pipeline_on_a_gpu_equals_the_cpu(pictures_dir, app):
    assert example_faults(pictures_dir, app, device_id=0) == []


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
def test_dali_decodes_crops_of_images_on_a_gpu_to_the_pixels_of_a_cpu(pictures_dir, load):
    """The last GPU test, because it may crash: github.com/NVIDIA/nvImageCodec/issues/55."""
    assert decoding_faults(pictures_dir, Decoder("gpu", load, roi=True)) == []


# --- without a GPU ---


def test_comparison_of_two_equal_decoders_on_a_cpu_finds_no_difference(pictures_dir):
    assert decoding_faults(pictures_dir, Decoder()) == []


@pytest.mark.parametrize("app", EXAMPLES)
def test_comparison_of_two_pipelines_on_a_cpu_finds_differences_only_for_different_seeds(pictures_dir, app):
    assert example_faults(pictures_dir, app) == []
    assert example_faults(pictures_dir, app, seed=1)


def test_comparison_of_pixels_and_of_tensors_reports_differences_above_the_limits():
    black = np.zeros((3, 4, 4, 3))
    kinds = ["PNG", "4:2:0", "PNG"]
    faults = pictures.pixel_faults(black, black + [[[[1.5 / 255]]], [[[1.4 / 255]]], [[[0]]]], kinds, 255.0)
    assert faults == ["PNG is 0.75 levels off, more than 0.5"]
    assert pictures.pixel_faults(black, black * np.nan, kinds)[1] == "4:2:0 is nan levels off, more than 1.5"
    assert "nan levels" in pictures.pixel_faults(black[:1], black[:1, :2], kinds[:1])[0]
    boxes = {"boxes": np.zeros((2, 4)), "none": np.zeros((0, 4))}
    assert pictures.tensor_faults(boxes, boxes) == []
    for value in (0.25, np.nan):
        other_boxes = {**boxes, "boxes": np.full((2, 4), value)}
        assert pictures.tensor_faults(boxes, other_boxes) == [f"boxes differs by up to {value}"]
