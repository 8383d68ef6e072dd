import subprocess
import sys

import pytest

from common.errors import unknown
from tests.conftest import ROOT

ENDS = [
    ("pass", [], 0, ""),
    ("raise errors.UserError('it is 2: choose another')", [], 1, "error: it is 2: choose another"),
    ("raise errors.OtherRankError('which says so itself')", [], 1, ""),
    ("raise ZeroDivisionError('ours')", [], 1, "ZeroDivisionError: ours"),
    ("raise KeyboardInterrupt", [], 130, "interrupted; everything that was saved before is kept"),
    ("raise errors.StoppedError('the same command goes on')", [], 75, "the same command goes on"),
    ("pass", ["--nunber=4"], 1, "Unknown command line flag 'nunber'"),
    ("pass", ["number=4"], 1, "unexpected argument 'number=4'"),
]


@pytest.mark.parametrize(("body", "arguments", "code", "stderr"), ENDS)
def test_exit_codes(body, arguments, code, stderr):
    program = f"from common import errors\ndef main():\n    {body}\nerrors.run(main)"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert stderr in done.stderr and bool(stderr) == bool(done.stderr)
    assert ("Traceback" in done.stderr) == ("ours" in body)


def test_the_nearest_name_is_suggested():
    known = ["yolov4", "efficientdet-d0"]
    near = "unknown model 'efficientdet-do': did you mean 'efficientdet-d0'? Known: yolov4, efficientdet-d0"
    assert str(unknown("model", "efficientdet-do", known)) == near
    assert str(unknown("model", "resnet", known)) == "unknown model 'resnet': Known: yolov4, efficientdet-d0"


def test_interrupt_during_slow_imports_is_one_line():
    program = "from common import errors\nerrors.parse_flags()\nraise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "interrupted; everything that was saved before is kept\n"
