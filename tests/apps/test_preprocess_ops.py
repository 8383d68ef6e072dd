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


def _files(directory):
    return tuple(str(path) for path in sorted(directory.iterdir()))


def _asked_for(directory, ops, api):
    source = open_image_source("files", str(directory))
    return np.stack(
        [sample.image for sample in Preprocessor(source=source, ops=ops, batch_size=3).samples(api)]
    )


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_efficientdet(directory, antialias, api):
    config = dataclasses.replace(
        efficientdet_config.get_config("efficientdet-nano"), image_size=(64, 96), antialias=antialias
    )
    loader = efficientdet_pipeline.EfficientDetPipeline(
        source=ImageListSource(_files(directory)),
        config=config,
        batch_size=len(pictures_on_disk.SIZES),
        training=False,
        with_targets=False,
    )
    expected = loader.pipeline.run()[0].as_array()
    found = _asked_for(directory, efficientdet_pipeline.preprocess_ops(config), api)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("letterbox", [True, False])
@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_yolov4(directory, letterbox, api):
    config = dataclasses.replace(
        yolov4_config.get_config("yolov4-tiny"), image_size=(64, 96), letterbox=letterbox
    )
    loader = yolov4_pipeline.YOLOv4Pipeline(
        source=ImageListSource(_files(directory)),
        config=config,
        batch_size=len(pictures_on_disk.SIZES),
        training=False,
        with_targets=False,
    )
    expected = loader.pipeline.run()[0].as_array()
    found = _asked_for(directory, yolov4_pipeline.preprocess_ops(config), api)
    np.testing.assert_allclose(found, expected, atol=1e-7)  # the border: 127 divided before or after
