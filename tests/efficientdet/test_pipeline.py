"""Tests the batches of pipeline.py. test_oracle.py compares their numbers with NumPy."""

import dataclasses

import numpy as np
import pytest

from efficientdet.config import get_config
from efficientdet.pipeline import EfficientDetPipeline

INPUT = (192, 256)
NANO = dataclasses.replace(
    get_config("efficientdet-nano"),
    image_size=INPUT,
    augmentation="none",
    flip_prob=0.0,
    assignment="max_iou",
    max_level=7,
    num_scales=3,
    aspect_ratios=(1.0, 2.0, 0.5),
)


def make(source, config=NANO, *, batch_size=8, training=True, **options) -> EfficientDetPipeline:
    options |= {"source": source, "batch_size": batch_size, "training": training}
    return EfficientDetPipeline(config=config, num_threads=1, **options)


def first_batch(loader: EfficientDetPipeline) -> dict[str, np.ndarray]:
    outputs = [np.asarray(output.as_tensor()) for output in loader.pipeline.run()]
    return dict(zip(loader.element_spec, outputs, strict=True))


def test_each_pixel_augmentation_alone_changes_pixels_and_no_boxes(rectangles):
    plain = first_batch(make(rectangles, batch_size=24))
    is_content = plain["images"].any(-1)
    for field, value, low, high in [
        ("grid_mask_prob", 1.0, 0.06, 0.26),
        ("brightness", 0.5, 0.8, 1),
        ("contrast", 0.5, 0.8, 1),
        ("saturation", 0.9, 0.8, 1),
        ("hue", 60.0, 0.8, 1),
    ]:
        config = dataclasses.replace(NANO, **{field: value})
        augmented = first_batch(make(rectangles, config, batch_size=24))
        np.testing.assert_array_equal(plain["boxes"], augmented["boxes"])
        differs = np.abs(plain["images"] - augmented["images"]).max(-1) > 0.01
        assert low < differs[is_content].mean() <= high, field
        assert not differs[~is_content].any()


def test_efficientdet_dataset_gives_each_output_of_its_dali_graph_under_its_name(rectangles):
    loader = make(rectangles, training=False, count_lost=True)
    images, targets = next(iter(loader.dataset()))
    batch = first_batch(loader)
    np.testing.assert_array_equal(images, batch.pop("images"))
    assert targets.keys() == batch.keys()
    for name, tensor in targets.items():
        np.testing.assert_array_equal(tensor, batch[name].reshape(tensor.shape), err_msg=name)
    assert targets["num_positives"].numpy().min() > 0
    assert targets["class_targets_4"].shape == (8, 12, 16, 9)
    assert targets["box_targets_4"].shape == (8, 12, 16, 36)


def test_task_aligned_batches_have_no_anchor_targets(rectangles):
    loader = make(rectangles, dataclasses.replace(NANO, assignment="task_aligned"))
    _, targets = next(iter(loader.dataset()))
    assert [*targets] == [*loader.target_spec] == ["num_positives", "boxes", "classes"]
    _, max_iou_targets = next(iter(make(rectangles).dataset()))
    for name, values in targets.items():  # the loss is divided by the positives of max_iou
        np.testing.assert_array_equal(values, max_iou_targets[name])


@pytest.mark.gpu
def test_efficientdet_dali_graph_on_a_gpu_gives_the_outputs_of_the_graph_on_a_cpu(rectangles):
    cpu = make(rectangles, training=False)
    gpu = make(rectangles, training=False, device_id=0)
    for _ in range(3):
        outputs = zip(cpu.element_spec, cpu.pipeline.run(), gpu.pipeline.run(), strict=True)
        for name, cpu_output, gpu_output in outputs:
            expected, actual = np.asarray(cpu_output.as_tensor()), np.asarray(gpu_output.as_cpu().as_tensor())
            # Every second image is a PNG. CPU and GPU decode only PNGs equally.
            if name == "images":
                assert np.abs(actual - expected)[1::2].max() < 2.5 / 57
            else:
                np.testing.assert_allclose(actual, expected, atol=1e-5, err_msg=name)
