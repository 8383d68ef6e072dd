"""TF_CONFIG: which workers a cluster of tf.distribute has, and which of them this process is.

    workers, rank = read(os.environ.get("TF_CONFIG"))
    meet(workers, rank)                              # returns when all are there
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

TensorFlow itself waits for missing workers without end, deaf to Ctrl-C, and does not compare what they were
told: so they meet here first, at the address that worker 0 will use afterwards.
"""

import contextlib
import json
import socket
import time
from collections.abc import Sequence

from common import progress
from common.errors import UserError

MEET_SECONDS = 900.0  # pods and Slurm steps can start minutes apart
PATIENCE_SECONDS = 5.0  # until it is said who is missing; and for one visitor's line
EXAMPLE = '{"cluster": {"worker": ["a:12345", "b:12345"]}, "task": {"type": "worker", "index": 0}}'


def read(text: str | None) -> tuple[list[str], int]:
    """What TF_CONFIG says.

    Args:
        text: its value; None where it is not set.

    Returns:
        The workers' addresses ("host:port"), a chief's first, and the index of this process among them.

    Raises:
        UserError: it is missing or wrong.
    """
    if not text:
        raise UserError(f"--strategy=multi_worker needs TF_CONFIG, on each worker its own: {EXAMPLE}")
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        jobs = {job: list(cluster[job]) for job in ("chief", "worker") if job in cluster}
        kind, index = task["type"], task["index"]
        own = jobs[kind][index] if type(index) is int and index >= 0 else None
        workers = [address for addresses in jobs.values() for address in addresses]
        ports = [int(address.rpartition(":")[2]) for address in workers]
        hosts = [address.rpartition(":")[0] for address in workers]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"TF_CONFIG={text} cannot be understood ({reason}): it looks like {EXAMPLE}"
        ) from error
    if own is None or not all(hosts) or not all(0 < port < 65536 for port in ports):
        raise UserError(f"TF_CONFIG={text} is not right: an index counts from 0, an address is host:port")
    if set(cluster) - set(jobs):
        raise UserError(f"TF_CONFIG has {sorted(cluster)} tasks: a chief and workers are all that train here")
    if len(set(workers)) < len(workers):
        raise UserError(f"TF_CONFIG={text} gives two workers the same address")
    return workers, index + (len(jobs.get("chief", [])) if kind == "worker" else 0)


def meet(workers: Sequence[str], rank: int, seconds: float = MEET_SECONDS) -> None:
    """Waits until all workers are there, with the same list and each with another index.

    Raises:
        UserError: one does not come in time, has another list, or an index that another one has; or this
            worker's port is taken.
    """
    if len(workers) == 1:
        return
    deadline = time.monotonic() + seconds
    listener = _listen(workers[rank])
    if rank == 0:
        with listener:
            _receive_all(listener, list(workers), deadline)
    else:
        listener.close()
        _visit(list(workers), rank, deadline)


def _listen(address: str) -> socket.socket:
    port = int(address.rpartition(":")[2])
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UserError(
            f"TF_CONFIG gives this worker {address}, and port {port} cannot be had ({error.strerror}): does "
            "another run use it?"
        ) from error


def _receive_all(listener: socket.socket, workers: list[str], deadline: float) -> None:
    """Worker 0's part: everybody says who they are, and waits for the answer."""
    with contextlib.ExitStack() as open_visits:
        visits: dict[int, socket.socket] = {}
        to_answer: list[socket.socket] = []
        told_at = time.monotonic() + PATIENCE_SECONDS
        problem = None
        while len(visits) < len(workers) - 1 and not problem:
            missing = [f"{i} ({workers[i]})" for i in range(1, len(workers)) if i not in visits]
            now = time.monotonic()
            if now > deadline:
                problem = f"TF_CONFIG: these workers have not come: {', '.join(missing)}"
                break
            if now > told_at:
                progress.log(f"waiting for workers {', '.join(missing)}")
                told_at = deadline
            listener.settimeout(min(told_at, deadline) - now + 0.01)
            try:
                visit = open_visits.enter_context(listener.accept()[0])
                visit.settimeout(PATIENCE_SECONDS)
                hello = json.loads(visit.makefile().readline(65536))
                rank, theirs = hello["rank"], hello["workers"]
            except (OSError, ValueError, KeyError, TypeError):  # nobody came; or a stranger did
                continue
            if theirs != workers:
                problem = f"TF_CONFIG names other workers on worker {rank} than on worker 0"
            elif rank in visits and not _has_left(visits[rank]):
                problem = f"TF_CONFIG gives two processes the index of worker {rank}, {workers[rank]}"
            visits[rank] = visit
            to_answer.append(visit)
        for visit in to_answer:
            with contextlib.suppress(OSError):
                visit.sendall(json.dumps({"problem": problem}).encode() + b"\n")
                visit.recv(1)  # who closes first keeps the port busy: let it be the visitor
    if problem:
        raise UserError(problem)


def _visit(workers: list[str], rank: int, deadline: float) -> None:
    """Every other worker's part."""
    host, _, port = workers[0].rpartition(":")
    told_at = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_SECONDS) as visit:
                visit.sendall(json.dumps({"rank": rank, "workers": workers}).encode() + b"\n")
                visit.settimeout(deadline + PATIENCE_SECONDS - time.monotonic())
                problem = json.loads(visit.makefile().readline())["problem"]
            if problem:
                raise UserError(problem)
            return
        if time.monotonic() > told_at:
            progress.log(f"worker {rank} waits for worker 0 ({workers[0]})")
            told_at = deadline
        time.sleep(0.2)
    raise UserError(f"TF_CONFIG: worker 0 ({workers[0]}) has not come, or not everybody to it")


def _has_left(visit: socket.socket) -> bool:
    visit.setblocking(False)
    try:
        return not visit.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        visit.settimeout(PATIENCE_SECONDS)
