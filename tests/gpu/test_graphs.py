"""Compares DALI graphs of both apps on a GPU and on a CPU. No test with the mark `gpu` ever ran on a GPU."""

import numpy as np
import pytest

from common import hparams
from common.dali_ops import IMAGENET_STD
from common.data.open import open_coco
from efficientdet.config import get_config as efficientdet_config
from efficientdet.pipeline import EfficientDetPipeline
from tests.gpu import pictures
from tests.gpu.pictures import BATCH, SIZE, kind_of
from yolov4.config import get_config as yolov4_config
from yolov4.pipeline import YOLOv4Pipeline

# app -> loader, config, levels per unit of the images
APPS = {
    "efficientdet": (EfficientDetPipeline, efficientdet_config("efficientdet-d0"), np.float32(IMAGENET_STD)),
    "yolov4": (YOLOv4Pipeline, yolov4_config("yolov4"), 255.0),
}
GRAPHS = [  # app, whether it is the training graph, --hparams, --roi_decoding
    *((app, training, "", False) for app in APPS for training in (False, True)),
    ("yolov4", True, "mosaic_tiles=fresh", False),
    *((app, False, "", True) for app in APPS),  # may crash: github.com/NVIDIA/nvImageCodec/issues/55
]
FRESH = GRAPHS[4]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pictures")
    pictures.draw(directory)
    return open_coco(directory / "images", directory / "instances.json")


def faults_of(source, graph: tuple, device_id: int | None) -> list[str]:
    app, training, changes, roi = graph
    make, config, unit = APPS[app]
    options = {"source": source, "training": training, "batch_size": BATCH, "num_threads": 4}
    options |= {"config": hparams.override(config, changes), "name_images": True}
    cpu, gpu = make(**options), make(**options, device_id=device_id, roi_decoding=roi)
    faults = []
    for _ in range(SIZE // BATCH):
        one, other = (batch_of(loader) for loader in (cpu, gpu))
        kinds = ["batch" if training else kind_of(i) for i in one["image_ids"].ravel()]
        faults += pictures.pixel_faults(one.pop("images"), other.pop("images"), kinds, unit)
        faults += pictures.tensor_faults(one, other)
    return faults


def batch_of(loader) -> dict[str, np.ndarray]:
    outputs = [np.asarray(output.as_cpu().as_tensor()) for output in loader.pipeline.run()]
    return dict(zip(loader.element_spec, outputs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_graph_on_a_gpu_equals_the_cpu(source, graph):
    assert faults_of(source, graph, device_id=0) == []


@pytest.mark.parametrize("graph", [GRAPHS[0], FRESH], ids=str)
def test_graph_twice_on_a_cpu_has_no_faults(source, graph):
    small = (*graph[:2], f"image_size=128x128,{graph[2]}".rstrip(","), graph[3])
    assert faults_of(source, small, device_id=None) == []
