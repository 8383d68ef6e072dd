import dataclasses

import numpy as np
import pytest

from common.data.sources import ImageListSource
from tests.tools.preprocessing import pictures_on_disk
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.preprocessor import Preprocessor

SETTING = {"efficientdet": "antialias", "yolov4": "letterbox"}
OPS = {  # operators from docs/preprocessing.md; {} stands for the part that varies
    "efficientdet": "fit:64x96,antialias={:d} | crop_mirror_normalize:64x96,x=0,y=0,fill=0,mean=imagenet",
    "yolov4": "{} | crop_mirror_normalize:std=255",
}
SHAPES = {True: "letterbox:64x96,centered=1,fill=127", False: "resize:64x96"}


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_evaluation_and_preprocess_give_the_same_pixels(app, tmp_path, api, setting):
    directory = pictures_on_disk.write(tmp_path)
    config = app.package.config.get_config(app.model_name)
    config = dataclasses.replace(config, image_size=(64, 96), **{SETTING[app.name]: setting})
    images = ImageListSource(tuple(str(path) for path in sorted(directory.rglob("*.png"))))
    options = {"batch_size": len(pictures_on_disk.SIZES), "training": False, "with_targets": False}
    loader = app.make_loader("dali_cpu", source=images, config=config, **options)
    expected = loader.pipeline.run()[0].as_array()
    source = open_image_source("files", str(directory))
    ops = OPS[app.name].format(SHAPES[setting] if app.name == "yolov4" else setting)
    asked = Preprocessor(source=source, ops=f"decode:exif=ignore | {ops}", batch_size=3)
    found = np.stack([sample.image for sample in asked.samples(api)])
    assert found.dtype == expected.dtype
    border = 1e-7 if app.name == "yolov4" else 0
    np.testing.assert_allclose(found, expected, rtol=border, atol=border)
