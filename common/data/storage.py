"""Files on a disk and objects in a bucket, behind the same functions. An object's path is s3://bucket/key.

    paths = storage.match("s3://bucket/train-*.tar")     # sorted; also for a glob of files
    stats = storage.stat(paths)                          # {path: size and version}, where it exists
    part = storage.read(path, offset, size)              # of an object: one request
    with storage.local_copy(path) as file: ...           # the path of a file; of an object: one download
    storage.is_file(path), storage.read(path), storage.upload(file, path), storage.remove(path)

Objects need the package boto3 (the extra `s3`), which the first path of an object imports. The store is
Amazon's, or the one at AWS_ENDPOINT_URL. Credentials and region come from AWS's usual places: environment
variables, ~/.aws, or the role of the machine. DALI's readers open s3:// paths themselves and use the same;
call `check_dali` before they do.

A request that fails because the store is busy or does not answer is repeated after growing pauses. There are
at most AWS_MAX_ATTEMPTS attempts (default 3), and each failed one is logged. All errors of a store are
StoreErrors.
"""

import contextlib
import functools
import glob
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import TEMPORARY, cache_directory, user_errors
from common.progress import log

SCHEME = "s3://"
_CONNECT_SECONDS, _READ_SECONDS = 10, 60  # limits of a connection, and of a pause within an answer
_AT_ONCE = 4  # requests that transfer the parts of one large object
_DENIED = (401, 403)
_CERTIFICATES = pathlib.Path(
    "/etc/pki/tls/certs/ca-bundle.crt"
)  # the only file where DALI 2.4 looks for them
_DEBIAN_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class StoreError(UserError):
    """A store did not do what it was asked. The message is one line with the path and what to do."""


class Stat(NamedTuple):
    """A file or an object. If its content changes, so does the size or the version.

    Attributes:
        version: the ETag of an object; the time of change of a file, in ns.
    """

    path: str
    size: int
    version: str


def is_remote(path: str | os.PathLike | None) -> bool:
    """Returns whether a path, or a pattern of paths, names objects in a bucket."""
    return os.fspath(path or "").startswith(SCHEME)


def all_remote(paths: Sequence[str | os.PathLike]) -> bool:
    """Returns whether the paths are in a bucket; UserError if only some of them are.

    DALI 2.4 corrupts memory, or reads wrong bytes, if one reader gets both files and objects.
    """
    remote = [path for path in paths if is_remote(path)]
    if remote and len(remote) < len(paths):
        local = next(path for path in paths if not is_remote(path))
        raise UserError(f"{remote[0]} is in a bucket, {os.fspath(local)} is not: put all files in one place")
    return bool(remote)


def refuse_remote(flag: str, path: str | os.PathLike | None, advice: str) -> None:
    """Raises UserError with `advice` if `path`, the value of a flag, is in a bucket."""
    if is_remote(path):
        raise UserError(f"{flag}={os.fspath(path or '')} is in a bucket: {advice}")


def match(pattern: str) -> list[str]:
    """Returns the sorted paths that match a glob. `*` does not match a slash, `**/` matches any folders."""
    if not is_remote(pattern):
        return sorted(glob.glob(pattern, recursive=True))
    _split(pattern)
    is_match = re.compile(_expression(pattern)).fullmatch
    objects = _list(re.split(r"[*?[]", pattern, maxsplit=1)[0])
    return sorted(each.path for each in objects if is_match(each.path))


