import concurrent.futures
import contextlib
import os
import shutil
import stat
import tempfile
import time

import numpy as np
import pytest

from common import files
from common.errors import UserError
from tests.common.training.small_model import full_disk


def contents(directory):
    """Returns {path: content}, and asserts that no temporary file is left."""
    assert not list(directory.glob(f"{files.TEMPORARY}*"))
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


# --- atomic writes ---


def test_write_into_replaces_and_adds_files_in_a_directory_and_leaves_its_other_files(tmp_path):
    for name in ("other", "replaced"):
        (tmp_path / name).write_text("old")

    def write(staged):
        (staged / "sub").mkdir()
        for name in ("replaced", "sub/added"):
            (staged / name).write_text("new")
        assert (tmp_path / "replaced").read_text() == "old"

    files.write_into(tmp_path, write)
    files.write_bytes(tmp_path / "x", b"bytes")
    expected = {"other": "old", "replaced": "new", "sub/added": "new", "x": "bytes"}
    assert contents(tmp_path) == expected


def test_write_directory_replaces_an_old_directory_and_keeps_none_of_its_files(tmp_path):
    files.write_directory(tmp_path / "d", lambda temporary: (temporary / "a").write_text("1"))
    files.write_directory(tmp_path / "d", lambda temporary: (temporary / "b").write_text("2"))
    assert contents(tmp_path) == {"d/b": "2"}


@pytest.mark.parametrize("fault", ["writer", "sync"])
@pytest.mark.parametrize("function", [files.write_file, files.write_directory, files.write_into])
def test_failed_write_of_a_file_or_directory_leaves_the_old_content_and_no_temporary_file(
    tmp_path, monkeypatch, function, fault
):
    path = tmp_path / "d"
    old = path if function is files.write_file else path / "a"
    old.parent.mkdir(exist_ok=True)
    old.write_text("old")
    before = contents(tmp_path)

    def write(temporary):
        (temporary if function is files.write_file else temporary / "a").write_text("ne")
        if fault == "writer":
            full_disk()

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        function(path, write)
    assert contents(tmp_path) == before


