import pytest

from tests.oracle.fuzzed import FuzzedSet, write_fuzzed_set


@pytest.fixture(scope="session")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> FuzzedSet:
    """The synthetic images of fuzzed.py, written once for all tests."""
    return write_fuzzed_set(tmp_path_factory.mktemp("fuzzed"))
