"""Fixtures that write the small COCO document SMALL and its image files."""

import pytest

from tests.common.coco_documents import SMALL, draw_images, write_json


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def small(tmp_path):
    """A function that writes SMALL, or a given document in its place, to a json file and returns the path."""
    return lambda document=SMALL: write_json(tmp_path, document)
