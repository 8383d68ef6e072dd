"""Fixtures: the small COCO document and its image files."""

import pytest

from tests.common.coco_documents import SMALL, draw_images, write_json


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def small(tmp_path):
    """A function that writes a variant of SMALL and returns its path."""
    return lambda document=SMALL: write_json(tmp_path, document)
