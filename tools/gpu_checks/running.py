"""Runs cases one after another, each in a separate process, and writes the results to gpu_check.json."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import write_bytes
from common.progress import log
from tools.processes import ended_afterwards

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Lines that state why a program failed.
_REASON = re.compile(r"^error: |\b\w*(Error|Exception|Aborted)\b|^FAILED |^F\d{4} ")

GRACE = 10.0  # seconds

Row = dict[str, Any]  # stage, about, command, host; status, message, seconds, result
Read = Callable[[str], dict[str, Any]]  # stdout -> result; a result with the key "error" did not pass


def last_json(output: str) -> dict[str, Any]:
    return dict(json.loads(output.strip().rpartition("\n")[2]))


class Case(NamedTuple):
    """One command to run.

    Attributes:
        about: values that distinguish the case from the others of its stage.
        command: program and arguments; it runs in the project's folder.
        read: parses the output. If it raises an exception, the case fails.
        limit: time limit in seconds.
        left_out: why the case cannot run on this machine; "" if it can.
    """

    stage: str
    about: dict[str, Any]
    command: Sequence[str]
    read: Read = last_json
    limit: float = 900.0
    left_out: str = ""

    @property
    def name(self) -> str:
        about = self.about.items()
        return " ".join([self.stage, *(v if isinstance(v, str) else f"{k}={v}" for k, v in about)])


def run_all(cases: Sequence[Case], path: pathlib.Path, *, host: str, retry: bool) -> dict[str, Row]:
    """Runs all cases without a result for the same command and host. Saves each result at once.

    Args:
        host: number and names of the GPUs.
        retry: whether to repeat cases that did not pass.

    Returns:
        Name of a case -> its entry in the file, for all cases that ran on this host.

    Raises:
        UserError: gpu_check.json is damaged.
    """
    try:
        rows = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): remove it") from error
    for number, case in enumerate(cases, start=1):
        old = rows.get(case.name, {})
        key = {"command": [*case.command], "host": host}
        if key.items() <= old.items() and not (retry and old["status"] != "ok"):
            continue
        log(f"{number} of {len(cases)}: {case.name}")
        row = run(case, path.with_name("logs"))
        rows[case.name] = {"stage": case.stage, "about": case.about, **key, **row}
        write_bytes(path, json.dumps(rows, indent=1).encode())
        log(f"  {row['status']} in {row['seconds']:g} s {row['message'] or row['result']}")
    return {name: row for name, row in rows.items() if row.get("host") == host}


def run(case: Case, logs: pathlib.Path) -> Row:
    row: Row = {"status": "left out", "message": case.left_out, "seconds": 0.0, "result": {}}
    if case.left_out:
        return row
    logs.mkdir(parents=True, exist_ok=True)
    out, err = (logs / f"{re.sub(r'[^A-Za-z0-9.=]+', '-', case.name)}.{end}" for end in ("out", "err"))
    start = time.monotonic()
    try:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            code = _wait(case, stdout, stderr)
        output, errors = (path.read_text(errors="replace") for path in (out, err))
        if code:
            status = "crashed" if code < 0 else "failed"
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            message = f"{how}: {_reason(output + errors)}"
        else:
            row["result"] = case.read(output)
            message = row["result"].pop("error", "")
            status = "failed" if message else "ok"
    except subprocess.TimeoutExpired:
        status, message = "timed out", f"after {case.limit:g} s"
    except Exception as error:  # the program is missing, or `read` cannot parse its output
        status, message = "failed", f"no result: {type(error).__name__}: {error}"
    return row | {"status": status, "message": message, "seconds": round(time.monotonic() - start, 1)}


def _wait(case: Case, stdout: Any, stderr: Any) -> int:
    """Runs a case, and returns its exit code. Ends all its processes, also after a timeout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
    process = subprocess.Popen(case.command, cwd=ROOT, env=environment, start_new_session=True, **streams)
    with ended_afterwards(process, GRACE):
        return process.wait(case.limit)


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return ([line for line in lines if _REASON.search(line)] or lines)[-1].removeprefix("error: ")[:300]
