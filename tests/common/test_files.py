"""A write gives the old file or the new one, never half of each; the cache is private and written once."""

import concurrent.futures
import os
import pathlib
import stat
import subprocess
import sys
import tempfile

import pytest

from common import files
from common.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


def contents(directory):
    """Path -> content of all files; nothing unfinished may stay."""
    assert not list(directory.glob(f"{files.TEMPORARY}*"))
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


def full_disk(*args):
    raise OSError(28, "No space left on device")


# --- atomic writes ---


def test_a_file_is_replaced_and_others_stay(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("kept", "replaced"):
        (tmp_path / "d" / name).write_text("old")

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
    if function is files.write_file:
        path.write_text("old")
    else:
        path.mkdir()
        (path / "a").write_text("old")
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


DYING = """
import os, pathlib, signal, sys
from common import files
path, left = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def dying(real):
    def call(*args):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return call
os.fsync, os.replace = dying(os.fsync), dying(os.replace)
def fill(temporary):
    for name in "ab":
        (temporary / name).write_text("new")
files.write_directory(path, fill) if path.is_dir() else files.write_bytes(path, b"new" * 10**6)
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(tmp_path, kind):
    """The process kills itself at its n-th call of os.fsync or os.replace, for every n.

    A directory may also be gone: it cannot be replaced in one step, and says so.
    """
    path = tmp_path / "x"

    def write_old(directory):
        for name in "ab":
            (directory / name).write_text("old")

    for calls in range(12):
        if kind == "file":
            path.write_text("old")
        else:
            files.write_directory(path, write_old)
        command = [sys.executable, "-c", DYING, str(path), str(calls)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if kind == "file":
            assert path.read_text() in ("old", "new" * 10**6)
        elif path.exists():
            assert contents(path) in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
        if done.returncode == 0:
            break
    assert done.returncode == 0
    assert calls > 1


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
    assert list(path.parent.iterdir()) == [path]  # nothing unfinished stays


def test_the_temporary_directory_is_second_choice_unless_others_may_write_it(home, tmp_path):
    home.write_text("a file where the directory should be")
    second = tmp_path / f"dali-detection-{os.getuid()}"
    assert files.cache_directory() == second
    for mode in (0o770, 0o707):
        second.chmod(mode)
        with pytest.raises(
            UserError, match=f"neither {home}/dali.* nor {second} can be written: set XDG_CACHE"
        ):
            files.store_cached(b"abc", ".json")


def test_a_made_file_is_made_once_and_one_that_cannot_be_written_is_named(home, monkeypatch):
    calls = []

    def make() -> bytes:
        calls.append(1)
        return b"content" * 1000

    path = files.get_or_create("thing.json", make)
    assert path.read_bytes() == b"content" * 1000 and files.get_or_create("thing.json", make) == path
    assert len(calls) == 1
    path.unlink()
    assert files.get_or_create("thing.json", make).exists() and len(calls) == 2
    monkeypatch.setattr(files, "write_bytes", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*/other.json: No space left .*; XDG_CACHE_HOME"):
        files.get_or_create("other.json", make)
