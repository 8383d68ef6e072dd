import concurrent.futures
import contextlib
import os
import shutil
import stat
import tempfile

import pytest

from common import files
from common.errors import UserError
from tests.common.training.small_model import full_disk


def contents(directory):
    """Returns {path: content}. No temporary file may be left."""
    assert not list(directory.glob(f"{files.TEMPORARY}*"))
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


# --- atomic writes ---


def test_a_file_is_replaced_and_others_stay(tmp_path):
    files.write_directory(
        tmp_path / "d", lambda new: [(new / n).write_text("old") for n in ("kept", "replaced")]
    )

    def fill(staged):
        (staged / "sub").mkdir()
        for name in ("replaced", "sub/added"):
            (staged / name).write_text("new")
        assert (tmp_path / "d" / "replaced").read_text() == "old"

    files.write_into(tmp_path / "d", fill)
    files.write_bytes(tmp_path / "x", b"bytes")
    expected = {"d/kept": "old", "d/replaced": "new", "d/sub/added": "new", "x": "bytes"}
    assert contents(tmp_path) == expected


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    files.write_directory(tmp_path / "d", lambda temporary: (temporary / "a").write_text("1"))
    files.write_directory(tmp_path / "d", lambda temporary: (temporary / "b").write_text("2"))
    assert contents(tmp_path) == {"d/b": "2"}


@pytest.mark.parametrize("fails", ["the writer", "the disk"])
@pytest.mark.parametrize("function", [files.write_file, files.write_directory, files.write_into])
def test_a_write_that_fails_leaves_the_old_and_nothing_else(tmp_path, monkeypatch, function, fails):
    path = tmp_path / "d"
    old = path if function is files.write_file else path / "a"
    old.parent.mkdir(exist_ok=True)
    old.write_text("old")
    before = contents(tmp_path)

    def write(temporary):
        (temporary if function is files.write_file else temporary / "a").write_text("ne")
        if fails == "the writer":
            full_disk()

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        function(path, write)
    assert contents(tmp_path) == before


def test_new_files_can_be_read_by_others_as_the_umask_says(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write_bytes(tmp_path / "x", b"")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_unfinished_work_is_cleared_away_and_nothing_else(tmp_path):
    (tmp_path / "x").write_text("kept")
    (tmp_path / f"{files.TEMPORARY}2-d").mkdir()
    (tmp_path / f"{files.TEMPORARY}2-d" / "a").write_text("half")
    files.remove_unfinished(tmp_path)
    assert contents(tmp_path) == {"x": "kept"}


class Killed(BaseException):
    """No product code catches this exception."""


@pytest.mark.parametrize("names", [[], ["a", "b"]], ids=["file", "directory"])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(tmp_path, monkeypatch, names):
    """If a kill interrupts the replacement of a directory, the directory can also be missing."""
    path, left = tmp_path / "x", 0

    def write(text):
        if names:
            files.write_directory(path, lambda new: [(new / name).write_text(text) for name in names])
        else:
            files.write_bytes(path, text.encode())

    def dying(real):
        def call(*args):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*args)

        return call

    for calls in range(12):
        write("old")
        left = calls
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(os, "fsync", dying(os.fsync))
            patch.setattr(os, "replace", dying(os.replace))
            patch.setattr(shutil, "rmtree", lambda *args, **options: None)
            write("new")
        found = {file.name: file.read_text() for file in (path, *path.glob("*")) if file.is_file()}
        assert found in [dict.fromkeys(names or ["x"], text) for text in ("old", "new")] or (
            names and not found
        )
        if left >= 0:
            break
    assert left >= 0 and calls > 1


# --- the cache ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "xdg"


def test_equal_content_is_one_file_in_a_private_directory(home):
    path = files.store_cached(b"abc", ".json")
    assert path.parent == home / "dali-detection" == files.cache_directory()
    assert path.suffix == ".json" and path.read_bytes() == b"abc"
    assert files.store_cached(b"abc", ".json") == path
    assert files.store_cached(b"abd", ".json") != path
    assert stat.S_IMODE(files.cache_directory().stat().st_mode) == 0o700


def test_many_writers_at_once(home):
    content = os.urandom(1 << 20)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: files.store_cached(content, ".bin"), range(16)))
    (path,) = paths
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_the_temporary_directory_is_second_choice_unless_others_may_write_it(home, tmp_path):
    home.write_text("a file where the directory should be")
    second = tmp_path / f"dali-detection-{os.getuid()}"
    assert files.cache_directory() == second
    message = f"neither {home}/dali.* nor {second} is private and writable: set XDG_CACHE"
    for mode in (0o770, 0o707):
        second.chmod(mode)
        with pytest.raises(UserError, match=message):
            files.store_cached(b"abc", ".json")


def test_a_made_file_is_made_once_and_one_that_cannot_be_written_is_named(home, monkeypatch):
    contents = iter([b"first" * 1000, b"second"])
    path = files.get_or_create("thing.json", lambda: next(contents))
    assert files.get_or_create("thing.json", lambda: next(contents)) == path
    assert path.read_bytes() == b"first" * 1000
    path.unlink()
    assert files.get_or_create("thing.json", lambda: next(contents)).read_bytes() == b"second"
    monkeypatch.setattr(files, "write_bytes", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*/other.json \(.* XDG_CACHE_HOME\): No space left"):
        files.get_or_create("other.json", bytes)
