"""Starts the Triton server of nvidia-pytriton's wheel on a CPU, with stand-ins for DALI and ONNX Runtime.

The wheel has only the Python backend. Triton runs the stand-ins in backends/ with it, under their names:
https://github.com/triton-inference-server/backend/blob/main/docs/python_based_backends.md
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.conftest import ROOT

PYTHON = ROOT / ".venv/triton/bin/python"
_SECONDS = 120  # until the server is ready


class Server(NamedTuple):
    process: subprocess.Popen
    http_port: int
    grpc_port: int
    log: pathlib.Path


@contextlib.contextmanager
def serve(repository: pathlib.Path, directory: pathlib.Path) -> Iterator[Server]:
    """Starts a server on free ports of this machine. `directory` gets its backends and its log."""
    (packages,) = PYTHON.parents[1].glob("lib/python3.*/site-packages")
    triton, stand_ins = packages / "pytriton" / "tritonserver", pathlib.Path(__file__).parent / "backends"
    backends, log = directory / "backends", directory / "server.log"
    shutil.copytree(stand_ins, backends)
    shutil.copytree(triton / "backends" / "python", backends / "python")
    version = packages.parent.name.removeprefix("python")
    shutil.copy(triton / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    http_port, grpc_port = _free_ports(2)
    command = [triton / "bin" / "tritonserver", f"--model-repository={repository}"]
    command += [f"--backend-directory={backends}", "--allow-metrics=false"]
    for protocol, port in (("http", http_port), ("grpc", grpc_port)):
        command += [f"--{protocol}-address=127.0.0.1", f"--{protocol}-port={port}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
    try:
        limit = time.monotonic() + _SECONDS
        while b"Started HTTPService" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < limit, log.read_text()[-5000:]
            time.sleep(0.2)
        yield Server(process, http_port, grpc_port, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