def stat(paths: Sequence[str]) -> dict[str, Stat]:
    """Returns {path: Stat} of the paths that exist. The objects of a folder need one request per thousand."""
    stats: dict[str, Stat] = {}
    folders: dict[str, list[str]] = {}
    for path in paths:
        if is_remote(path):
            folders.setdefault(path.rpartition("/")[0], []).append(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                stats[path] = Stat(path, status.st_size, str(status.st_mtime_ns))
    for siblings in folders.values():
        start = os.path.commonprefix(siblings)  # noqa: RUF071 (it need not end at a slash)
        objects = {each.path: each for each in _list(start)}
        stats |= {path: objects[path] for path in siblings if path in objects}
    return stats


def is_file(path: str) -> bool:
    """Returns whether there is such an object, or such a regular file."""
    return path in stat([path]) if is_remote(path) else os.path.isfile(path)


def read(path: str | os.PathLike, offset: int = 0, size: int = -1) -> bytes:
    """Reads `size` bytes from `offset` on, or everything from there if `size` is -1.

    Raises:
        StoreError, OSError: the object or the file cannot be read.
    """
    if not is_remote(path):
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    path = os.fspath(path)
    bucket, key = _split(path)
    end = "" if size < 0 else offset + size - 1
    part = {"Range": f"bytes={offset}-{end}"} if offset or size >= 0 else {}
    with _errors(path):
        content = _client().get_object(Bucket=bucket, Key=key, **part)["Body"].read()
    if 0 <= size != len(content):
        raise StoreError(f"{path} has {len(content)} of {size} bytes from byte {offset} on: upload it again")
    return content


@contextlib.contextmanager
def local_copy(path: str | os.PathLike) -> Iterator[str]:
    """Yields the path of a local file with the content of `path`. The copy of an object is temporary.

    The copy is in the cache directory, which needs room for it. A large object needs several requests, which
    run at the same time.
    """
    path = os.fspath(path)
    if not is_remote(path):
        yield path
        return
    _require_boto3()
    from boto3.s3.transfer import TransferConfig

    bucket, key = _split(path)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=cache_directory()) as directory:
        copy = os.path.join(directory, "copy")
        transfer = TransferConfig(max_concurrency=_AT_ONCE)
        # download_file would draw from Python's random numbers, and so change a model's first weights.
        with (
            user_errors(f"cannot copy {path} to {directory} (XDG_CACHE_HOME moves it)"),
            _errors(path),
            open(copy, "wb") as stream,
        ):
            _client().download_fileobj(bucket, key, stream, Config=transfer)
        yield copy


def upload(file: str | os.PathLike, path: str) -> None:
    """Makes or replaces an object, whose content is that of a local file. It appears when it is complete."""
    bucket, key = _split(path)
    with _errors(path):
        _client().upload_file(os.fspath(file), bucket, key)


def remove(path: str) -> None:
    """Removes an object, if there is one, or a file."""
    if not is_remote(path):
        pathlib.Path(path).unlink(missing_ok=True)
        return
    bucket, key = _split(path)
    with _errors(path):
        _client().delete_object(Bucket=bucket, Key=key)


def check_dali() -> None:
    """Raises UserError if DALI 2.4 could not read objects in this process.

    TensorFlow's library has symbols of OpenSSL. If it is loaded before DALI's, DALI's library for encryption
    uses them, and the first s3:// path ends the process.
    """
    modules = list(sys.modules)
    if "tensorflow" in modules and modules.index("tensorflow") < modules.index("nvidia.dali"):
        raise UserError(
            "DALI reads s3:// paths only if it is imported first: import nvidia.dali before tensorflow"
        )
    is_encrypted = (os.environ.get("AWS_ENDPOINT_URL") or "https:").startswith("https:")
    if is_encrypted and not _CERTIFICATES.exists() and os.environ.get("DALI_S3_NO_VERIFY_SSL", "0") == "0":
        raise UserError(
            f"DALI reads s3:// paths only if there are certificates at {_CERTIFICATES}: as root, "
            f"mkdir -p {_CERTIFICATES.parent} && ln -s {_DEBIAN_CERTIFICATES} {_CERTIFICATES}"
        )


# --- requests ---


def _split(path: str) -> tuple[str, str]:
    """Returns the bucket and the key of a path."""
    bucket, _, key = path.removeprefix(SCHEME).partition("/")
    if not bucket or glob.has_magic(bucket):
        raise UserError(f"{path} names no bucket: write s3://BUCKET/KEY, with * and ? only in KEY")
    return bucket, key


def _list(prefix: str) -> list[Stat]:
    """Returns all objects whose paths begin with `prefix`, except those that stand for a folder."""
    bucket, key = _split(prefix)
    with _errors(prefix):
        pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
        objects = [each for page in pages for each in page.get("Contents", ())]
    return [
        Stat(f"{SCHEME}{bucket}/{each['Key']}", each["Size"], each["ETag"].strip('"'))
        for each in objects
        if not each["Key"].endswith("/")
    ]


