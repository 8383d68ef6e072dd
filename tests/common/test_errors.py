"""One line and exit code 1 for the user's mistakes; a traceback for ours."""

import pathlib
import subprocess
import sys

import pytest

from common.errors import unknown

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRAM = """
from absl import flags
from common import errors
flags.DEFINE_integer("number", 1, "", lower_bound=1)

def main():
    if flags.FLAGS.number == 2:
        raise errors.UserError("the number is 2: choose another")
    if flags.FLAGS.number == 3:
        raise ZeroDivisionError("ours")
    if flags.FLAGS.number == 5:
        raise KeyboardInterrupt
    if flags.FLAGS.number == 6:
        raise errors.StoppedError("run the same command to go on")

errors.run(main)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "stderr", "traceback"),
    [
        ([], 0, "", False),
        (["--number=2"], 1, "error: the number is 2: choose another", False),
        (["--number=3"], 1, "ZeroDivisionError: ours", True),
        (["--number=5"], 130, "interrupted; what was saved before stands", False),
        (["--number=6"], 75, "run the same command to go on", False),
        (["--nunber=4"], 1, "nunber", False),
        (["number=4"], 1, "unexpected argument 'number=4'", False),
    ],
)
def test_exit_codes(arguments, code, stderr, traceback):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == code
    assert stderr in done.stderr
    assert ("Traceback" in done.stderr) == traceback


def test_the_nearest_name_is_suggested():
    known = ["yolov4", "efficientdet-d0"]
    near = str(unknown("model", "efficientdet-do", known))
    assert near.startswith(
        "unknown model 'efficientdet-do': did you mean 'efficientdet-d0'? Known: yolov4, eff"
    )
    assert str(unknown("model", "resnet", known)) == "unknown model 'resnet': Known: yolov4, efficientdet-d0"
