import pytest

from tests.common.coco_documents import SMALL, draw_images, write_json


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """The directory with the images of SMALL."""
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def json_of(tmp_path):
    """A function json_of(document=SMALL) that writes a json and returns its path."""
    return lambda document=SMALL: write_json(tmp_path, document)
