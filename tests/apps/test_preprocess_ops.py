"""What the apps' evaluation does to an image is what tools/preprocess.py does when asked for it."""

import dataclasses

import numpy as np
import pytest

from common.datasets import ImageListSource
from efficientdet import config as efficientdet_config
from efficientdet import pipeline as efficientdet_pipeline
from tests.tools.preprocessing import pictures_on_disk
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.preprocessor import Preprocessor
from yolov4 import config as yolov4_config
from yolov4 import pipeline as yolov4_pipeline


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pictures")
    pictures_on_disk.write(directory)
    return directory


APPS = {
    "efficientdet": (
        efficientdet_config,
        "efficientdet-nano",
        efficientdet_pipeline,
        efficientdet_pipeline.EfficientDetPipeline,
        "antialias",
    ),
    "yolov4": (yolov4_config, "yolov4-tiny", yolov4_pipeline, yolov4_pipeline.YOLOv4Pipeline, "letterbox"),
}


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize("name", APPS)
def test_evaluation_and_preprocess_give_the_same_pixels(directory, name, api, setting):
    configs, model_name, pipeline, loader_class, field = APPS[name]
    config = dataclasses.replace(configs.get_config(model_name), image_size=(64, 96), **{field: setting})
    loader = loader_class(
        source=ImageListSource(tuple(str(path) for path in sorted(directory.iterdir()))),
        config=config,
        batch_size=len(pictures_on_disk.SIZES),
        training=False,
        with_targets=False,
    )
    expected = loader.pipeline.run()[0].as_array()
    source = open_image_source("files", str(directory))
    asked = Preprocessor(source=source, ops=pipeline.preprocess_ops(config), batch_size=3)
    found = np.stack([sample.image for sample in asked.samples(api)])
    assert found.dtype == expected.dtype
    border = 1e-7 if name == "yolov4" else 0  # 127 divided before or after
    np.testing.assert_allclose(found, expected, rtol=border, atol=border)
