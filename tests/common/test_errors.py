import subprocess
import sys

import pytest

from common.errors import unknown
from tests.conftest import ROOT

PROGRAMS = {
    "success": ("pass", [], 0, ""),
    "user-error": ("raise errors.UserError('it is 2: use 3')", [], 1, "error: it is 2: use 3"),
    "error-of-another-rank": ("raise errors.OtherRankError('2 is bad')", [], 1, ""),
    "bug": ("raise ZeroDivisionError('bug')", [], 1, "ZeroDivisionError: bug"),
    "interrupt": (
        "raise KeyboardInterrupt",
        [],
        130,
        "interrupted; everything that was saved before is kept",
    ),
    "stop-by-signal": ("raise errors.StoppedError('run this again')", [], 75, "run this again"),
    "unknown-flag": ("pass", ["--nunber=4"], 1, "error: unknown flag --nunber. --help lists all flags\n"),
    "wrong-value": ("pass", ["--v=x"], 1, "error: flag --verbosity=x: "),
    "argument-without-dashes": ("pass", ["number=4"], 1, "unexpected argument 'number=4'"),
}


@pytest.mark.parametrize(("body", "arguments", "code", "stderr"), PROGRAMS.values(), ids=PROGRAMS)
def test_program_ended_by_success_error_bug_signal_or_wrong_flag_has_its_exit_code_and_stderr(
    body, arguments, code, stderr
):
    program = f"from common import errors\ndef main():\n    {body}\nerrors.run(main)"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert stderr in done.stderr and bool(stderr) == bool(done.stderr)
    assert ("Traceback" in done.stderr) == ("bug" in body)


COMMANDS = [
    *(
        f"{app}/{name}.py"
        for app in ("efficientdet", "yolov4")
        for name in ("train", "eval", "infer", "export")
    ),
    *("tools/bench.py", "yolov4/fit_anchors.py", "examples/tiled_inference.py"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_typo_in_a_flag_is_answered_with_the_nearest_name_before_tensorflow_is_imported(command):
    arguments = ["-X", "importtime", ROOT / command, "--imgsize=64"]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    *imports, message = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert message == "error: unknown flag --imgsize. Did you mean --image_size? --help lists all flags"
    assert not [line for line in imports if line.split()[-1] == "tensorflow"]


@pytest.mark.parametrize(
    ("name", "hint"), [("efficientdet-do", " did you mean 'efficientdet-d0'?"), ("resnet", "")]
)
def test_error_about_an_unknown_name_suggests_a_known_name_only_if_it_is_similar(name, hint):
    message = str(unknown("model", name, ["yolov4", "efficientdet-d0"]))
    assert message == f"unknown model {name!r}:{hint} Known: yolov4, efficientdet-d0"


def test_required_flags_that_are_missing_are_named_in_one_line():
    command = [sys.executable, ROOT / "tools/convert.py", "--from=voc", "--to=coco"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: --input is missing; --output is missing. --help lists all flags\n"


def test_interrupt_during_imports_prints_a_one_line_message():
    program = "from common import errors\nerrors.parse_flags()\nraise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "interrupted; everything that was saved before is kept\n"
