import pytest

from tests.common.coco_documents import SMALL, draw_images, write_json


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def small(tmp_path):
    """Gives small(document=SMALL), which writes a json and returns its path."""
    return lambda document=SMALL: write_json(tmp_path, document)
