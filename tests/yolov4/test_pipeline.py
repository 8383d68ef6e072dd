"""Tests the DALI graph. test_oracle.py compares its outputs with NumPy."""

import dataclasses

import numpy as np
import pytest

from tests.yolov4.rectangles import AUGMENTATIONS, PLAIN, read_batches, take_batches, training_loader

MIXING = {"mosaic_prob": 0.5, "mixup_prob": 0.5, "cutmix_prob": 0.5}


def test_dali_graph_has_the_operator_of_an_augmentation_only_if_it_is_on_and_only_in_training(rectangles):
    operators = dict.fromkeys(("hue", "saturation", "exposure"), b"Hsv") | {"flip_prob": b"Flip"}
    operators |= {"mosaic_prob": b"MultiPaste", "mixup_prob": b"Permutation", "cutmix_prob": b"MultiPaste"}
    settings = AUGMENTATIONS | MIXING | {"multi_scale": 1.4}

    def graph(names, training=True):
        config = dataclasses.replace(PLAIN, **{name: settings[name] for name in names})
        return training_loader(rectangles, config=config, training=training).pipeline.serialize()

    plain, evaluation = graph([]), graph(settings, training=False)
    for name, operator in operators.items():
        assert operator not in plain and operator not in evaluation
        assert operator in graph([name]), name


def test_image_of_a_batch_of_one_is_mixed_only_with_itself(rectangles):
    config = dataclasses.replace(PLAIN, mosaic_prob=0.5, mixup_prob=1.0, cutmix_prob=1.0, min_box_size=2.0)
    batches = read_batches(rectangles, config=config, count=40, batch_size=1)
    counts = [int(batch["num_boxes"][0]) for batch in batches]
    assert min(counts) <= 1 and max(counts) > 1
    config = dataclasses.replace(config, mosaic_prob=0.0)
    for batch in read_batches(rectangles, config=config, count=12, batch_size=1):
        assert batch["num_boxes"] == 1


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_yolov4_dataset_gives_each_output_of_its_dali_graph_under_its_name(rectangles, training):
    config = dataclasses.replace(PLAIN, jitter=0.3, mosaic_prob=0.5)
    loader = training_loader(rectangles, config=config, training=training, count_lost=True, seed=5)
    (batch,) = take_batches(loader, 1)
    for name, output in zip(loader.element_spec, loader.pipeline.run(), strict=True):
        np.testing.assert_array_equal(np.asarray(output.as_tensor()).reshape(batch[name].shape), batch[name])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("training", "tiles"),
    [(False, "batch"), (True, "batch"), (True, "fresh")],
    ids=["evaluation", "training", "training with fresh mosaics"],
)
def test_yolov4_dali_graph_on_a_gpu_gives_the_outputs_of_the_graph_on_a_cpu(rectangles, training, tiles):
    changes = AUGMENTATIONS | MIXING | {"multi_scale": 1.4, "letterbox": True, "mosaic_tiles": tiles}
    config = dataclasses.replace(PLAIN, **changes)
    cpu = training_loader(rectangles, config=config, training=training)
    gpu = training_loader(rectangles, "dali_gpu", config, training=training)
    for _ in range(3):
        for name, expected, actual in zip(
            cpu.element_spec, cpu.pipeline.run(), gpu.pipeline.run(), strict=True
        ):
            expected, actual = np.asarray(expected.as_tensor()), np.asarray(actual.as_cpu().as_tensor())
            if name == "images":
                assert np.abs(expected - actual).max() < 4.5 / 255
            else:
                np.testing.assert_allclose(expected, actual, atol=1e-5, err_msg=name)
