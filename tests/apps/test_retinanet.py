"""Tests the RetinaNet that EfficientDet's app trains, by a run of six steps."""

import numpy as np
import pytest

from efficientdet.predict import load_trained
from tests.apps.conftest import coco_flags
from tests.common.training.small_model import rows_of
from tests.small_apps import eagerly, parsed, training_flags

RECIPE = (
    "epochs=0,iterations=5,milestones=2,4,warmup_iterations=1,lr_schedule=milestones,reference_batch=4,"
    "learning_rate=0.001,augmentation=resize_range,resize_min=40,resize_max=64,antialias=false,"
    "head_repeats=1,max_level=5"
)


@pytest.fixture(scope="module")
def run(drawn, tmp_path_factory):
    directory = tmp_path_factory.mktemp("retinanet") / "run"
    flags = training_flags("efficientdet", drawn, directory, "none", batch_size=4)
    flags += ["--model_name=retinanet-nano", f"--hparams={RECIPE}", "--eval_every=0"]
    module, a = parsed("efficientdet", *flags, *coco_flags(drawn, "eval"))
    with eagerly():
        assert 0 <= module.train(a)["AP"] <= 1
    return directory


def test_iterations_of_retinanet_set_the_number_of_epochs_and_the_learning_rates(run):
    rows = rows_of(run)
    assert [int(row["step"]) for row in rows] == [3, 6]
    # The run takes six steps instead of five. The milestones 2 and 4 become 2 and 5.
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([1e-4, 1e-5], rel=1e-4)
    assert all(np.isfinite(float(row["loss"])) for row in rows)


def test_retinanet_weights_are_loaded_with_the_settings_of_their_run(run):
    model, config, label_map, _ = load_trained(str(run))
    assert (config.architecture, config.epochs, config.antialias) == ("retinanet", 2, False)
    assert label_map.num_classes == 3
    assert (run / "detections.json").stat().st_size > 2
    assert model.get_layer("class_net.predict").kernel.shape == (3, 3, 64, 27)