def _expression(pattern: str) -> str:
    """Returns the regular expression of a glob."""
    special = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = []
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^]]*\])", pattern):
        if part.startswith("[") and part.endswith("]"):
            letters = part[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("]", r"\]")
            parts.append(f"[{re.sub('^!', '^', letters)}]")
        else:
            parts.append(special.get(part) or re.escape(part))
    return f"(?s:{''.join(parts)})"


def _require_boto3() -> None:
    try:
        import boto3  # noqa: F401 (needed only for objects)
    except ModuleNotFoundError as error:
        raise UserError("paths like s3://bucket/key need boto3: pip install boto3") from error


@functools.cache
def _client() -> Any:
    """Returns boto3's client, which several threads may use."""
    _require_boto3()
    import boto3
    from botocore.config import Config

    options: dict[str, Any] = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _READ_SECONDS,
        "retries": {"mode": "standard"},
        "max_pool_connections": 32,
    }
    if os.environ.get("AWS_ENDPOINT_URL"):
        # Other stores may not know buckets as host names, nor the checksums that boto3 adds to uploads.
        options["s3"] = {"addressing_style": "path"}
        options["request_checksum_calculation"] = "when_required"
    with _errors("s3://"):
        # Unlike DALI, boto3 does not know AWS_REGION.
        client = boto3.Session().client(
            "s3", region_name=os.environ.get("AWS_REGION"), config=Config(**options)
        )
    client.meta.events.register("needs-retry.s3", _log_retry)
    return client


def forget_client() -> None:
    """Makes the next request use AWS's variables as they are then."""
    _client.cache_clear()


def _log_retry(attempts: int, response: Any, caught_exception: Any, request_dict: Any, **_: Any) -> None:
    """Logs a failed attempt. Returns None, so that botocore decides whether to repeat the request."""
    status = response[0].status_code if response else 0
    if caught_exception or status >= 500 or status == 429:
        problem = f"HTTP status {status}" if status else type(caught_exception).__name__
        log(f"{request_dict['url'].partition('?')[0]}: attempt {attempts} failed ({problem})")


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    """Turns errors of boto3 in the `with` block into StoreErrors."""
    _require_boto3()
    from boto3.exceptions import RetriesExceededError, S3UploadFailedError
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise StoreError(f"{path}: {_refusal(path, error.response)}") from error
    except S3UploadFailedError as error:  # hides the answer of the store
        raise StoreError(f"{path}: {_refusal(path, error.__context__.response)}") from error
    except RetriesExceededError as error:
        raise StoreError(f"{path}: {_failure(error.last_exception)}") from error
    except BotoCoreError as error:
        raise StoreError(f"{path}: {_failure(error)}") from error


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL") or "Amazon S3"


def _refusal(path: str, response: Any) -> str:
    """Explains an answer of the store that reports an error."""
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    bucket, _ = _split(path)
    if code == "NoSuchBucket":
        return f"{_endpoint()} has no bucket {bucket!r}: correct the name, or set AWS_ENDPOINT_URL"
    if status == 404:
        return f"{_endpoint()} has no such object: correct the path, or upload it again"
    if status in _DENIED:
        return (
            f"{_endpoint()} denies access ({code}): use credentials that may list and read bucket {bucket!r} "
            "(and write to it, for an output)"
        )
    if status in (412, 416):
        return "it has changed since it was listed: start again"
    if status in (301, 307, 400):
        return f"{_endpoint()} refuses the request ({code}): check AWS_REGION and AWS_ENDPOINT_URL"
    attempts = int(response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) + 1
    advice = "try again later, or raise AWS_MAX_ATTEMPTS"
    return f"{_endpoint()} answered with HTTP status {status} ({code}) {attempts} times: {advice}"


def _failure(error: Exception) -> str:
    """Explains why there was no answer, or no complete one."""
    from botocore import exceptions as boto

    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, boto.ReadTimeoutError):
        return f"{_endpoint()} did not answer within {_READ_SECONDS} s: try again later"
    if isinstance(error, boto.ResponseStreamingError | boto.IncompleteReadError):
        return f"{_endpoint()} cut its answer off: try again, and upload the object again if it happens again"
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return f"{_endpoint()} cannot be reached: check the network and AWS_ENDPOINT_URL"
    return " ".join(str(error).split()) or type(error).__name__
