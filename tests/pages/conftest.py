import pathlib
import shutil

import pytest

from tests.conftest import ROOT
from tests.examples.standalone import source_with_small_network
from tests.pages.running import DARKNET_FILE
from yolov4.darknet_weights import save_darknet
from yolov4.model import build_model


@pytest.fixture(scope="module")
def project(tmp_path_factory, drawn) -> pathlib.Path:
    """A copy of the product with synthetic data in my/. The single-file examples have a small network."""
    directory = tmp_path_factory.mktemp("copy")
    for name in ("efficientdet", "yolov4", "common", "examples", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for app in ("efficientdet", "yolov4"):
        (directory / f"examples/train_{app}.py").write_text(source_with_small_network(app))
    shutil.copytree(drawn, directory / "my")
    shutil.copytree(drawn, directory / "my" / "val")
    (directory / "my" / "records").mkdir()
    _write_voc_and_yolo(drawn, directory / "my")
    save_darknet(build_model("yolov4-tiny", 80), directory / DARKNET_FILE)
    return directory


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
