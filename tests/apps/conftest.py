"""Fixtures that run the commands of both apps inside the test process."""

import contextlib
import dataclasses
import pathlib
import types
from collections.abc import Callable

import keras
import numpy as np
import pytest

import efficientdet.eval
import efficientdet.export
import efficientdet.infer
import efficientdet.loaders
import efficientdet.predict
import efficientdet.train
import yolov4.eval
import yolov4.export
import yolov4.infer
import yolov4.loaders
import yolov4.predict
import yolov4.train
from common.data.loader import BaseLoader
from common.data.open import open_coco
from tests.small_apps import eagerly, flag_values


@dataclasses.dataclass(frozen=True)
class App:
    """One of the two apps, with small settings for tests."""

    name: str
    package: types.ModuleType
    model_name: str
    tiny: str
    by_heart: str
    steps_by_heart: int
    ways: tuple[str, str]
    own_hparam: tuple[str, str]  # a field that must not change after training, and another value for it
    other_nms: str

    def class_rows(self, weights: dict[str, np.ndarray], num_classes: int) -> list[np.ndarray]:
        """Returns the weights of the class scores in the last layers, as arrays (..., anchor, class)."""
        if self.name == "efficientdet":
            names = ("class_net.predict/kernel", "class_net.predict/bias")
            return [weights[name].reshape(-1, 1, num_classes) for name in names]
        last = {name.rpartition("/")[0] for name in weights if name.endswith("conv/bias")}
        heads = [weights[f"{layer}/{part}"] for layer in sorted(last) for part in ("kernel", "bias")]
        return [head.reshape(-1, 3, 5 + num_classes)[..., 5:] for head in heads]

    def box_bias(self, weights: dict[str, np.ndarray], num_classes: int) -> np.ndarray:
        """Returns the biases of the boxes. YOLOv4's also have the objectness."""
        if self.name == "efficientdet":
            return weights["box_net.predict/bias"]
        name = sorted(name for name in weights if name.endswith("conv/bias"))[0]
        return weights[name].reshape(3, 5 + num_classes)[:, :5]

    def entry(self, name: str) -> tuple[types.ModuleType, Callable]:
        module = getattr(self.package, name)
        function, args_class = {
            "train": ("train", "Args"),
            "eval": ("evaluate_weights", "EvalArgs"),
            "infer": ("infer", "InferArgs"),
            "export": ("export", "ExportArgs"),
        }[name]
        return module, lambda **values: getattr(module, function)(getattr(module, args_class)(**values))

    def load_trained(self, weights: pathlib.Path):
        return self.package.predict.load_trained(str(weights))

    def make_detect(self, model, config):
        return self.package.predict.make_detect(model, config)

    def make_loader(self, *arguments, **options) -> BaseLoader:
        return self.package.loaders.make_loader(*arguments, **options)


APPS = {
    "efficientdet": App(
        name="efficientdet",
        package=efficientdet,
        model_name="efficientdet-nano",
        tiny="fpn_cells=1,head_repeats=1,max_level=5",
        by_heart="augmentation=none,flip_prob=0,warmup_epochs=0.1",
        steps_by_heart=90,
        ways=(
            "--precision=mixed_float16 --ema_decay=0 --hparams={tiny},augmentation=min_iou_crop,hue=20",
            "--precision=mixed_bfloat16 --clip_norm=0 --accumulate_steps=2 "
            "--hparams={tiny},optimizer=sgd,augmentation=resize_range,grid_mask_prob=1",
        ),
        own_hparam=("anchor_scale", "6"),
        other_nms="hard",
    ),
    "yolov4": App(
        name="yolov4",
        package=yolov4,
        model_name="yolov4-nano",
        tiny="width=0.25,optimizer=sgd",
        by_heart="jitter=0,flip_prob=0,hue=0,saturation=1,exposure=1,mosaic_prob=0,learning_rate=0.006",
        steps_by_heart=160,
        ways=(
            "--precision=mixed_float16 --ema_decay=0 --letterbox "
            "--hparams=width=0.25,mosaic_prob=1,nms_method=diou",
            "--precision=mixed_bfloat16 --clip_norm=0 --accumulate_steps=2 "
            "--hparams={tiny},multi_scale=1.5,mixup_prob=0.5,cutmix_prob=0.5,max_delta=5",
        ),
        own_hparam=("width", "1"),
        other_nms="diou",
    ),
}


# For features of common/, one app is enough.
one_app = pytest.mark.parametrize("app", list(APPS)[-1:], indirect=True, scope="session")


def slow_for(*names: str) -> pytest.MarkDecorator:
    """Runs a test for both apps. It is slow for the apps in `names`."""
    params = [pytest.param(name, marks=pytest.mark.slow if name in names else ()) for name in APPS]
    return pytest.mark.parametrize("app", params, indirect=True, scope="session")


def coco_flags(data: pathlib.Path, *splits: str) -> list[str]:
    """The splits are "train" and "eval"."""
    files = {"images": "images", "annotations": "instances.json"}
    return [f"--{split}_{kind}={data}/{file}" for split in splits for kind, file in files.items()]


@pytest.fixture(scope="session", params=APPS)
def app(request: pytest.FixtureRequest) -> App:
    return APPS[request.param]


@pytest.fixture(scope="session")
def source(drawn):
    return open_coco(str(drawn / "images"), str(drawn / "instances.json"))


@pytest.fixture(scope="session")
def command(app):
    """Gives command("train", "--batch_size=2", ...)."""

    def run(entry: str, *arguments: str):
        _, function = app.entry(entry)
        _, values = flag_values(f"{app.name}.{entry}", *arguments)
        try:
            return function(**values)
        finally:
            keras.mixed_precision.set_global_policy("float32")

    return run


@pytest.fixture(scope="session")
def tiny_train(app, command):
    """Gives a function that trains the tiny network on a COCO directory or a prefix of TFRecords."""

    def run(data: pathlib.Path, output_dir: pathlib.Path, *more: str, compiled: bool = False):
        defaults = {"model_name": app.model_name, "image_size": "64x96", "batch_size": "4", "epochs": "2"}
        defaults |= {"pipeline_type": "dali_cpu", "hparams": app.tiny}
        named = {flag.removeprefix("--").partition("=")[0] for flag in more}
        given = [f"--{name}={value}" for name, value in defaults.items() if name not in named]
        if data.is_dir():
            given += coco_flags(data, "train", "eval")
        elif "--pipeline_type=synthetic" not in more:
            given += [f"--{split}_file_pattern={data}*.tfrecord" for split in ("train", "eval")]
        with contextlib.nullcontext() if compiled else eagerly():
            return command("train", *given, f"--output_dir={output_dir}", *more)

    return run


@pytest.fixture(scope="session")
def trained(app, tiny_train, drawn, once) -> pathlib.Path:
    return once(f"trained-{app.name}", lambda directory: tiny_train(drawn, directory))
