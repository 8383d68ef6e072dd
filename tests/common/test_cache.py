"""The cache directory: private, content-addressed, safe with many writers."""

import concurrent.futures
import os
import stat
import tempfile

import pytest

from common import cache
from common.errors import UserError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg"


def test_equal_content_is_one_file(home):
    path = cache.store(b"abc", ".json")
    assert path.parent == home / "dali-detection"
    assert path.suffix == ".json"
    assert cache.store(b"abc", ".json") == path
    assert cache.store(b"abd", ".json") != path
    assert path.read_bytes() == b"abc"


def test_a_damaged_file_is_written_again(home):
    path = cache.store(b"abc", ".json")
    path.write_bytes(b"ab")
    assert cache.store(b"abc", ".json").read_bytes() == b"abc"


def test_many_writers_at_once(home):
    content = os.urandom(1 << 20)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: cache.store(content, ".bin"), range(16)))
    (path,) = paths
    assert path.read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing unfinished stays


def test_the_directory_is_private(home):
    assert stat.S_IMODE(cache.directory().stat().st_mode) == 0o700


def test_the_temporary_directory_is_second_choice(home, tmp_path, monkeypatch):
    home.write_text("a file where the directory should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache.directory() == tmp_path / f"dali-detection-{os.getuid()}"


def test_a_directory_that_others_may_write_is_not_used(home, tmp_path, monkeypatch):
    home.write_text("a file where the directory should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"dali-detection-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        cache.store(b"abc", ".json")


def test_a_made_file_is_made_once_and_again_when_it_is_damaged():
    calls = []

    def make() -> bytes:
        calls.append(1)
        return b"content" * 1000

    path = cache.made("thing.json", make)
    assert path.read_bytes() == b"content" * 1000 and cache.made("thing.json", make) == path
    assert len(calls) == 1
    path.write_bytes(path.read_bytes()[:3000])
    assert cache.made("thing.json", make).read_bytes() == b"content" * 1000 and len(calls) == 2
    path.unlink()
    assert cache.made("thing.json", make).exists() and len(calls) == 3
