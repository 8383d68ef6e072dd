import pathlib
import subprocess
import sys
import time

import pytest

from tools import processes

END_CHILD = "signal.signal(15, lambda *_: (child.terminate(), child.wait(), sys.exit(1)))"
IGNORE = "signal.signal(15, signal.SIG_IGN)"
HANDLERS = {"SIGTERM ends another session": (END_CHILD, True), "SIGTERM is ignored": (IGNORE, False)}


def is_running(pid: str) -> bool:
    stat = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("on_sigterm", "new_session"), HANDLERS.values(), ids=HANDLERS)
def test_ending_a_process_also_ends_its_child_processes(tmp_path, on_sigterm, new_session):
    pid_file = tmp_path / "pid"
    start = f"{on_sigterm}; child = subprocess.Popen(['sleep', '600'], start_new_session={new_session})"
    write = f"open({str(pid_file)!r}, 'w').write(str(child.pid))"
    code = f"import signal, subprocess, sys; {start}; {write}; child.wait()"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    with processes.ended_afterwards(process, grace=1.0):
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.05)
    deadline = time.monotonic() + 30
    while is_running(pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid_file.read_text())
