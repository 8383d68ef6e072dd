"""An object store for tests: moto's server, which can be told to answer with faults.

    python -m tests.object_store PORT

It ends when its standard input is closed. `Faults` is the other end, in the process of the tests.
"""

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

_CONTROL = "/-faults"


class Faults:
    """Controls the faults of the store at `address`."""

    def __init__(self, address: str) -> None:
        self._url = address + _CONTROL

    def set(
        self, kind: str, value: float = 0, *, request: str = "GET /", skip: int = 0, count: int = 10**9
    ) -> None:
        """Makes requests fail, and forgets the requests so far.

        Args:
            kind: "status" (answers with the HTTP status `value`), "stall" (answers after `value` seconds) or
                "cut" (sends half of the content).
            request: a part of `METHOD /BUCKET/KEY bytes=BEGIN-END` of the requests that may fail.
            skip, count: lets the first `skip` of these requests pass, and the next `count` fail.
        """
        fault = {"kind": kind, "value": value, "request": request, "skip": skip, "count": count}
        urllib.request.urlopen(self._url, json.dumps(fault).encode()).close()

    def clear(self) -> None:
        self.set("", count=0)

    def requests(self) -> list[str]:
        """Returns `METHOD /BUCKET/KEY bytes=BEGIN-END` of each request since the last `set`."""
        with urllib.request.urlopen(self._url) as answer:
            return json.load(answer)


class _FaultyStore:
    """A WSGI application around `store`."""

    def __init__(self, store: Callable) -> None:
        self._store, self._lock = store, threading.Lock()
        self._fault: dict[str, Any] = {}
        self._requests: list[str] = []
        self._number = 0  # of the requests that the fault is about

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        method, path, part = (environ.get(key, "") for key in ("REQUEST_METHOD", "PATH_INFO", "HTTP_RANGE"))
        if path == _CONTROL:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _answer(200, self._control(body), start_response)
        fault = self._next_fault(f"{method} {path} {part}".rstrip())
        if fault.get("kind") == "status":
            return _answer(fault["value"], b"<Error><Code>SlowDown</Code></Error>", start_response)
        if fault.get("kind") == "stall":
            time.sleep(fault["value"])
        content = self._store(environ, start_response)
        if fault.get("kind") == "cut":
            joined = b"".join(content)
            return [joined[: len(joined) // 2]]
        return content

    def _control(self, body: bytes) -> bytes:
        with self._lock:
            answer = json.dumps(self._requests).encode()
            if body:
                self._fault, self._requests, self._number = json.loads(body), [], 0
            return answer

    def _next_fault(self, request: str) -> dict[str, Any]:
        """Notes a request; returns the fault that it meets, or {}."""
        with self._lock:
            self._requests.append(request)
            fault = self._fault
            if not fault or fault["request"] not in request:
                return {}
            self._number += 1
            return fault if 0 < self._number - fault["skip"] <= fault["count"] else {}


def _answer(status: int, body: bytes, start_response: Callable) -> list[bytes]:
    start_response(f"{status} Status", [("Content-Length", str(len(body)))])
    return [body]


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    store = _FaultyStore(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, store, threaded=True)


if __name__ == "__main__":
    threading.Thread(target=_serve, args=(int(sys.argv[1]),), daemon=True).start()
    sys.stdin.read()
