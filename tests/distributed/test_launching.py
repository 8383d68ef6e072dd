"""launching.py finds the ranks of a job and leaves none of its processes behind."""

import psutil
import pytest

from tests.distributed import launching

STUBBORN = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whatever the launcher does
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_job_that_takes_too_long_is_killed_with_all_that_its_ranks_started(tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    with launching.start(2, [script]) as job:
        job.wait_for("ready", times=2)
        members = job.processes()
        assert len(members) >= 1 + 2 + 2 + 2  # horovodrun, its helpers, ranks, their children
        pids = launching.rank_pids(job)
        assert list(pids) == [0, 1]
        for rank, pid in pids.items():  # neither helpers nor children
            assert psutil.Process(pid).cmdline()[1:] == [str(script)]
            assert psutil.Process(pid).environ()["HOROVOD_RANK"] == str(rank)
        with pytest.raises(AssertionError, match=r"not done after 0\.1 s"):
            job.finish(timeout=0.1)
    assert not any(process.is_running() and process.status() != "zombie" for process in members)
