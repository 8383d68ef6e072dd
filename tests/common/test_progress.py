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


def test_one_step_is_not_plural_in_the_line_of_a_progress_bar(capsys):
    for steps in (1, 2):
        bar = progress.Bar("decoding", steps)
        for _ in range(steps):
            bar.step()
    assert capsys.readouterr().err == "decoding: 1 step in 0 s\ndecoding: 2 steps in 0 s\n"
