"""The recipes of both apps: the learning rate that a run on COCO would have, at five points of it."""

import pathlib

import pytest
from absl import flags

import efficientdet.config
import efficientdet.optimization
import efficientdet.train
import yolov4.config
import yolov4.optimization
import yolov4.train
from common import hparams

ROOT = pathlib.Path(__file__).resolve().parents[1]
APPS = {"efficientdet": efficientdet, "yolov4": yolov4}
COCO_IMAGES = 118_287  # train2017, with the 1,021 that have no boxes

# Recipe -> (images an update, updates an epoch, [(epoch, rate), ...]). EfficientDet: linear warm-up from
# 0.008 at 64 images; then half a cosine, so half the peak in the middle of the rest.
EXPECTED = {
    "efficientdet/d0_coco": (64, 1848, [(0, 0.008), (0.5, 0.044), (1, 0.08), (150.5, 0.04), (300, 0)]),
    "efficientdet/d0_coco_8xv100": (512, 231, [(0, 0.064), (2.5, 0.382), (5, 0.7), (152.5, 0.35), (300, 0)]),
    "efficientdet/d0_coco_8xa100": (1600, 73, [(0, 0.2), (12.5, 1.2), (25, 2.2), (162.5, 1.1), (300, 0)]),
    # Burn-in of 1000 updates to the fourth power; a tenth from 80 % and 90 % of the run on.
    "yolov4/yolov4_coco": (
        64,
        1848,
        [(500 / 1848, 0.0013 / 16), (1000 / 1848, 0.0013), (200, 0.0013), (230, 1.3e-4), (260, 1.3e-5)],
    ),
    "yolov4/yolov4_coco_8xv100": (
        64,
        1848,
        [(500 / 1848, 0.0013 / 16), (1000 / 1848, 0.0013), (200, 0.0013), (230, 1.3e-4), (260, 1.3e-5)],
    ),
    "yolov4/yolov4_coco_8xa100": (
        128,
        924,
        [(500 / 924, 0.0026 / 16), (1000 / 924, 0.0026), (200, 0.0026), (230, 2.6e-4), (260, 2.6e-5)],
    ),
    "yolov4/tiny_coco": (
        64,
        1848,
        [(500 / 1848, 0.00261 / 16), (1000 / 1848, 0.00261), (800, 0.00261), (900, 2.61e-4), (1000, 2.61e-5)],
    ),
}


@pytest.mark.parametrize("recipe", EXPECTED)
def test_learning_rate_at_five_points(recipe):
    images_an_update, updates_an_epoch, points = EXPECTED[recipe]
    app, _, name = recipe.partition("/")
    fv = flags.FlagValues()
    APPS[app].train.define_flags(fv)
    text = (ROOT / app / "flags" / f"{name}.txt").read_text()
    fv(["train", *(line for line in text.splitlines() if line.startswith("--"))])
    replicas = 8 if fv.strategy == "horovod" else 1
    accumulate = max(fv.accumulate_steps, 1)
    assert replicas * fv.batch_size * accumulate == images_an_update
    steps_per_epoch = COCO_IMAGES // (replicas * fv.batch_size)
    assert steps_per_epoch // accumulate == updates_an_epoch

    config = hparams.override(APPS[app].config.get_config(fv.model_name), fv.hparams)
    config = hparams.replace(config, {"epochs": fv.epochs, "learning_rate": fv.learning_rate})
    schedule = APPS[app].optimization.make_schedule(config, images_an_update, steps_per_epoch, accumulate)
    for epoch, rate in points:
        step = epoch * steps_per_epoch
        assert float(schedule(step)) == pytest.approx(rate, rel=0.012, abs=1e-6), epoch


def test_every_recipe_for_coco_is_here():
    found = {
        f"{app}/{path.stem}"
        for app in APPS
        for path in (ROOT / app / "flags").glob("*_coco*.txt")
        if not path.stem.startswith("retinanet")  # its schedule: tests/efficientdet/test_retinanet.py
    }
    assert found == set(EXPECTED)


@pytest.mark.parametrize("app", APPS)
def test_both_apps_have_the_same_kinds_of_recipes(app):
    names = {path.stem for path in (ROOT / app / "flags").glob("*.txt")}
    assert {"demo", "laptop", "finetune"} <= names
    for kind in ("_coco", "_coco_8xv100", "_coco_8xa100"):
        assert any(name.endswith(kind) for name in names), kind
