import numpy as np

from common import hparams
from common.data.labels import LabelMap
from common.weights import weight_files as weights
from tests.small_apps import eagerly, parsed
from yolov4.config import get_config
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata


def test_saved_weights_after_two_steps_equal_l2_decay_momentum_and_averaging_by_hand(tmp_path):
    """The gradients of two updates come only from L2."""
    decay = 0.1
    config = hparams.override(get_config("yolov4-tiny"), "width=0.125")
    model = build_model("yolov4-tiny", 2, config=config)
    metadata = make_metadata(config, LabelMap.numbered(2), 2)
    weights.save(model, tmp_path / "start.weights.h5", metadata)
    small = ["--model_name=yolov4-tiny", "--image_size=32x64", "--num_classes=2", "--pipeline_type=synthetic"]
    steps = ["--batch_size=2", "--epochs=2", "--steps_per_epoch=1", "--learning_rate=1", "--ema_decay=0.9"]
    only_l2 = f"iou_normalizer=0,obj_normalizer=0,cls_normalizer=0,weight_decay={decay}"
    plain = "burn_in_steps=0,lr_step_factor=1,reference_batch=2"
    places = [f"--init_from={tmp_path}/start.weights.h5", f"--output_dir={tmp_path}/run"]
    module, a = parsed("yolov4", *small, *steps, *places, f"--hparams=width=0.125,{only_l2},{plain}")
    with eagerly():
        module.train(a)
    start = [np.asarray(w) for w in model.weights if w.name == "kernel"]
    saved = weights.load(model, tmp_path / "run" / weights.LAST)
    shrunk = [np.asarray(w) for w in model.weights if w.name == "kernel"]

    first = 1 - decay
    second = first - config.momentum * decay - decay * first
    average = 0.1 + 0.9 * first  # ema.py keeps 1 / 10, then 2 / 11 of the old average
    average = 2 / 11 * average + 9 / 11 * second
    for before, after in zip(start, shrunk, strict=True):
        np.testing.assert_allclose(after, average * before, rtol=2e-4, atol=1e-6)
    assert saved["epoch"] == 2
