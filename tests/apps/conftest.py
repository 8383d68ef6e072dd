"""Fixtures that run the commands of both apps inside the test process."""

import contextlib
import dataclasses
import pathlib
import types
from unittest import mock

import keras
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
from common.evaluation import curves
from tests.small_apps import TINY, eagerly, flag_values


@dataclasses.dataclass(frozen=True)
class App:
    """One of the two apps, with small settings for tests.

    Attributes:
        package: the app's package, such as the module `yolov4`.
        tiny: hparams of a small network.
    """

    name: str
    package: types.ModuleType
    model_name: str
    tiny: str

    def load_trained(self, weights: pathlib.Path):
        return self.package.predict.load_trained(str(weights))

    def make_loader(self, *arguments, **options) -> BaseLoader:
        return self.package.loaders.make_loader(*arguments, **options)


APPS = {
    package.__name__: App(package.__name__, package, f"{package.__name__}-nano", TINY[package.__name__])
    for package in (efficientdet, yolov4)
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
    """Gives command("train", "--batch_size=2", ...), which runs a command of the app in this process."""

    def run(name: str, *arguments: str):
        module, values = flag_values(f"{app.name}.{name}", *arguments)
        function, args_class = {
            "train": ("train", "Args"),
            "eval": ("evaluate_weights", "EvalArgs"),
            "infer": ("infer", "InferArgs"),
            "export": ("export", "ExportArgs"),
        }[name]
        try:
            return getattr(module, function)(getattr(module, args_class)(**values))
        finally:
            keras.mixed_precision.set_global_policy("float32")

    return run


@pytest.fixture(scope="session")
def tiny_train(app, command):
    """Gives run(data, output_dir, "--epochs=1", ...), which trains the tiny network.

    `data` is a COCO directory or a prefix of TFRecords. Training is eager unless `compiled` is set. The
    pictures of curves, which take Matplotlib half a second each, are drawn only if `with_curves` is set.
    """

    def run(
        data: pathlib.Path | str,
        output_dir: pathlib.Path,
        *more: str,
        compiled: bool = False,
        with_curves: bool = False,
    ):
        defaults = {"model_name": app.model_name, "image_size": "64x96", "batch_size": "4", "epochs": "2"}
        defaults |= {"pipeline_type": "dali_cpu", "hparams": app.tiny}
        names = {flag.removeprefix("--").partition("=")[0] for flag in more}
        arguments = [f"--{name}={value}" for name, value in defaults.items() if name not in names]
        if pathlib.Path(data).is_dir():
            arguments += coco_flags(data, "train", "eval")
        elif "--pipeline_type=synthetic" not in more:
            arguments += [f"--{split}_file_pattern={data}*.tfrecord" for split in ("train", "eval")]
        with contextlib.ExitStack() as stack:
            if not compiled:
                stack.enter_context(eagerly())
            if not with_curves:
                nothing = dict.fromkeys(("loss_curves", "pr_curves"), lambda *_: None)
                stack.enter_context(mock.patch.multiple(curves, **nothing))
            return command("train", *arguments, f"--output_dir={output_dir}", *more)

    return run


@pytest.fixture(scope="session")
def trained(app, tiny_train, drawn, once) -> pathlib.Path:
    """The directory of a run of two epochs."""
    return once(f"trained-{app.name}", lambda directory: tiny_train(drawn, directory, with_curves=True))
