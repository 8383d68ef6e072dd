"""What only a whole run shows: every part of the recipe is in the weights that it saves.

tests/apps/test_train.py has all that both apps promise.
"""

import numpy as np
import tensorflow as tf

from common import hparams
from common.labels import LabelMap
from common.training import weights
from yolov4.config import get_config
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata
from yolov4.train import Args, train


def test_l2_momentum_averages_and_the_last_step_are_in_the_saved_weights(tmp_path):
    """Two epochs of one update each, on nothing but L2, tell all four by the kernels of last.weights.h5."""
    decay = 0.1  # learning rate times weight decay
    config = hparams.override(get_config("yolov4-tiny"), "width=0.125")
    model = build_model("yolov4-tiny", 2, config=config)
    metadata = make_metadata(config, LabelMap.numbered(2), 2)
    weights.save(model, tmp_path / "start.weights.h5", metadata)
    a = Args(
        model_name="yolov4-tiny",
        image_size="32x64",
        num_classes=2,
        pipeline_type="synthetic",
        hparams=f"width=0.125,iou_normalizer=0,obj_normalizer=0,cls_normalizer=0,weight_decay={decay},"
        "burn_in_steps=0,lr_step_factor=1,reference_batch=2",
        learning_rate=1.0,
        batch_size=2,
        epochs=2,
        steps_per_epoch=1,
        ema_decay=0.9,
        init_from=str(tmp_path / "start.weights.h5"),
        output_dir=str(tmp_path / "run"),
    )
    tf.config.run_functions_eagerly(True)
    try:
        train(a)
    finally:
        tf.config.run_functions_eagerly(False)
    start = [np.asarray(w) for w in model.weights if w.name == "kernel"]
    saved = weights.load(model, tmp_path / "run" / weights.LAST)
    shrunk = [np.asarray(w) for w in model.weights if w.name == "kernel"]

    first = 1 - decay
    second = first - config.momentum * decay - decay * first
    average = 0.1 + 0.9 * first  # the share of the old average is 1 / 10, then 2 / 11 (ema.py)
    average = 2 / 11 * average + 9 / 11 * second
    for before, after in zip(start, shrunk, strict=True):
        np.testing.assert_allclose(after, average * before, rtol=2e-4, atol=1e-6)
    assert saved["epoch"] == 2
