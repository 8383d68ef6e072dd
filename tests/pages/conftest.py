import pathlib
import shutil
from collections.abc import Callable

import pytest

from tests.commands import run_forked
from tests.conftest import ROOT
from tests.examples.standalone import source_with_small_network
from tests.pages.running import DARKNET_FILE, small_command, training_of_readme
from yolov4.darknet_weights import save_darknet
from yolov4.model import build_model


@pytest.fixture
def project(once, drawn, tmp_path) -> pathlib.Path:
    """A copy of the product with synthetic data in my/. The single-file examples have a small network."""
    template = once("project", lambda directory: _write_project(directory, drawn))
    return shutil.copytree(template, tmp_path / "project")


@pytest.fixture
def add_trained_run(once) -> Callable[[pathlib.Path], None]:
    """A function that adds runs/mine to a project: the run of the README's command, with a small model."""

    def train(directory: pathlib.Path, project: pathlib.Path) -> None:
        run_forked(*small_command(training_of_readme()), cwd=project, eagerly=True)
        shutil.copytree(project / "runs/mine", directory)

    def add(project: pathlib.Path) -> None:
        run = once("mine", lambda directory: train(directory, project))
        shutil.copytree(run, project / "runs/mine", dirs_exist_ok=True)

    return add


def _write_project(directory: pathlib.Path, drawn: pathlib.Path) -> None:
    for name in ("efficientdet", "yolov4", "common", "examples", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for app in ("efficientdet", "yolov4"):
        (directory / f"examples/train_{app}.py").write_text(source_with_small_network(app))
    shutil.copytree(drawn, directory / "my")
    shutil.copytree(drawn, directory / "my" / "val")
    (directory / "my" / "records").mkdir()
    _write_voc_and_yolo(drawn, directory / "my")
    save_darknet(build_model("yolov4-tiny", 80), directory / DARKNET_FILE)


def _write_voc_and_yolo(drawn: pathlib.Path, directory: pathlib.Path) -> None:
    """One image in Pascal VOC's format and in YOLO's."""
    files = {
        "voc/ImageSets/Main/train.txt": "00\n",
        "voc/Annotations/00.xml": "<annotation><filename>00.jpg</filename>"
        "<size><width>151</width><height>60</height><depth>3</depth></size>"
        "<object><name>cat</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>20</xmax><ymax>30</ymax>"
        "</bndbox></object></annotation>",
        "yolo/classes.txt": "car\ncat\n",
        "yolo/labels/train/00.txt": "1 0.5 0.5 0.25 0.5\n",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    for folder in ("voc/JPEGImages", "yolo/images/train"):
        (directory / folder).mkdir(parents=True)
        shutil.copy(drawn / "images" / "00.jpg", directory / folder)
