"""Files and objects behind one interface; a store that is missing, denies access, is busy or cuts answers."""

import http.server
import pathlib
import sys
import threading

import pytest

from common.data import storage
from common.errors import UserError
from tests.refusal import refusal

TREE = ("a.tar", "b.tar", "b[1].tar", "sub/c.tar", "sub/deep/d.tar", "sub/deep/e.txt", "x-10.tar", "x-2.tar")


@pytest.fixture
def answers(monkeypatch):
    """A store that gives prepared answers (status, headers, body) in order, the last one for ever."""
    prepared, requests = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            status, headers, body = prepared.pop(0) if len(prepared) > 1 else prepared[0]
            self.send_response(status)
            for name, value in ({"Content-Length": len(body)} | headers).items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    storage.forget_client()
    yield prepared, requests
    storage.forget_client()
    server.shutdown()
    server.server_close()


def failed(code: str, status: int):
    return status, {}, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()


@pytest.fixture
def tree(tmp_path) -> pathlib.Path:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_pattern_matches_the_same_names_in_a_bucket_as_on_a_disk(tree, bucket):
    for name in TREE:
        storage.upload(tree / name, f"{bucket}/{name}")
    for pattern in (
        "*.tar",
        "**",
        "**/*.tar",
        "sub/*",
        "?.tar",
        "[!a].tar",
        "b[[]1].tar",
        "x-[0-9].tar",
        "no*",
    ):
        paths = storage.match(f"{tree}/{pattern}")
        names = [path.removeprefix(f"{tree}/") for path in paths if pathlib.Path(path).is_file()]
        assert storage.match(f"{bucket}/{pattern}") == [f"{bucket}/{name}" for name in names], pattern


def test_object_is_written_read_in_parts_copied_and_removed_like_a_file(tmp_path, bucket):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    for path in (f"{bucket}/folder/object", f"{tmp_path}/other"):
        if storage.is_remote(path):
            storage.upload(tmp_path / "file", path)
        else:
            pathlib.Path(path).write_bytes(bytes(range(100)))
        assert storage.is_file(path)
        assert storage.read(path) == bytes(range(100))
        assert storage.read(path, 90) == bytes(range(90, 100))
        assert storage.read(path, 5, 3) == bytes([5, 6, 7])
        with storage.local_copy(path) as copy:
            assert pathlib.Path(copy).read_bytes() == bytes(range(100))
        assert pathlib.Path(copy).exists() != storage.is_remote(path)
        stats = storage.stat([path, f"{path}-2"])
        assert list(stats) == [path] and stats[path].size == 100
        storage.remove(path)
        storage.remove(path)
        assert not storage.is_file(path)


def test_version_of_an_object_in_a_bucket_changes_with_its_content_only(tmp_path, bucket):
    path, versions = f"{bucket}/object", []
    for content in ("one", "one", "two"):
        (tmp_path / "file").write_text(content)
        storage.upload(tmp_path / "file", path)
        versions.append(storage.stat([path])[path].version)
    assert versions[0] == versions[1] != versions[2]


def test_missing_bucket_and_missing_object_are_named(tmp_path, bucket):
    (tmp_path / "file").write_text("x")
    for call in (storage.match, storage.read, lambda path: storage.upload(tmp_path / "file", path)):
        message = refusal(call, "s3://no-such-bucket/train-0")
        assert message.startswith("s3://no-such-bucket/train-0: http://127.0.0.1:"), message
        assert message.endswith("has no bucket 'no-such-bucket': correct the name, or set AWS_ENDPOINT_URL")
    for read in (storage.read, lambda path: storage.local_copy(path).__enter__()):
        message = refusal(read, f"{bucket}/train-0")
        assert message.startswith(f"{bucket}/train-0: ") and "no such object" in message
    assert "names no bucket" in refusal(storage.match, "s3://buck*/train-0")


def test_read_past_the_end_of_an_object_is_refused(tmp_path, bucket):
    (tmp_path / "file").write_bytes(bytes(10))
    storage.upload(tmp_path / "file", f"{bucket}/object")
    assert "has 4 of 8 bytes from byte 6 on" in refusal(storage.read, f"{bucket}/object", 6, 8)
    assert "it has changed" in refusal(storage.read, f"{bucket}/object", 16, 8)


def test_missing_credentials_are_reported_with_their_variables(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, "/dev/null")
    storage.forget_client()
    message = refusal(storage.match, f"{bucket}/train-*")
    assert message.startswith(f"{bucket}/train-: no credentials: set AWS_ACCESS_KEY_ID"), message


def test_unreachable_store_is_named_after_the_attempts_that_the_user_allows(monkeypatch, answers, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    storage.forget_client()
    message = refusal(storage.read, "s3://data/train-0")
    assert message == (
        "s3://data/train-0: http://127.0.0.1:9 cannot be reached: check the network and AWS_ENDPOINT_URL"
    )
    log = capsys.readouterr().err.splitlines()
    url = "http://127.0.0.1:9/data/train-0"
    assert log == [f"{url}: attempt {i} failed (EndpointConnectionError)" for i in (1, 2)]


def test_denied_access_is_reported_without_another_attempt(answers):
    prepared, requests = answers
    prepared.append(failed("AccessDenied", 403))
    message = refusal(storage.read, "s3://data/train-0")
    assert "denies access (AccessDenied): use credentials that may list and read bucket 'data'" in message
    assert len(requests) == 1


def test_busy_store_is_asked_again_and_the_log_names_the_object(answers, capsys):
    prepared, requests = answers
    prepared += [failed("SlowDown", 503), (200, {}, b"content")]
    assert storage.read("s3://data/train-0") == b"content"
    assert requests == ["/data/train-0"] * 2
    assert capsys.readouterr().err.endswith("/data/train-0: attempt 1 failed (HTTP status 503)\n")


def test_store_that_stays_busy_is_given_up_after_the_limit_of_attempts(answers, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    prepared, requests = answers
    prepared.append(failed("SlowDown", 503))
    message = refusal(storage.read, "s3://data/train-0")
    assert message.startswith("s3://data/train-0: ")
    assert "answered with HTTP status 503 (SlowDown) 2 times: try again later" in message
    assert len(requests) == 2


def test_answer_that_is_cut_off_is_an_error(answers):
    prepared, _ = answers
    prepared.append((200, {"Content-Length": 100}, b"content"))
    assert "cut its answer off" in refusal(storage.read, "s3://data/train-0")


def test_path_of_an_object_without_boto3_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    storage.forget_client()
    for call in (storage.match, storage.read, lambda path: storage.local_copy(path).__enter__()):
        with pytest.raises(UserError, match="need boto3: pip install boto3"):
            call("s3://data/train-0")
