"""A SHA-256 in the passport of an exported file: runtimes detect with an overwritten weight without a word.

The digest is of the file's body, which is all but the passport, and of the passport itself:

saved_model   names and contents of all files but those of assets.extra, where the passport is
*.onnx        what stands before the passport, which is the file's last field
*.tflite      what stands before the archive with the passport
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KEY = "sha256"


def seal(passport: str, body: Iterable[bytes]) -> str:
    """The passport, JSON text, with the digest in it."""
    content = json.loads(passport)
    return json.dumps(content | {KEY: _digest(content, body)})


def is_whole(passport: Mapping[str, Any], body: Iterable[bytes]) -> bool:
    """Whether both are as `seal` saw them. Files of earlier versions have no digest, and pass."""
    content = dict(passport)
    expected = content.pop(KEY, None)
    return expected is None or expected == _digest(content, body)


def directory_body(path: pathlib.Path, left_out: str) -> Iterator[bytes]:
    """Names and contents of all files below a directory, but for those of its folder `left_out`."""
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.is_file() and name.parts[0] != left_out:
            yield name.as_posix().encode()
            yield file.read_bytes()


def _digest(content: Mapping[str, Any], body: Iterable[bytes]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for part in body:
        digest.update(part)
    return digest.hexdigest()
