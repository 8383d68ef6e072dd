import re
import sys

from common import progress


def test_log_line_replaces_unfinished_progress_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress.Bar("decoding", 5).step()
    progress.log("stopped")
    assert re.fullmatch(
        r"\rdecoding: 0/5 .*\rdecoding: 1/5 .*\x1b\[K\r\x1b\[Kstopped\n", capsys.readouterr().err
    )
