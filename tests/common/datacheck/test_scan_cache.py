"""What is remembered of the files of a directory."""

import concurrent.futures
import os

import msgspec
import pytest

from common import cache
from common.datacheck.scan_cache import recall, remember


class Entry(msgspec.Struct, array_like=True):
    size: int
    said: str = ""


class Other(msgspec.Struct, array_like=True):
    said: str


ENTRIES = {"a.jpg": Entry(1, "x"), "b/c.jpg": Entry(2), os.fsdecode(b"caf\xe9.jpg"): Entry(3), "": Entry(4)}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def the_file():
    (path,) = (path for path in cache.directory().iterdir() if not path.name.startswith(".tmp-"))
    return path


def test_there_and_back(tmp_path):
    assert recall(tmp_path, 1, Entry) == {}
    remember(tmp_path, 1, ENTRIES)
    assert recall(tmp_path, 1, Entry) == ENTRIES
    assert list(recall(tmp_path, 1, Entry)) == list(ENTRIES)
    remember(tmp_path, 1, {})
    assert recall(tmp_path, 1, Entry) == {}


def test_each_directory_has_its_own_by_its_real_path(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to("one")
    remember(tmp_path / "one", 1, ENTRIES)
    assert recall(tmp_path / "link", 1, Entry) == ENTRIES
    assert recall(tmp_path / "two", 1, Entry) == {}


def test_another_version_or_another_kind_of_entry_is_nothing(tmp_path):
    remember(tmp_path, 1, ENTRIES)
    assert recall(tmp_path, 2, Entry) == {}
    assert recall(tmp_path, 1, Other) == {}


def test_a_damaged_file_is_nothing(tmp_path):
    remember(tmp_path, 1, ENTRIES)
    content = the_file().read_bytes()
    for damaged in (b"", content[:3], content[:-1], content + b"x", bytes(40), content[:4]):
        the_file().write_bytes(damaged)
        assert recall(tmp_path, 1, Entry) == {}
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        the_file().write_bytes(flipped)
        assert recall(tmp_path, 1, Entry) == {}
    the_file().write_bytes(content)
    assert recall(tmp_path, 1, Entry) == ENTRIES


def test_many_writers_at_once_leave_one_of_their_files_whole(tmp_path):
    versions = [{f"{i}.jpg": Entry(i, str(writer)) for i in range(20_000)} for writer in range(4)]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        writers = [pool.submit(remember, tmp_path, 1, entries) for entries in versions * 2]
        while not all(writer.done() for writer in writers):
            assert recall(tmp_path, 1, Entry) in [{}, *versions]
    assert recall(tmp_path, 1, Entry) in versions
