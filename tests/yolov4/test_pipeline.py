import dataclasses

import numpy as np
import pytest

from tests.yolov4.rectangles import ALL, PLAIN, batches, make, read

MIXED = {"mosaic_prob": 0.5, "mixup_prob": 0.5, "cutmix_prob": 0.5, "multi_scale": 1.4}


def test_stages_that_are_off_are_not_in_the_graph(rectangles):
    operators = dict.fromkeys(("hue", "saturation", "exposure"), b"Hsv") | {"flip_prob": b"Flip"}
    operators |= {"mosaic_prob": b"MultiPaste", "mixup_prob": b"Permutation", "cutmix_prob": b"MultiPaste"}
    settings = ALL | MIXED

    def graph(names, training=True):
        config = dataclasses.replace(PLAIN, **{name: settings[name] for name in names})
        return make(rectangles, config=config, training=training).pipeline.serialize()

    plain, evaluation = graph([]), graph(settings, training=False)
    for name, operator in operators.items():
        assert operator not in plain and operator not in evaluation
        assert operator in graph([name]), name


def test_batch_of_one(rectangles):
    config = dataclasses.replace(PLAIN, mosaic_prob=0.5, mixup_prob=1.0, cutmix_prob=1.0, min_box_size=2.0)
    counts = [int(batch["num_boxes"][0]) for batch in read(rectangles, config=config, count=40, batch_size=1)]
    assert min(counts) <= 1 and max(counts) > 1
    config = dataclasses.replace(config, mosaic_prob=0.0)
    for batch in read(rectangles, config=config, count=12, batch_size=1):
        assert batch["num_boxes"] == 1


@pytest.mark.parametrize("training", [True, False])
def test_the_dataset_gives_what_the_pipeline_of_the_loader_gives(rectangles, training):
    config = dataclasses.replace(PLAIN, jitter=0.3, mosaic_prob=0.5)
    loader = make(rectangles, config=config, training=training, count_lost=True, seed=5)
    (batch,) = batches(loader, 1)
    for name, output in zip(loader.element_spec, loader.pipeline.run(), strict=True):
        np.testing.assert_array_equal(np.asarray(output.as_tensor()).reshape(batch[name].shape), batch[name])


@pytest.mark.gpu
@pytest.mark.parametrize("training, tiles", [(False, "batch"), (True, "batch"), (True, "fresh")])
def test_gpu_graph_gives_what_the_cpu_graph_gives(rectangles, training, tiles):
    config = dataclasses.replace(PLAIN, letterbox=True, **ALL, **MIXED, mosaic_tiles=tiles)
    cpu = make(rectangles, config=config, training=training)
    gpu = make(rectangles, "dali_gpu", config, training=training)
    for _ in range(3):
        for name, one, other in zip(cpu.element_spec, cpu.pipeline.run(), gpu.pipeline.run(), strict=True):
            one, other = np.asarray(one.as_tensor()), np.asarray(other.as_cpu().as_tensor())
            if name == "images":
                assert np.abs(one - other).max() < 4.5 / 255
            else:
                np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
