import keras
import pytest

from tests.yolov4.rectangles import write_rectangles
from yolov4.model import build_model


@pytest.fixture(scope="session")
def rectangles(tmp_path_factory: pytest.TempPathFactory):
    """A source for loaders, with the images that write_rectangles draws."""
    return write_rectangles(tmp_path_factory.mktemp("rectangles"))


@pytest.fixture(scope="session")
def published_yolov4() -> keras.Model:
    """The model yolov4 in its full size. Tests share it, so they must not change it."""
    return build_model("yolov4", 80, (608, 608))
