import keras
import pytest

from tests.yolov4.rectangles import write_rectangles
from yolov4.model import build_model


@pytest.fixture(scope="session")
def rectangles(tmp_path_factory: pytest.TempPathFactory):
    return write_rectangles(tmp_path_factory.mktemp("rectangles"))


@pytest.fixture(scope="session")
def published_yolov4() -> keras.Model:
    """Tests share the model, so they must not change it."""
    return build_model("yolov4", 80, (608, 608))
