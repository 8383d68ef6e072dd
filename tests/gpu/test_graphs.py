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
GRAPHS = {  # app, whether it is the training graph, --hparams, --roi_decoding
    "efficientdet evaluation": ("efficientdet", False, "", False),
    "efficientdet training": ("efficientdet", True, "", False),
    "yolov4 evaluation": ("yolov4", False, "", False),
    "yolov4 training": ("yolov4", True, "", False),
    "yolov4 fresh mosaics": ("yolov4", True, "mosaic_tiles=fresh", False),
    # These may crash: github.com/NVIDIA/nvImageCodec/issues/55
    "efficientdet crops": ("efficientdet", False, "", True),
    "yolov4 crops": ("yolov4", False, "", True),
}


@pytest.fixture(scope="module")
def source(pictures_dir):
    return open_coco(pictures_dir / "images", pictures_dir / "instances.json")


def faults_of(source, graph: str, device_id: int | None, more_hparams: str = "") -> list[str]:
    app, training, changes, roi = GRAPHS[graph]
    changes = ",".join(filter(None, (changes, more_hparams)))
    make, config, unit = APPS[app]
    options = {"source": source, "training": training, "batch_size": BATCH, "num_threads": 4}
    options |= {"config": hparams.override(config, changes), "name_images": True}
    cpu, gpu = make(**options), make(**options, device_id=device_id, roi_decoding=roi)
    faults = []
    for _ in range(SIZE // BATCH):
        cpu_batch, gpu_batch = (batch_of(loader) for loader in (cpu, gpu))
        kinds = ["batch" if training else kind_of(i) for i in cpu_batch["image_ids"].ravel()]
        faults += pictures.pixel_faults(cpu_batch.pop("images"), gpu_batch.pop("images"), kinds, unit)
        faults += pictures.tensor_faults(cpu_batch, gpu_batch)
    return faults


def batch_of(loader) -> dict[str, np.ndarray]:
    outputs = [np.asarray(output.as_cpu().as_tensor()) for output in loader.pipeline.run()]
    return dict(zip(loader.element_spec, outputs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("graph", GRAPHS)
def test_dali_graph_on_a_gpu_gives_the_batches_of_the_graph_on_a_cpu(source, graph):
    assert faults_of(source, graph, device_id=0) == []


@pytest.mark.parametrize("graph", ["efficientdet evaluation", "yolov4 fresh mosaics"])
def test_comparison_of_two_equal_dali_graphs_on_a_cpu_finds_no_difference(source, graph):
    assert faults_of(source, graph, device_id=None, more_hparams="image_size=128x128") == []
