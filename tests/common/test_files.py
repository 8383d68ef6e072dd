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


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    files.write_bytes(path, b"old")

    def fail_half_way(temporary):
        temporary.write_bytes(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.write_file(path, fail_half_way)

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        files.write_bytes(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x.txt", b"old")]


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "d"
    files.write_directory(path, lambda temporary: (temporary / "a").write_text("1"))
    files.write_directory(path, lambda temporary: (temporary / "b").write_text("2"))
    assert [p.name for p in path.iterdir()] == ["b"]

    def fail_half_way(temporary):
        (temporary / "c").write_text("3")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.write_directory(path, fail_half_way)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert [p.name for p in path.iterdir()] == ["b"]


def test_new_files_can_be_read_by_others_as_the_umask_says(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write_bytes(tmp_path / "x", b"")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_unfinished_work_is_cleared_away_and_nothing_else(tmp_path):
    (tmp_path / "x").write_text("kept")
    (tmp_path / f"{files.TEMPORARY}2-d").mkdir()
    (tmp_path / f"{files.TEMPORARY}2-d" / "a").write_text("half")
    files.remove_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "os.close"])
@pytest.mark.parametrize("function", ["write_bytes(path, b'new' * 10**6)", "write_directory(path, fill)"])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(tmp_path, call, function):
    """The process kills itself at its n-th call of a function, for every n.

    A directory may also be gone: it cannot be replaced in one step, and says so.
    """
    path = tmp_path / "x"
    is_file = function.startswith("write_bytes")
    script = f"""
import os, pathlib, signal, sys
from common import files
path, left = pathlib.Path(sys.argv[1]), int(sys.argv[2])
real = {call}
def dying(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
{call} = dying
def fill(temporary):
    for name in "ab":
        (temporary / name).write_bytes(b"new")
files.{function}
"""

    def write_old(directory):
        for name in "ab":
            (directory / name).write_bytes(b"old")

    for calls in range(12):
        if is_file:
            path.write_bytes(b"old")
        else:
            files.write_directory(path, write_old)
        done = subprocess.run([sys.executable, "-c", script, str(path), str(calls)], cwd=ROOT, check=False)
        if is_file:
            assert path.read_bytes() in (b"old", b"new" * 10**6)
        elif path.exists():
            content = {p.name: p.read_bytes() for p in path.iterdir()}
            assert content in ({"a": b"old", "b": b"old"}, {"a": b"new", "b": b"new"})
        if done.returncode == 0:
            break
    assert done.returncode == 0
    assert calls > 0


def test_files_join_others_in_a_directory_all_at_once(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("kept", "replaced"):
        (tmp_path / "d" / name).write_text("old")

    def fill(staged):
        (staged / "sub").mkdir()
        for name in ("replaced", "sub/added"):
            (staged / name).write_text("new")
        assert (tmp_path / "d" / "replaced").read_text() == "old"

    files.write_into(tmp_path / "d", fill)
    found = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"d/kept": "old", "d/replaced": "new", "d/sub/added": "new"}


def test_files_that_fail_to_come_leave_a_directory_as_it_was(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "kept").write_text("old")

    def fail_half_way(staged):
        (staged / "kept").write_text("new")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.write_into(tmp_path / "d", fail_half_way)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["d", "d/kept"]
    assert (tmp_path / "d" / "kept").read_text() == "old"


# --- the cache ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg"


def test_equal_content_is_one_file(home):
    path = files.store_cached(b"abc", ".json")
    assert path.parent == home / "dali-detection"
    assert path.suffix == ".json"
    assert files.store_cached(b"abc", ".json") == path
    assert files.store_cached(b"abd", ".json") != path
    assert path.read_bytes() == b"abc"


def test_many_writers_at_once(home):
    content = os.urandom(1 << 20)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: files.store_cached(content, ".bin"), range(16)))
    (path,) = paths
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]  # nothing unfinished stays


def test_the_directory_is_private(home):
    assert stat.S_IMODE(files.cache_directory().stat().st_mode) == 0o700


def test_the_temporary_directory_is_second_choice(home, tmp_path, monkeypatch):
    home.write_text("a file where the directory should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert files.cache_directory() == tmp_path / f"dali-detection-{os.getuid()}"


def test_a_directory_that_others_may_write_is_not_used(home, tmp_path, monkeypatch):
    home.write_text("a file where the directory should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"dali-detection-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        files.store_cached(b"abc", ".json")


def test_a_made_file_is_made_once():
    calls = []

    def make() -> bytes:
        calls.append(1)
        return b"content" * 1000

    path = files.get_or_create("thing.json", make)
    assert path.read_bytes() == b"content" * 1000 and files.get_or_create("thing.json", make) == path
    assert len(calls) == 1
    path.unlink()
    assert files.get_or_create("thing.json", make).exists() and len(calls) == 2
