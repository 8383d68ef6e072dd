"""Keras' own `fit` on the DALI pipeline: plain, and under MirroredStrategy with two logical CPU devices."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np

from common.datacheck.datasets import open_coco
from efficientdet.config import get_config
from efficientdet.fit_model import FitModel
from efficientdet.model import build_model
from efficientdet.pipeline import EfficientDetPipeline

ROOT = pathlib.Path(__file__).resolve().parents[2]


def tiny_config():
    return dataclasses.replace(
        get_config("efficientdet-nano"), image_size=(64, 96), fpn_cells=1, head_repeats=1, max_level=5
    )


def test_plain_fit_learns(drawn):
    config = dataclasses.replace(tiny_config(), augmentation="none")
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    pipeline = EfficientDetPipeline(source=source, config=config, batch_size=4, training=True)
    keras.utils.set_random_seed(0)
    model = FitModel(build_model(config.model_name, num_classes=3, config=config), config)
    model.compile(keras.optimizers.Adam(5e-3))
    history = model.fit(pipeline.dataset(), steps_per_epoch=15, epochs=4, verbose=0)
    losses = history.history["loss"]
    assert np.all(np.isfinite(losses))
    assert losses[-1] < 0.8 * losses[0]


def test_fit_under_mirrored_strategy(drawn):
    """In a process of its own: logical devices must be made before TensorFlow starts."""
    program = pathlib.Path(__file__).with_name("mirrored_fit.py")
    done = subprocess.run(
        [sys.executable, str(program), str(drawn)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "replicas agree with one device" in done.stdout