def test_mode_of_new_file_follows_the_umask(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write_bytes(tmp_path / "x", b"")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_cleanup_of_unfinished_writes_removes_only_temporary_files(tmp_path):
    (tmp_path / "x").write_text("finished")
    (tmp_path / f"{files.TEMPORARY}2-d").mkdir()
    (tmp_path / f"{files.TEMPORARY}2-d" / "a").write_text("half")
    files.remove_unfinished(tmp_path)
    assert contents(tmp_path) == {"x": "finished"}


class Killed(BaseException):
    """No product code catches this exception."""


@pytest.mark.parametrize("names", [[], ["a", "b"]], ids=["file", "directory"])
def test_kill_at_any_sync_or_rename_of_a_file_or_directory_write_leaves_it_entirely_old_or_new(
    tmp_path, monkeypatch, names
):
    """If a kill interrupts the replacement of a directory, the directory can also be missing."""
    path, calls_left = tmp_path / "x", 0

    def write(text):
        if names:
            files.write_directory(path, lambda new: [(new / name).write_text(text) for name in names])
        else:
            files.write_bytes(path, text.encode())

    def killed_at_last_call(function):
        def call(*args):
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                raise Killed
            return function(*args)

        return call

    for calls in range(12):
        write("old")
        calls_left = calls
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(os, "fsync", killed_at_last_call(os.fsync))
            patch.setattr(os, "replace", killed_at_last_call(os.replace))
            patch.setattr(shutil, "rmtree", lambda *args, **options: None)
            write("new")
        content = {file.name: file.read_text() for file in (path, *path.glob("*")) if file.is_file()}
        complete = [dict.fromkeys(names or ["x"], text) for text in ("old", "new")]
        assert content in complete or (names and not content)
        if calls_left >= 0:  # the write has ended
            break
    assert calls_left >= 0 and calls > 1


# --- the cache ---


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "xdg"


def test_equal_content_is_cached_in_one_file_of_a_private_directory(cache_home):
    path = files.store_cached(b"abc", ".json")
    assert path.parent == cache_home / "dali-detection" == files.cache_directory()
    assert path.suffix == ".json" and path.read_bytes() == b"abc"
    assert files.store_cached(b"abc", ".json") == path
    assert files.store_cached(b"abd", ".json") != path
    assert stat.S_IMODE(files.cache_directory().stat().st_mode) == 0o700


def test_cache_loses_what_a_killed_process_left_unfinished_a_day_ago(cache_home, monkeypatch):
    directory = cache_home / "dali-detection"
    for name in (".tmp-old", ".tmp-new"):
        (directory / name).mkdir(parents=True)
        (directory / name / "file").write_bytes(b"abc")
    directory.chmod(0o700)
    os.utime(directory / ".tmp-old", (0, time.time() - 24 * 3600 - 9))
    assert os.listdir(files.cache_directory()) == [".tmp-new"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encoding_of_a_text_file_is_that_of_its_byte_order_mark(tmp_path, encoding):
    (tmp_path / "text").write_text("größe", encoding)
    assert (tmp_path / "text").read_text(files.encoding_of(tmp_path / "text")) == "größe"


def test_parallel_writers_of_equal_content_leave_one_cache_file(cache_home):
    content = os.urandom(1 << 20)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        (path,) = set(pool.map(lambda _: files.store_cached(content, ".bin"), range(16)))
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_file_cache_falls_back_to_a_temporary_directory_and_is_refused_if_others_may_write_there(
    cache_home, tmp_path
):
    cache_home.write_text("a file instead of a directory")
    second = tmp_path / f"dali-detection-{os.getuid()}"
    assert files.cache_directory() == second
    message = f"neither {cache_home}/dali.* nor {second} is private and writable: set XDG_CACHE"
    for mode in (0o770, 0o707):
        second.chmod(mode)
        with pytest.raises(UserError, match=message):
            files.store_cached(b"abc", ".json")


def test_cache_file_is_made_only_if_it_is_missing_and_a_full_disk_error_names_it(cache_home, monkeypatch):
    contents = iter([b"first" * 1000, b"second"])
    path = files.get_or_create("thing.json", lambda: next(contents))
    assert files.get_or_create("thing.json", lambda: next(contents)) == path
    assert path.read_bytes() == b"first" * 1000
    path.unlink()
    assert files.get_or_create("thing.json", lambda: next(contents)).read_bytes() == b"second"
    monkeypatch.setattr(files, "write_bytes", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*/other.json \(.* XDG_CACHE_HOME\): No space left"):
        files.get_or_create("other.json", bytes)


@pytest.mark.parametrize("position", [0, 8, -1])
def test_cache_file_with_a_wrong_byte_or_that_is_cut_off_is_not_loaded(cache_home, position):
    files.save_cached("thing", b"0123456789")
    path = files.cache_directory() / "thing"
    assert files.load_cached("thing") == b"0123456789"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    for damaged in (content, path.read_bytes()[:-1], b""):
        path.write_bytes(damaged)
        assert not files.load_cached("thing")
    path.unlink()
    assert files.load_cached("thing") is None


# --- arrays ---

ARRAYS: dict[str, np.ndarray] = {
    "boxes": np.random.default_rng(0).random((5, 4)),
    "names": np.frombuffer(b"abc", np.uint8),
    "empty": np.zeros((0, 4), np.float32),
    "is_crowd": np.array([True, False]),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
}


def test_arrays_of_the_cache_are_read_as_they_were_saved_and_cannot_be_changed():
    files.save_arrays("arrays", {"text": "\u00e9", "numbers": [1, 2]}, ARRAYS)
    details, arrays = files.load_arrays("arrays")
    assert details == {"text": "\u00e9", "numbers": [1, 2]} and list(arrays) == list(ARRAYS)
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype and array.flags.aligned and not array.flags.writeable
        np.testing.assert_array_equal(array, ARRAYS[name])
    files.save_arrays("arrays", None, {"boxes": np.zeros(9)})  # the old file stays mapped
    np.testing.assert_array_equal(arrays["boxes"], ARRAYS["boxes"])
    files.remove_cached("arrays")
    files.remove_cached("arrays")
    assert files.load_arrays("arrays") is None


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:-1],
        lambda content: content[:100],
        lambda content: content + b"x",
        lambda content: bytes(8),
        lambda content: bytes(40),
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:16] + b"\xc1" + content[17:],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
)
def test_damaged_arrays_of_the_cache_are_not_read(damaged):
    files.save_arrays("damaged", {"a": 1}, ARRAYS)
    path = files.cache_directory() / "damaged"
    path.write_bytes(damaged(path.read_bytes()))
    assert files.load_arrays("damaged") is None


def test_arrays_that_the_disk_has_no_room_for_are_not_saved(monkeypatch):
    monkeypatch.setattr(files, "write_file", full_disk)
    files.save_arrays("full", None, ARRAYS)
    assert files.load_arrays("full") is None
