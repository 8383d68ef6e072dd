import pathlib
from collections.abc import Callable

import pytest

from tests.gpu import pictures


@pytest.fixture(scope="session")
def pictures_dir(once: Callable) -> pathlib.Path:
    """Images of all KINDS: images/ and instances.json."""
    return once("pictures", pictures.draw)
