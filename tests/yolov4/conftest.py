import pytest

from tests.yolov4.rectangles import write_rectangles


@pytest.fixture(scope="session")
def rectangles(tmp_path_factory: pytest.TempPathFactory):
    """The source of the drawn rectangles, written once."""
    return write_rectangles(tmp_path_factory.mktemp("rectangles"))
